"""Name the command that was meant after an unknown verb, or after data, a model or a run in place of a recipe.

Nothing here runs anything: each function raises a UsageError that quotes the full command, ready to be pasted.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from redline.cli.help import VerbGroup
from redline.errors import UsageError, UserError
from redline.vocabulary import RUNS

Kind = Literal["run", "data", "conversations", "model"]

# Verbs of other tools → the words that stand for them here.
FOREIGN_VERBS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("resume", "continue", "restart"), ("train", "--resume")),
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune", "tune", "sft", "lora", "qlora"), ("train", "qlora-smollm2")),
    **dict.fromkeys(("pretrain", "fit", "run", "start"), ("train",)),
    "sweep": ("train", "--sweep"),
    **dict.fromkeys(("generate", "infer", "inference", "predict", "complete"), ("sample",)),
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
    **dict.fromkeys(("key", "explain", "options", "schema"), ("keys",)),
}
_VERBS_ABOUT_A_RUN = ("sample", "report")  # the suggestion adds `latest` if no run was named

_TEXT_RECIPE, _SMALL_FINETUNING_RECIPE, _FINETUNING_RECIPE = "quickstart", "qlora-smollm2", "qlora-8b"
_ROWS_PLACEHOLDER = "data.source=ROWS.jsonl"  # for the user to fill in
_DATA_SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".bin", ".gz", ".zst", ".text")
_ROW_SUFFIXES = (".jsonl", ".ndjson")
_CONVERSATION_KEYS = {"messages", "conversations", "prompt", "question", "instruction"}
_MOST_BYTES_READ = 1 << 16  # of a file, to see what it holds
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class Verbs(VerbGroup):
    """The group of all verbs. After a verb of another tool, the error names the one to use here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Shell completion parses unfinished command lines and must not print errors into them.
        if args and args[0] in FOREIGN_VERBS and args[0] not in self.commands and not ctx.resilient_parsing:
            refuse_verb(args[0], list(args[1:]))
        return super().resolve_command(ctx, args)


def refuse_verb(verb: str, rest: list[str]) -> None:
    """Raise a UsageError that names the command for `redline VERB REST`, where VERB is another tool's."""
    words = [*FOREIGN_VERBS[verb]]
    if words[0] == "train" and words[1:] not in (["--resume"], ["--sweep"]):
        recipe, rest = _split_recipe(rest)
        words = ["train", *_complete_recipe(recipe or words[1:2], finetunes=len(words) > 1), *rest]
    else:
        needs_run = words[1:] == ["--resume"] or words[0] in _VERBS_ABOUT_A_RUN
        names_run = any(not word.startswith("-") for word in rest)
        words += ["latest", *rest] if needs_run and not names_run else rest
    raise UsageError(f"redline has no verb {verb!r}.", fix=_did_you_mean(words))


def refuse_non_recipes(verb: str, names: list[str]) -> None:
    """Raise a UsageError if one of the `names` typed after `redline VERB` is a run, data or a model."""
    kinds = {name: kind for name in names if (kind := _kind(name)) is not None}
    if not kinds:
        return
    name, kind = next(iter(kinds.items()))
    what = {"run": "a run", "data": "data", "conversations": "data", "model": "a model"}[kind]
    typed = sys.argv[2:] if sys.argv[1:2] == [verb] else names
    if kind == "run":
        rest = [word for word in typed if word != name]
        raise UsageError(f"{name!r} is {what}, not a recipe.", fix=_did_you_mean(["train", "--resume", name, *rest]))
    recipe, rest = _split_recipe(typed)
    words = [verb, *_complete_recipe(recipe, finetunes="model" in kinds.values()), *rest]
    raise UsageError(f"{name!r} is {what}, not a recipe.", fix=_did_you_mean(words))


def _did_you_mean(words: list[str]) -> str:
    return f"Did you mean `redline {shlex.join(words)}`?"


def _split_recipe(typed: list[str]) -> tuple[list[str], list[str]]:
    """Split typed words into a recipe with its data and model, the latter two as overrides, and the other words."""
    from redline.recipe.load import current_name, shipped

    recipe: list[str] = []
    rest: list[str] = []
    for index, word in enumerate(typed):
        is_option_value = index > 0 and typed[index - 1].startswith("--") and "=" not in typed[index - 1]
        kind = None if is_option_value or word.startswith("-") or "=" in word else _kind(word)
        if not is_option_value and current_name(word) in shipped():
            recipe.insert(0, word)
        elif kind in ("data", "conversations"):
            recipe.append(f"data.source={word}")
        elif kind == "model":
            recipe.append(f"model.base={word}")
        elif word.startswith(("data.source=", "model.base=")):
            recipe.append(word)
        else:
            rest.append(word)
    return recipe, rest


def _complete_recipe(words: list[str], *, finetunes: bool) -> list[str]:
    """Add a recipe that suits the data and the model if `words` names none, and a placeholder for missing rows."""
    keys = dict(word.split("=", 1) for word in words if "=" in word)
    base, source = keys.get("model.base"), keys.get("data.source")
    recipe = [word for word in words if "=" not in word]
    finetunes = finetunes or base is not None
    if not recipe and base is not None:
        recipe = [_SMALL_FINETUNING_RECIPE if "smollm2" in base.lower() else _FINETUNING_RECIPE]
    elif not recipe:
        has_answers = source is not None and _kind(source) == "conversations"
        recipe = [_SMALL_FINETUNING_RECIPE if finetunes or has_answers else _TEXT_RECIPE]
    overrides = [word for key in ("model.base", "data.source") for word in words if word.startswith(f"{key}=")]
    return [*recipe, *overrides, *([_ROWS_PLACEHOLDER] if finetunes and source is None else [])]


def _kind(name: str) -> Kind | None:
    """Return what a typed name is, judged by the files it names; None if it may be a recipe or names nothing."""
    from redline.recipe.load import current_name, shipped

    path = Path(name).expanduser()
    try:
        if current_name(name) in shipped() or path.suffix in (".yaml", ".yml"):
            return None
        if (path / "lock.json").is_file() or (RUNS / name / "lock.json").is_file():
            return "run"
        if path.is_dir():
            model = any((path / file).is_file() for file in ("config.json", "adapter_config.json"))
            return "model" if model or any(path.glob("*.gguf")) else _kind_of_data(path)
        if path.is_file():
            is_data = path.suffix.lower() in _DATA_SUFFIXES and not _is_recipe(path)
            return "model" if path.suffix == ".gguf" else _kind_of_data(path) if is_data else None
        is_hub_id = _HUB_ID.fullmatch(name) and path.suffix.lower() not in _DATA_SUFFIXES and not path.parent.exists()
    except (OSError, ValueError):  # a name too long for any file, or a folder that may not be entered
        return None
    return _kind_of_hub_id(name) if is_hub_id else None


def _is_recipe(path: Path) -> bool:
    """Return whether a small file holds sections of a recipe, whatever its name: a recipe may also be JSON."""
    from redline.recipe.load import read_recipe
    from redline.recipe.schema import Recipe

    if path.stat().st_size > _MOST_BYTES_READ:
        return False
    try:
        return bool(read_recipe(path).keys() & Recipe.model_fields.keys())
    except UserError:
        return False


def _kind_of_hub_id(name: str) -> Kind:
    """Return the kind of data if a shipped recipe trains on this dataset; any other id is taken for a model."""
    from redline.jobs.base import job
    from redline.recipe.load import flatten, read_recipe, shipped

    for path in shipped().values():
        recipe = read_recipe(path)
        if str(recipe.get("data", {}).get("source")).partition(":")[0] == name:
            reads_rows = job(str(recipe["objective"])).reads_rows(dict(flatten(recipe)))
            return "conversations" if reads_rows or "gsm8k" in name else "data"
    return "model"


def _kind_of_data(path: Path) -> Kind:
    """Return whether the first row of the first row file is a conversation or a question; any other data is text."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _ROW_SUFFIXES)[:1]
    for file in files:
        if file.suffix not in _ROW_SUFFIXES:
            continue
        with open(file, "rb") as opened:
            lines = opened.read(_MOST_BYTES_READ).splitlines()
        try:
            row = json.loads(next((line for line in lines if line.strip()), b"null"))
        except ValueError:
            continue
        if isinstance(row, dict) and "text" not in row and _CONVERSATION_KEYS & row.keys():
            return "conversations"
    return "data"
