"""lock.json of a run: the resolved recipe, the reasons for its values, and where the run started.

It is written once when a run starts, and never changed. A resumed run reads its recipe from here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from redline import __version__
from redline.cache import read_text
from redline.errors import UsageError, UserError, did_you_mean, is_secret_name, redact_all, secret_variables
from redline.jobs.base import is_job, job, options_of
from redline.planning.schedule import COSINE_CYCLE, ONE_CYCLE
from redline.recipe.aliases import canonical_keys
from redline.recipe.load import (
    Loaded,
    current_name,
    flatten,
    known_keys,
    nest,
    parse_overrides,
    replace_stop_conditions,
    validate,
)
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import RESUMABLE, Recipe
from redline.vocabulary import RECIPE_LOCK_FILE

SCHEMA = 1
# Keys that may hold a path, each with the values that are names and never paths.
_PATHS: dict[str, tuple[str, ...]] = {
    "data.source": ("embedded",),
    "data.tokenizer": ("base", "bytes", "gpt2"),
    **dict.fromkeys(("model.base", "model.init_from"), ()),
}
# The field that states what `weight` in data.source means. Older locks lack it: there a weight was a share of the
# samples for jobs that read windows of text, and multiplied the rows for jobs that read rows.
WEIGHTS, SHARES = "data_weights", "shares"
WITHHELD = "withheld"  # names of the environment variables whose values are replaced by ${NAME} in the recipe
_PACKAGES = ("torch", "triton", "numpy", "pydantic", "safetensors", "tokenizers")


def make_lock(
    name: str,
    run_id: str,
    resolved: Resolved,
    data: DataFacts,
    init_from: dict[str, Any] | None = None,
    python: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of lock.json, without the values of secret environment variables."""
    plan = resolved.plan_event()
    recipe, withheld = _without_values(resolved.recipe.model_dump(mode="json"))
    lock = {
        "schema": SCHEMA,
        "run_id": run_id,
        "created": time.time(),
        "began_in": str(Path.cwd()),
        "recipe_name": name,
        "recipe": recipe,
        WITHHELD: withheld,
        "choices": plan["choices"],
        "seed": resolved.recipe.train.seed,
        "parameters": plan["parameters"],
        "flops_per_token": plan["flops_per_token"],
        "memory_gib": plan["memory_gib"],
        "batch": plan["batch"],
        "data": vars(data),
        WEIGHTS: SHARES,
        "init_from": init_from,
        "machine": resolved.machine.facts(),
        "versions": versions(),
        "git": git_state(),
        **({"python": python} if python else {}),  # data and metrics that only a Python program has
    }
    return {key: redact_all(value) for key, value in lock.items()}


def _without_values(recipe: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace the values of secret environment variables by their names, and return those names as well.

    A resumed run takes the values from its environment again; events and reports need only the names.
    """
    secrets, withheld = secret_variables(), set()

    def replace_values(text: str) -> str:
        for name, value in secrets.items():
            if value in text:
                text = text.replace(value, f"${{{name}}}")
                withheld.add(name)
        return text

    return _map_texts(recipe, replace_values), sorted(withheld)


def _missing_values(withheld: Any) -> list[str]:
    """Return a note for each withheld variable that is not set: its value is in no file of the run."""
    names = [str(name) for name in withheld if name not in os.environ] if isinstance(withheld, list) else []
    return [f"{name} is not set, and lock.json has ${{{name}}} in place of its secret value" for name in names]


def _with_values(recipe: dict[str, Any], withheld: Any) -> dict[str, Any]:
    """Put back the values that `_without_values` replaced, as far as the environment has them."""
    names = [name for name in withheld if isinstance(name, str)] if isinstance(withheld, list) else []
    values = {f"${{{name}}}": os.environ[name] for name in names if is_secret_name(name) and name in os.environ}

    def restore_values(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    return _map_texts(recipe, restore_values) if values else recipe


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text in nested lists and mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value


def write_lock(run: Path, lock: dict[str, Any]) -> None:
    """Write lock.json atomically, so that no reader finds half of it."""
    temporary = run / f".{RECIPE_LOCK_FILE}.{os.getpid()}"
    text = json.dumps(lock, indent=1, ensure_ascii=False) + "\n"
    # File names may contain bytes that are not UTF-8; `backslashreplace` writes escapes for them that are valid JSON.
    temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.rename(run / RECIPE_LOCK_FILE)


def spelled_as_locked(recipe: str | None, run: Path) -> str | None:
    """Return the name of a shipped recipe as the run's lock has it, so that a command may use its older or newer name.

    Any other recipe, and any recipe where there is no run yet, is returned as it is.
    """
    if recipe is None or not (run / RECIPE_LOCK_FILE).is_file() or Path(recipe).exists():
        return recipe
    locked = str(read_lock(run)["recipe_name"])
    return locked if current_name(locked) == current_name(recipe) else recipe


def read_lock(run: Path) -> dict[str, Any]:
    """Read and check lock.json; a UserError says what is wrong with it."""
    try:
        lock = json.loads(read_text(run / RECIPE_LOCK_FILE))
        if lock["schema"] != SCHEMA:
            what = f"has schema {lock['schema']}, and this version of redline reads schema {SCHEMA}."
            fix = "Use the version that wrote it."
            raise UserError(what, where=str(run / RECIPE_LOCK_FILE), fix=fix)
        if not isinstance(lock["recipe"], dict) or not lock["recipe_name"] or not lock["run_id"]:
            raise ValueError("not a lock")
        return dict(lock)
    except FileNotFoundError:
        fix = "`redline runs` lists the runs in ./runs."
        raise UserError("is not a run: it has no lock.json.", where=str(run), fix=fix) from None
    except OSError as error:
        fix = "Make the file readable, or copy the run to a place where it is."
        raise UserError(
            f"cannot be read ({error.strerror or error}).", where=str(run / RECIPE_LOCK_FILE), fix=fix
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fix = "Restore it from a copy, or choose another run."
        raise UserError(f"is damaged ({type(error).__name__}).", where=str(run / RECIPE_LOCK_FILE), fix=fix) from None


def locked_recipe(
    run: Path, lock: dict[str, Any], overrides: list[str] | None = None, before: Iterable[list[str]] = ()
) -> Loaded:
    """Return the recipe of a run that is resumed with `overrides`; only a few keys may change (`RESUMABLE`).

    `before` holds the overrides of earlier resumes, each applied key by key. Of `overrides`, a typed train.steps,
    train.tokens or train.epochs replaces all three.
    """
    written = dict(flatten(_with_values(lock["recipe"], lock.get(WITHHELD))))
    base = resolve_paths(_migrate(written, lock), lock.get("began_in"))
    for words in before:
        flat, _, _ = canonical_keys(parse_overrides(words), "log")
        base |= {key: value for key, value in flat.items() if key.startswith(RESUMABLE)}
    changes, notes, problems = canonical_keys(parse_overrides(overrides or []), "command line")
    base, replaced = replace_stop_conditions(base, changes)
    frozen = [k for k, v in changes.items() if not k.startswith(RESUMABLE) and base.get(k) != v]
    if frozen:
        changed = []
        for key in frozen:
            hint = did_you_mean(key, known_keys(Recipe)) or "not a recipe key"
            if key in base:
                hint = f"it is {base[key]!r} in this run"
            changed.append(f"{key}={changes[key]!r} ({hint})")
        what = "only stop conditions and eval, checkpoint, monitor and parallel keys may change on resume, not"
        fix = "Start a new run to change them."
        raise UsageError(f"{what} {', '.join(changed)}.", where=str(run), fix=fix)
    tree, clashes = nest({**base, **changes})
    recipe = validate(tree, where=str(run), problems=[*problems, *clashes])
    return Loaded(str(lock["recipe_name"]), recipe, [*notes, *replaced, *_missing_values(lock.get(WITHHELD))])


def _migrate(flat: dict[str, Any], lock: dict[str, Any]) -> dict[str, Any]:
    """Convert the recipe of an older lock to today's keys, so that a resumed run behaves as before."""
    flat = _with_older_defaults(_migrate_weights(flat, lock))
    # Every lock of a version that has today's one_cycle contains train.pct_start.
    if flat.get("train.schedule") == ONE_CYCLE and "train.pct_start" not in flat:
        flat = {**flat, "train.schedule": COSINE_CYCLE}
    return flat


def _migrate_weights(flat: dict[str, Any], lock: dict[str, Any]) -> dict[str, Any]:
    """Convert the mixture of an older lock, so that the run reads the same samples in the same order.

    Older locks state a weight for every source of a list. For jobs that read rows it meant today's `repeat`; for jobs
    that read windows of text it was a share of the samples, as today.
    """
    sources = flat.get("data.source")
    name = flat.get("objective")
    by_rows = is_job(name) and job(str(name)).reads_rows(flat)
    if lock.get(WEIGHTS) == SHARES or not by_rows or not isinstance(sources, list):
        return flat
    parts = [{"source": p["source"], "repeat": p["weight"]} if _is_weighted(p) else p for p in sources]
    return {**flat, "data.source": parts}


def _is_weighted(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"source", "weight"}


def _with_older_defaults(flat: dict[str, Any]) -> dict[str, Any]:
    """Add the job's keys that are newer than the lock, with the values that give the behaviour of that time."""
    name = flat.get("objective")
    older = options_of(str(name)).defaults_in_older_locks if is_job(name) else {}
    return {f"{name}.{key}": value for key, value in older.items()} | flat


def resolve_paths(flat: dict[str, Any], began_in: Any) -> dict[str, Any]:
    """Resolve relative paths against the folder in which the run was started; it may be resumed from another."""
    if not isinstance(began_in, str) or began_in == str(Path.cwd()):
        return flat

    def resolved(value: Any, names: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [resolved(item, names) for item in value]
        if isinstance(value, dict):
            return {key: resolved(item, names) if key in ("source", "base") else item for key, item in value.items()}
        if not isinstance(value, str) or value in names or value.startswith(("/", "~")):
            return value
        try:
            return str(path) if (path := Path(began_in) / value).exists() else value
        except (OSError, ValueError):  # not a valid file name
            return value

    name = flat.get("objective")
    own = options_of(str(name)).path_keys if is_job(name) else ()
    paths = _PATHS | {f"{name}.{key}": () for key in own}
    return {key: resolved(value, paths[key]) if key in paths else value for key, value in flat.items()}


def versions() -> dict[str, str]:
    """Return the versions of redline, Python and the packages that matter to a result."""
    found = {"redline": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Return the git commit of the running code and whether it has changes; None outside of a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


# ----------------------------------------------------------------------------------------------------
# The model's identity: the recipe keys that change what a model computes from the same weights.
#
# It is written into every checkpoint. lock.json describes the model too, but it can be edited: with another
# `rope_theta` in it, the weights still fit, and the model silently computes something else.


# Keys of `model` that change how it is computed, initialised or trained, but not what it computes. A base is compared
# by its fingerprint, because its path may change.
_OTHER_KEYS = ("size", "attention", "kernels", "init", "embedding_std", "dropout", "base", "init_from", "lora")
_LORA_KEYS = ("r", "alpha", "target_modules", "rslora")


def model_identity(recipe: Recipe) -> dict[str, Any]:
    """Return the identity of the model of a resolved recipe: recipe keys and JSON values."""
    model = recipe.model.model_dump(mode="json")
    found = {f"model.{key}": value for key, value in model.items() if key not in _OTHER_KEYS}
    found |= {f"model.lora.{key}": model["lora"][key] for key in _LORA_KEYS}
    return found | job_options(recipe)


def job_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of the recipe's job that change what the model computes."""
    options = getattr(recipe, recipe.objective)
    own = options.model_dump(mode="json")
    return {f"{recipe.objective}.{key}": own[key] for key in options.model_keys}


def check_model_identity(recorded: dict[str, Any], recipe: Recipe, run: Path) -> None:
    """Raise a UserError if the identity in a checkpoint differs from the recipe in lock.json, and name the keys.

    Only recorded keys are compared: checkpoints of older versions record no model, or lack some keys.
    """
    then, now = recorded.get("model", {}), model_identity(recipe)
    differing = [f"{key} is {now[key]} and was {then[key]}" for key in now if then.get(key, now[key]) != now[key]]
    if differing:
        what = f"lock.json describes another model than the one in the checkpoint: {', '.join(differing)}."
        raise UserError(what, where=str(run), fix="Restore the original lock.json, or set these keys back.")
