"""The command that was meant where somebody typed data, a model or a run in place of a recipe, or an unknown verb.

Nothing here runs anything: the answer is a UsageError that names the full command, ready to be pasted.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from redline.errors import UsageError, UserError
from redline.runs.summary import RUNS

# What people type that is no verb here → the words that stand for it.
VERBS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("resume", "continue", "restart"), ("train", "--resume")),
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune", "tune", "sft", "lora", "qlora"), ("train", "qlora-smollm2")),
    **dict.fromkeys(("pretrain", "fit", "run", "start"), ("train",)),
    "sweep": ("train", "--sweep"),
    **dict.fromkeys(("generate", "chat", "infer", "inference", "predict", "complete"), ("sample",)),
    **dict.fromkeys(("evaluate", "evaluation", "test", "validate", "score"), ("eval",)),
    **dict.fromkeys(("compare", "summary"), ("report",)),
    **dict.fromkeys(("list", "ls", "status", "ps"), ("runs",)),
    **dict.fromkeys(("prune", "clean"), ("runs", "prune")),
    **dict.fromkeys(("kill", "cancel"), ("stop",)),
    **dict.fromkeys(("monitor", "dashboard", "live", "tensorboard"), ("watch",)),
    **dict.fromkeys(("merge", "convert", "save"), ("export",)),
    **dict.fromkeys(("tokenize", "tokenise", "preprocess"), ("prepare",)),
    **dict.fromkeys(("estimate", "dry-run"), ("plan",)),
    **dict.fromkeys(("submit", "slurm", "sbatch"), ("launch",)),
    **dict.fromkeys(("benchmark", "speed"), ("bench",)),
    **dict.fromkeys(("check", "diagnose", "info", "env"), ("doctor",)),
    **dict.fromkeys(("recipe", "models", "configs"), ("recipes",)),
}
_NEEDS_A_RUN = {"sample": "latest", "report": "latest"}  # clearer with one than without

TEXT_RECIPE, SMALL_TUNING, TUNING = "quickstart", "qlora-smollm2", "qlora-8b"
ROWS = "data.source=ROWS.jsonl"  # for the user to fill in
_DATA_FILES = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".bin", ".gz", ".zst", ".text")
_ROW_FILES = (".jsonl", ".ndjson")
_CHAT_KEYS = {"messages", "conversations", "prompt", "question", "instruction"}
_PEEK = 1 << 16  # bytes of a row file, to see what its first row has
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class Verbs(TyperGroup):
    """The group of all verbs; an unknown one that is well known elsewhere is answered with the command here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in VERBS and args[0] not in self.commands:
            refuse_verb(args[0], list(args[1:]))
        return super().resolve_command(ctx, args)


def refuse_verb(verb: str, rest: list[str]) -> None:
    """Raise with the command that stands for `redline VERB REST`."""
    words = [*VERBS[verb]]
    if words[0] == "train" and words[1:] not in (["--resume"], ["--sweep"]):
        recipe, rest = _sorted_words(rest)
        words = ["train", *_completed(recipe or words[1:2], tunes=len(words) > 1), *rest]
    else:
        needed = "latest" if words[1:] == ["--resume"] else _NEEDS_A_RUN.get(words[0])
        words += rest if needed is None or any(not word.startswith("-") for word in rest) else [needed, *rest]
    raise UsageError(f"{verb!r} is not a verb of redline.", fix=_did_you_mean(words))


def refuse_no_recipe(verb: str, names: list[str]) -> None:
    """Raise where one of the `names` after `redline VERB` is a run, data or a model, and no recipe."""
    kinds = {name: kind for name in names if (kind := _kind(name))}
    if not kinds:
        return
    name, kind = next(iter(kinds.items()))
    what = {"run": "a run", "data": "data", "chat": "data", "model": "a model"}[kind]
    typed = sys.argv[2:] if sys.argv[1:2] == [verb] else names
    if kind == "run":
        rest = [word for word in typed if word != name]
        raise UsageError(f"{name!r} is {what}, not a recipe.", fix=_did_you_mean(["train", "--resume", name, *rest]))
    given, rest = _sorted_words(typed)
    known = _completed(given, tunes="model" in kinds.values())
    raise UsageError(f"{name!r} is {what}, not a recipe.", fix=_did_you_mean([verb, *known, *rest]))


def _did_you_mean(words: list[str]) -> str:
    return f"Did you mean `redline {shlex.join(words)}`?"


def _sorted_words(typed: list[str]) -> tuple[list[str], list[str]]:
    """Split what was typed into a recipe with its data and model, as overrides, and the rest as it stands."""
    from redline.recipe.load import shipped

    given: list[str] = []
    rest: list[str] = []
    for place, word in enumerate(typed):
        value = place > 0 and typed[place - 1].startswith("--") and "=" not in typed[place - 1]  # of an option
        kind = "" if value or word.startswith("-") or "=" in word else _kind(word)
        if not value and word in shipped():
            given.insert(0, word)
        elif kind in ("data", "chat"):
            given.append(f"data.source={word}")
        elif kind == "model":
            given.append(f"model.base={word}")
        elif word.startswith(("data.source=", "model.base=")):
            given.append(word)
        else:
            rest.append(word)
    return given, rest


def _completed(given: list[str], *, tunes: bool) -> list[str]:
    """A recipe for the data and the model, where none was named, and a place for rows where a model has none."""
    keys = dict(word.split("=", 1) for word in given if "=" in word)
    base, source = keys.get("model.base"), keys.get("data.source")
    named = [word for word in given if "=" not in word]
    chat = source is not None and _kind(source) == "chat"
    tunes = tunes or base is not None
    if not named:
        if base is not None:
            named = [SMALL_TUNING if "smollm2" in base.lower() else TUNING]
        else:
            named = [SMALL_TUNING if tunes or chat else TEXT_RECIPE]
    places = [word for key in ("model.base", "data.source") for word in given if word.startswith(f"{key}=")]
    return [*named, *places, *([ROWS] if tunes and source is None else [])]


def _kind(name: str) -> str:
    """Return run, model, chat (rows with answers) or data (any other); "" for what may be a recipe, or is nothing."""
    from redline.recipe.load import shipped

    path = Path(name).expanduser()
    try:
        if name in shipped() or path.suffix in (".yaml", ".yml"):
            return ""
        if (path / "lock.json").is_file() or (RUNS / name / "lock.json").is_file():
            return "run"
        if path.is_dir():
            model = any((path / file).is_file() for file in ("config.json", "adapter_config.json"))
            return "model" if model or any(path.glob("*.gguf")) else _kind_of_rows(path)
        if path.is_file():
            known = path.suffix.lower() in _DATA_FILES and not _is_recipe(path)
            return "model" if path.suffix == ".gguf" else _kind_of_rows(path) if known else ""
        spelt = _HUB_ID.fullmatch(name) and path.suffix.lower() not in _DATA_FILES and not path.parent.exists()
    except (OSError, ValueError):  # a name too long for any file, or a folder that may not be entered
        return ""
    return _of_hub(name) if spelt else ""


def _is_recipe(path: Path) -> bool:
    """Return whether a small file holds sections of a recipe, whatever its name: recipes may also be JSON."""
    from redline.recipe.load import read_recipe
    from redline.recipe.schema import Recipe

    if path.stat().st_size > _PEEK:
        return False
    try:
        return bool(read_recipe(path).keys() & Recipe.model_fields.keys())
    except UserError:
        return False


def _of_hub(name: str) -> str:
    """A dataset if a shipped recipe trains on it, else a model."""
    from redline.recipe.load import read_recipe, shipped

    for path in shipped().values():
        tree = read_recipe(path)
        if str(tree.get("data", {}).get("source")).partition(":")[0] == name:
            return "data" if tree["objective"] in ("causal_lm", "block_diffusion") and "gsm8k" not in name else "chat"
    return "model"


def _kind_of_rows(path: Path) -> str:
    """Look at the first row of the first row file; text has none."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _ROW_FILES)[:1]
    for file in files:
        if file.suffix not in _ROW_FILES:
            continue
        with open(file, "rb") as opened:
            lines = opened.read(_PEEK).splitlines()
        try:
            row = json.loads(next((line for line in lines if line.strip()), b"null"))
        except ValueError:
            continue
        if isinstance(row, dict) and "text" not in row and _CHAT_KEYS & row.keys():
            return "chat"
    return "data"
