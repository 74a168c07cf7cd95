"""Putting a run together: recipe → data → plan, and then `OneRun`."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from redline.errors import UsageError
from redline.launch.session import Leaving, OneRun, Quiet, join_ranks, refuse_run, resolved_alike
from redline.recipe.horizon import recipe_steps, remaining_fields
from redline.recipe.load import Loaded, load, validate
from redline.recipe.lock import locked_recipe, read_lock
from redline.recipe.resolve import Resolved, adapt_to_world, resolve
from redline.recipe.schema import RESUMABLE, Recipe
from redline.runs.console import Console
from redline.runs.events import Event, number, read_events
from redline.runs.monitor import View, price_notes, price_of
from redline.runs.summary import RUNS, refuse_links, refuse_too_long, refuse_unreadable, resolve_run
from redline.runs.trackers import require_packages
from redline.training.heartbeat import HEARTBEAT, PREPARING, STARTING
from redline.training.signals import preemption_signals
from redline.training.state import OWN_ENDS
from redline.units import format_count
from redline.vocabulary import EVENTS_FILE, RECIPE_LOCK_FILE

if TYPE_CHECKING:
    from redline.data.read_stats import Progress
    from redline.evaluate.init_from import Initial
    from redline.training.distributed import Ranks
from collections.abc import Mapping, Sequence


def new_run(loaded: Loaded, directory: Path | None, overrides: list[str], *, dry_run: bool, gpus: int = 1) -> int:
    path = fresh_run(loaded, directory)
    if directory is None and not dry_run and os.environ.get("RANK", "0") == "0":
        path = _reserved(path, loaded.name)
    return _start(loaded, path, dry_run=dry_run, resumed=False, overrides=overrides, gpus=gpus)


def _reserved(path: Path, name: str) -> Path:
    """Made now, for another may begin in the same second; gone again if nothing comes of it."""
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            taken, path = path, fresh_name(name)
            if path != taken:
                continue
            return path  # ./runs is no folder: whoever writes there says so
        except OSError:
            return path  # whoever writes there says what is wrong
        atexit.register(_remove_empty, path)
        return path


def _remove_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def fresh_run(loaded: Loaded, directory: Path | None) -> Path:
    """Where it goes; what cannot be is refused."""
    path = directory or fresh_name(loaded.name)
    refuse_unreadable(path)
    refuse_too_long(path)
    if path.resolve() in (Path.cwd(), RUNS.resolve()):
        what = "is where runs lie, each in a folder of its own." if path.resolve() != Path.cwd() else "is this folder."
        raise UsageError(what, where=str(path), fix="Name a new one: --run runs/NAME.")
    if directory is not None and path.is_dir() and path.resolve() in _data_folders(loaded.recipe):
        raise UsageError("holds the data to train on.", where=str(path), fix="Choose another --run.")
    refuse_run(path)
    if path.exists() and not path.is_dir():
        raise UsageError("is a file, not a directory.", where=str(path), fix="Choose another --run.")
    return path


def _data_folders(recipe: Recipe) -> set[Path]:
    return {Path(part.source).expanduser().resolve() for part in recipe.data.parts}


def resume_run(name: str, overrides: list[str], *, dry_run: bool, gpus: int = 1) -> int:
    path, loaded = resumable(name, overrides)
    if not dry_run and _is_finished(path, loaded.recipe, changed=bool(overrides)):
        return 0
    return _start(loaded, path, dry_run=dry_run, resumed=True, overrides=overrides, gpus=gpus)


@dataclass(frozen=True)
class Due:
    """What `--continue` does with a directory."""

    loaded: Loaded
    resumed: bool
    changes: list[str]  # all overrides of a run that starts; of one that is resumed, those that are new


def due_in(path: Path, given: str | None, overrides: list[str]) -> Due:
    """Resume the run that the directory holds, or else start `given` there.

    The same command is repeated at every restart, so overrides that the last such command had are not changes: the run
    has them already, or somebody has changed them since by `--resume`.
    """
    if not os.path.isfile(path / RECIPE_LOCK_FILE):  # noqa: PTH113 - unlike Path.is_file, false for a name that is too long
        loaded = load(given or "quickstart", overrides)
        fresh_run(loaded, path)
        return Due(loaded, False, overrides)
    refuse_unreadable(path)
    refuse_links(path)
    lock = read_lock(path)
    refuse_other_recipe(path, given, str(lock["recipe_name"]))
    before = _last_command(path)
    typed = _by_key(overrides)
    if before is None:  # the first command is not known: the lock has what it fixed, and the rest may change
        changes = [word for key, word in typed.items() if key.startswith(RESUMABLE)]
    else:
        changes = [word for key, word in typed.items() if before.get(key) != word]
    return Due(locked_recipe(path, lock, changes, read_events(path / EVENTS_FILE).resume_overrides()), True, changes)


def continue_run(path: Path, given: str | None, overrides: list[str], *, dry_run: bool, gpus: int = 1) -> int:
    due = due_in(path, given, overrides)
    if due.resumed and not dry_run and _is_finished(path, due.loaded.recipe, changed=bool(due.changes)):
        return 0
    resumed, changes = due.resumed, due.changes
    return _start(
        due.loaded, path, dry_run=dry_run, resumed=resumed, overrides=changes, gpus=gpus, continued_with=overrides
    )


def refuse_other_recipe(path: Path, given: str | None, name: str) -> None:
    """A run goes on with its own recipe, so a command that names another one is a mistake."""
    if given is None or name in (given, Path(given).stem):
        return
    what = f"holds a run of {name}, which can only continue as that."
    raise UsageError(what, where=str(path), fix=f"Leave {given} out, or choose another --run.")


def _last_command(run: Path) -> dict[str, str] | None:
    """Return the overrides of the last command that started the run or continued it, by key; None if the run's log does
    not have them, as when it was killed before its first event."""
    starts = read_events(run / EVENTS_FILE).of_type("start")
    commands = [event.get("continued_with") or event.get("overrides") for event in starts[:1]]
    commands += [event["continued_with"] for event in starts[1:] if isinstance(event.get("continued_with"), list)]
    return _by_key([str(word) for word in commands[-1]]) if commands and isinstance(commands[-1], list) else None


def _by_key(words: list[str]) -> dict[str, str]:
    """Map each key to its last override."""
    return {word.removeprefix("+").partition("=")[0]: word for word in words}


def resumable(name: str, overrides: list[str]) -> tuple[Path, Loaded]:
    path, selector = resolve_run(name, RUNS)
    refuse_unreadable(path)
    if selector is not None:
        fix = f"redline train --resume {shlex.quote(str(path))}"
        raise UsageError("a run goes on from its newest checkpoint.", where=name, fix=f"Leave out @{selector}: {fix}")
    return path, locked_recipe(path, read_lock(path), overrides, read_events(path / EVENTS_FILE).resume_overrides())


def _is_finished(path: Path, recipe: Recipe, *, changed: bool) -> bool:
    """Whether nothing is left to train; rank 0 says so."""
    said = nothing_left(path, recipe, changed=changed)
    if said and os.environ.get("RANK", "0") == "0":
        typer.echo(said, err=True)
    return said is not None


def nothing_left(path: Path, recipe: Recipe, *, changed: bool) -> str | None:
    """Return what to print instead of resuming a run that has reached its end and whose last checkpoint is whole, or
    None where there is something left to do.

    Where keys are changed, only the counted steps and the patience are compared with the new recipe: a new
    `train.hours` or `train.target_loss` may leave something to do, which the trainer finds out itself."""
    from redline.training.checkpoint import newest_valid, step_name

    last: Event = read_events(path / EVENTS_FILE).stop or {}
    reason, step = str(last.get("reason")), number(last, "step")
    if reason not in OWN_ENDS or step is None:
        return None
    newest = newest_valid(path / "checkpoints")
    if newest is None or newest.name != step_name(int(step)):
        return None
    if changed and not _still_at_its_end(path, recipe, reason, int(step), newest):
        return None
    keys = OWN_ENDS[reason]
    later = next((key for key in keys if _value(recipe, key) is not None), keys[0])
    more = f"redline train --resume {shlex.quote(str(path))} {later}=…"
    return f"finished   at step {int(step)} already ({reason}): nothing to do\nnext    {more}"


def _value(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def _still_at_its_end(path: Path, recipe: Recipe, reason: str, step: int, checkpoint: Path) -> bool:
    """Return whether the recipe, as a resume changed it, still ends the run where it is."""
    from redline.training.checkpoint import read_state
    from redline.training.state import TrainState

    if reason != "patience":
        return reason == "steps" and _reached(path, recipe, step)
    state = read_state(checkpoint)
    same_windows = state.get("evaluated_on") == recipe.eval.sequences  # others start the count again
    return same_windows and TrainState.from_json(state).out_of_patience(recipe.eval.patience)


def _reached(path: Path, recipe: Recipe, step: int) -> bool:
    """Whether the recipe's counted end is behind the step."""
    lock = read_lock(path)
    try:
        end = recipe_steps(recipe, int(lock["data"]["train_tokens"]), int(lock["batch"]["tokens_per_step"]))
    except (KeyError, TypeError, ValueError):
        return False  # an older lock: whoever goes on says so
    return end is not None and end <= step


def _start(
    loaded: Loaded,
    path: Path,
    *,
    dry_run: bool,
    resumed: bool,
    overrides: list[str],
    gpus: int,
    continued_with: list[str] | None = None,
) -> int:
    require_packages(loaded.recipe.monitor)
    with _preemptible() as leaving:
        environment(loaded.recipe)
        ranks = join_ranks(loaded.recipe)
        # Rank 0 decides whether the run is started or resumed. Another rank may have seen the directory earlier, while
        # the ranks that were restarted still wrote there, or through a file system that shows new files late.
        recipe_of_first = loaded.recipe.model_dump(mode="json") if ranks.is_main else None
        first = ranks.broadcast([str(path), resumed, loaded.name, recipe_of_first])
        path = Path(first[0])
        if first[1] != resumed:
            resumed, loaded = first[1], Loaded(first[2], validate(first[3], where="the first rank"))
        console = Console() if ranks.is_main else Quiet()
        for note in (*loaded.notes, *price_notes(loaded.recipe.monitor.price_per_hour)) if ranks.is_main else ():
            console.event({"type": "warning", "message": note})
        initial = None if resumed else _initial(loaded.recipe, console)
        recipe = initial.fill(loaded.recipe) if initial else loaded.recipe
        resolved, data = _plan(recipe, console, ranks, resumed=resumed, gpus=gpus)
        for note in initial.check(resolved.recipe, data.facts.tokenizer_fingerprint) if initial else ():
            console.event({"type": "warning", "message": note})
        if dry_run:
            plan = resolved.plan_event(price=price_of(loaded.recipe.monitor.price_per_hour))
            if resumed and (saved := _saved_at(path)):
                plan["horizon"]["remaining"] = remaining_fields(plan, *saved)
            console.event({"type": "plan", **plan})
            console.close()
            return 0
        run = OneRun(loaded.name, path, resolved, data, ranks, overrides, resumed, initial, continued_with)
        return run.train(console, leaving)


def _saved_at(path: Path) -> tuple[int, float] | None:
    """Return the step and the seconds of training from which the run would resume; None without a checkpoint."""
    from redline.training.checkpoint import newest_valid, read_state
    from redline.training.state import TrainState

    newest = newest_valid(path / "checkpoints")
    if newest is None:
        return None
    state = TrainState.from_json(read_state(newest))
    return state.step, state.seconds


def _initial(recipe: Recipe, console: View) -> Initial | None:
    """Found before the data are prepared: a slip in the name should not cost that."""
    if recipe.model.init_from is None:
        return None
    from redline.evaluate.init_from import open_initial

    found = open_initial(recipe.model.init_from, RUNS, lambda text: console.event({"type": "warning", "message": text}))
    console.event({"type": "warmup", "message": f"beginning with the weights of {found.source}"})
    return found


@contextmanager
def _preemptible() -> Iterator[Leaving]:
    """Where the trainer does not listen itself, a scheduler's signal leaves at once, and says "resume me" too."""
    leaving = Leaving()

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(leaving.code)

    previous = {number: signal.signal(number, leave) for number in preemption_signals()}
    try:
        yield leaving
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def fresh_name(recipe: str, suffix: str = "") -> Path:
    """runs/RECIPE-DATE-TIME, with a number if that is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = RUNS / f"{recipe}-{stamp}{suffix}"
    for count in range(2, 1000):
        if not path.exists():
            break
        path = RUNS / f"{recipe}-{stamp}-{count}{suffix}"
    return path


def _plan(recipe: Recipe, console: View, ranks: Ranks, *, resumed: bool, gpus: int) -> tuple[Resolved, Any]:
    console.event({"type": "warmup", "message": "preparing data"})
    from redline.hardware.probe import detect_machine
    from redline.jobs.objective import job_runtime

    runtime = job_runtime(recipe.objective)
    recipe = runtime.complete(recipe, lambda text: console.event({"type": "warmup", "message": text}))
    if not ranks.is_main:
        ranks.barrier()  # the first prepares, and the others find it done
    HEARTBEAT.at(PREPARING)
    data = runtime.load_data(recipe, progress=_Preparing(console) if isinstance(console, Console) else None)
    HEARTBEAT.at(STARTING)
    if ranks.is_main:
        ranks.barrier()
    for line in data.messages:
        console.event({"type": "warmup", "message": line})
    console.event({"type": "warmup", "message": "looking at the machine"})
    machine = detect_machine(recipe.train.device)
    if gpus > 1 and not ranks.joined:  # a dry run of several
        return resolve(adapt_to_world(recipe, gpus) if resumed else recipe, machine, data.facts, gpus=gpus), data
    return resolved_alike(recipe, machine, data.facts, ranks, resumed=resumed), data


class _Preparing:
    """How far the preparation of the data is, on the run's own screen."""

    def __init__(self, console: Console) -> None:
        self.console, self.stage, self.begun = console, "", 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self.stage:
            self.stage, self.begun = progress.stage, time.monotonic()
            if not self.console.interactive:
                self.console.event({"type": "warmup", "message": progress.stage})
        rate = progress.done / 1e6 / max(1e-3, time.monotonic() - self.begun)
        facts = [f"{format_count(progress.tokens)} tokens"] if progress.tokens else []
        share = progress.done / progress.total if progress.total else None
        self.console.progress(share, progress.stage, [*facts, f"{rate:.1f} MB/s"] if progress.done else facts)


def environment(recipe: Recipe) -> None:
    """What must be set before torch starts."""
    from redline.cache import cache_dir
    from redline.hardware.host import keep_freed_memory_mapped

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "compile"))
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    keep_freed_memory_mapped()
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# ----------------------------------------------------------------------------------------------------
# Where `redline train` writes: --run, --continue and --resume, in every spelling.
#
# Launchers read options, too. torchrun's argparse takes `--run` for an abbreviation of its own `--run-path`, although
# it stands behind the module's name ("ambiguous option", Python 3.11). Words of the form key=value pass through every
# launcher, and so does the environment: `run=DIR continue=true` and REDLINE_RUN=DIR REDLINE_CONTINUE=1 mean the same
# as `--run DIR --continue`. The command line wins over the environment.


RUN_VARIABLE, CONTINUE_VARIABLE = "REDLINE_RUN", "REDLINE_CONTINUE"
RESTARTS, MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"  # which torchrun sets
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
CONTINUED = "run=DIR continue=true"


@dataclass(frozen=True)
class Target:
    run: Path | None = None
    resume: str | None = None
    continued: bool = False  # start a run in `run`, or resume the one that it holds


def read_target(
    words: Sequence[str], given: Target, environment: Mapping[str, str], *, sweep: bool = False
) -> tuple[Target, list[str]]:
    """Return the target, and the words that are not about it. `given` is what the options say."""
    values: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if "=" not in word or key not in ("run", "resume", "continue"):
            rest.append(word)
        elif key in values or {"run": given.run, "resume": given.resume, "continue": given.continued}[key]:
            raise UsageError("is given twice.", where=key, fix=f"Write --{key} or {key}=, once.")
        elif not value:
            raise UsageError("has no value.", where=word, fix="Write run=DIR, resume=RUN or continue=true.")
        else:
            values[key] = value
    run = Path(values["run"]) if "run" in values else given.run
    resume = values.get("resume", given.resume)
    continued = given.continued or is_true(values.get("continue", ""), "continue")
    if continued and (resume is not None or sweep):
        what = "--resume names a run that exists" if resume is not None else "a sweep continues by itself"
        raise UsageError(f"{what}; --continue is for one run that may not exist yet.", fix="Leave out --continue.")
    if resume is None and not sweep and "continue" not in values:
        continued = continued or is_true(environment.get(CONTINUE_VARIABLE, ""), CONTINUE_VARIABLE)
    if resume is None and run is None and environment.get(RUN_VARIABLE):
        run = Path(environment[RUN_VARIABLE])
    if continued and run is None:
        fix = f"Write --run DIR, run=DIR, or set {RUN_VARIABLE}=DIR."
        raise UsageError("--continue needs the directory that it starts or resumes.", fix=fix)
    return Target(run, resume, continued), rest


def is_true(text: str, where: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{text!r} is neither true nor false.", where=where, fix="Write 1 or true, 0 or false.")
    return text.lower() in _TRUE


def restart_warning(target: Target, environment: Mapping[str, str]) -> str | None:
    """Return what to warn of where torchrun may restart the ranks; refuse a restart that would begin a second run."""
    if target.continued or target.resume is not None:
        return None
    count, most = (_count(environment.get(name, "")) for name in (RESTARTS, MOST_RESTARTS))
    if count and target.run is None:
        what = f"torchrun has restarted these ranks (restart {count}); they would begin a second run."
        raise UsageError(what, where=RESTARTS, fix=f"Start torchrun with {CONTINUED}: a restart then resumes the run.")
    if most and not count and environment.get("RANK") == "0":
        return (
            f"torchrun restarts these ranks up to {most} times; {CONTINUED} is needed for a restart to resume the run"
        )
    return None


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
