"""Start, resume or continue a run: decide its directory and recipe, prepare the data, plan, and hand over to `Session`.

The end of the file reads the spellings of --run, --resume and --continue.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from redline.errors import EXIT_DONE, RecipeError, UsageError, UserError, redact
from redline.launch.session import Host, RankLog, Session, SignalExit, join_ranks, refuse_run, resolve_on_all_ranks
from redline.planning.context import indivisible_world
from redline.recipe.forecast import recipe_steps, remaining_fields
from redline.recipe.load import Loaded, load, validate
from redline.recipe.lock import locked_recipe, read_lock
from redline.recipe.resolve import Resolved, adapt_to_world, resolve
from redline.recipe.schema import RESUMABLE, Recipe
from redline.remote import MIRROR_SCHEMES, StoreError, is_url, parent_and_name, url_problem
from redline.runs.console import Console
from redline.runs.events import Event, number, read_events
from redline.runs.monitor import View, price_notes, price_of, require_packages
from redline.runs.summary import refuse_links, refuse_too_long, refuse_unreadable, resolve_run
from redline.training.control import HEARTBEAT, PREPARING, STARTING, preemption_signals
from redline.units import format_count
from redline.vocabulary import (
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    RECIPE_LOCK_FILE,
    RUNS,
    Status,
    StopReason,
    parse_stop_reason,
)

if TYPE_CHECKING:
    from redline.data.sources import Progress
    from redline.evaluate.init_from import Initial
    from redline.training.distributed import Ranks


def new_run(
    loaded: Loaded,
    directory: Path | None,
    overrides: list[str],
    *,
    dry_run: bool,
    gpus: int = 1,
    host: Host | None = None,
) -> int:
    """Train a new run in `directory`, or by default in a new one under runs/. Return the exit code."""
    path = new_run_path(loaded, directory)
    if directory is None and not dry_run and os.environ.get("RANK", "0") == "0":
        path = _reserve(path, loaded.name)
    return _start(loaded, path, dry_run=dry_run, resumed=False, overrides=overrides, gpus=gpus, host=host)


def _reserve(path: Path, name: str) -> Path:
    """Create the directory of a new run and return it.

    It is created at once, because another process may start a run of the same name in the same second. If it is still
    empty at exit, it is removed.
    """
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            taken, path = path, unused_run_path(name)
            if path != taken:
                continue
            return path  # ./runs is a file: writing the run reports that
        except OSError:
            return path  # writing the run reports what is wrong
        atexit.register(_remove_if_empty, path)
        return path


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def new_run_path(loaded: Loaded, directory: Path | None) -> Path:
    """Return the directory of a new run. Raise UsageError if it cannot be used."""
    path = directory or unused_run_path(loaded.name)
    refuse_unreadable(path)
    refuse_too_long(path)
    if path.resolve() in (Path.cwd(), RUNS.resolve()):
        is_current = path.resolve() == Path.cwd()
        what = "is the current folder." if is_current else "is the folder of all runs, each in a folder of its own."
        raise UsageError(what, where=str(path), fix="Choose a new folder: --run runs/NAME.")
    if directory is not None and path.is_dir() and path.resolve() in _data_folders(loaded.recipe):
        raise UsageError("holds the training data.", where=str(path), fix="Choose another --run.")
    refuse_run(path)
    if path.exists() and not path.is_dir():
        raise UsageError("is a file, not a directory.", where=str(path), fix="Choose another --run.")
    return path


def _data_folders(recipe: Recipe) -> set[Path]:
    return {Path(part.source).expanduser().resolve() for part in recipe.data.parts}


def resume_run(name: str, overrides: list[str], *, dry_run: bool, gpus: int = 1, host: Host | None = None) -> int:
    """Resume the run that `name` refers to. Return the exit code."""
    host = host or Host.command()
    path, loaded = open_resumable(name, overrides, host)
    host.path = path
    if not dry_run and _is_finished(path, loaded.recipe, changed=bool(overrides)):
        return EXIT_DONE
    return _start(loaded, path, dry_run=dry_run, resumed=True, overrides=overrides, gpus=gpus, host=host)


@dataclass(frozen=True)
class ContinuePlan:
    """What `--continue` does with a directory."""

    loaded: Loaded
    resumed: bool
    changes: list[str]  # of a new run, all overrides; of a resumed one, those that are new


def plan_continue(path: Path, recipe: str | None, overrides: list[str]) -> ContinuePlan:
    """Decide whether to resume the run in the directory or to start `recipe` there.

    The same command is repeated at every restart. So overrides that the last such command had are not changes: the run
    has them already, or a `--resume` has changed them since.
    """
    if not os.path.isfile(path / RECIPE_LOCK_FILE):  # noqa: PTH113 - unlike Path.is_file, false for a name that is too long
        loaded = load(recipe or "quickstart", overrides)
        new_run_path(loaded, path)
        if not _restored(path, loaded.recipe.checkpoint.mirror):
            return ContinuePlan(loaded, False, overrides)
    refuse_unreadable(path)
    refuse_links(path)
    lock = read_lock(path)
    Host.command().refuse_foreign(path, lock)
    refuse_other_recipe(path, recipe, str(lock["recipe_name"]))
    before = _last_command(path)
    typed = _by_key(overrides)
    if before is None:  # the log has no command; keys that cannot change are in the lock, the others may change
        changes = [word for key, word in typed.items() if key.startswith(RESUMABLE)]
    else:
        changes = [word for key, word in typed.items() if before.get(key) != word]
    return ContinuePlan(
        locked_recipe(path, lock, changes, read_events(path / EVENTS_FILE).resume_overrides()), True, changes
    )


def _restored(path: Path, mirror: str | None) -> bool:
    """Restore the run at `path` from the mirror; return False if there is no mirror, or no such run in it."""
    if mirror is None:
        return False
    from redline.training.mirror import holds_run, restore_run, run_url

    if not holds_run(path, mirror):
        return False
    restore_run(run_url(path, mirror), path, _print_line)
    return True


def _print_line(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        typer.echo(redact(f"redline: {text}"), err=True)


def continue_run(path: Path, recipe: str | None, overrides: list[str], *, dry_run: bool, gpus: int = 1) -> int:
    """Resume the run in the directory, or start it there. Return the exit code."""
    plan = plan_continue(path, recipe, overrides)
    if plan.resumed and not dry_run and _is_finished(path, plan.loaded.recipe, changed=bool(plan.changes)):
        return EXIT_DONE
    return _start(
        plan.loaded,
        path,
        dry_run=dry_run,
        resumed=plan.resumed,
        overrides=plan.changes,
        gpus=gpus,
        continued_with=overrides,
    )


def refuse_other_recipe(path: Path, recipe: str | None, name: str) -> None:
    """Raise UsageError if the command names another recipe than that of the run in the directory."""
    if recipe is None or name in (recipe, Path(recipe).stem):
        return
    what = f"holds a run of {name}, and cannot continue with another recipe."
    raise UsageError(what, where=str(path), fix=f"Leave out {recipe}, or choose another --run.")


def _last_command(run: Path) -> dict[str, str] | None:
    """Return the overrides of the last command that started or continued the run, by key.

    None if the log does not have them, for example because the run was killed before its first event.
    """
    starts = read_events(run / EVENTS_FILE).of_type("start")
    commands = [event.get("continued_with") or event.get("overrides") for event in starts[:1]]
    commands += [event["continued_with"] for event in starts[1:] if isinstance(event.get("continued_with"), list)]
    return _by_key([str(word) for word in commands[-1]]) if commands and isinstance(commands[-1], list) else None


def _by_key(words: list[str]) -> dict[str, str]:
    """Map each key to its last override."""
    return {word.removeprefix("+").partition("=")[0]: word for word in words}


def open_resumable(name: str, overrides: list[str], host: Host | None = None) -> tuple[Path, Loaded]:
    """Return the directory of the run that `name` refers to, and its locked recipe with the overrides.

    A run that is named by the URL of its mirror, or that is gone and has a `checkpoint.mirror=URL` among the overrides,
    is restored first.
    """
    if is_url(name):
        name, overrides = _restore(name, overrides)
    path, selector = _find_or_restore(name, overrides)
    refuse_unreadable(path)
    if selector is not None:
        fix = f"redline train --resume {shlex.quote(str(path))}"
        raise UsageError("a run resumes from its newest checkpoint.", where=name, fix=f"Leave out @{selector}: {fix}")
    lock = read_lock(path)
    (host or Host.command()).refuse_foreign(path, lock)
    return path, locked_recipe(path, lock, overrides, read_events(path / EVENTS_FILE).resume_overrides())


_MIRROR_KEY = "checkpoint.mirror"


def _restore(url: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Restore a run from the URL of its copy to ./runs, and return its path.

    The mirror is the folder above: it may differ from the one in the lock, because copies can be moved.
    """
    if problem := url_problem(url, MIRROR_SCHEMES):
        raise UsageError(problem, where="--resume")
    from redline.training.mirror import restore_run

    mirror, name = parent_and_name(url)
    path = RUNS / name
    restore_run(url, path, _print_line)
    known = locked_recipe(path, read_lock(path), [], read_events(path / EVENTS_FILE).resume_overrides())
    given = any(word.partition("=")[0] == _MIRROR_KEY for word in overrides)
    if given or known.recipe.checkpoint.mirror == mirror:
        return str(path), overrides
    return str(path), [*overrides, f"{_MIRROR_KEY}={mirror}"]


def _find_or_restore(name: str, overrides: list[str]) -> tuple[Path, int | str | None]:
    """Find a run by its name; restore it from the mirror that the overrides name if its directory is gone."""
    mirror = _by_key(overrides).get(_MIRROR_KEY, "").partition("=")[2]
    try:
        return resolve_run(name, RUNS)
    except UsageError:
        path = Path(name) if os.sep in name else RUNS / name
        if not name or not mirror or url_problem(mirror, MIRROR_SCHEMES) or not _restored(path, mirror):
            raise
    return path, None


def _is_finished(path: Path, recipe: Recipe, *, changed: bool) -> bool:
    """Return whether the run has reached its end; rank 0 then prints that."""
    message = finished_message(path, recipe, changed=changed)
    if message and os.environ.get("RANK", "0") == "0":
        typer.echo(message, err=True)
    return message is not None


def finished_message(path: Path, recipe: Recipe, *, changed: bool) -> str | None:
    """Return a message if the run has reached its end and its last checkpoint is valid, else None.

    If the command changes keys, only the counted steps and the patience are compared with the new recipe. With a new
    `train.hours` or `train.target_loss` the trainer finds out whether there is something left to do.
    """
    from redline.training.checkpoint import newest_valid, step_name

    last: Event = read_events(path / EVENTS_FILE).stop or {}
    reason, step = parse_stop_reason(last.get("reason")), number(last, "step")
    if reason is None or reason.status is not Status.FINISHED or step is None:
        return None
    newest = newest_valid(path / CHECKPOINTS_FOLDER)
    if newest is None or newest.name != step_name(int(step)):
        return None
    if changed and not _still_at_its_end(path, recipe, reason, int(step), newest):
        return None
    keys = reason.recipe_keys
    key = next((key for key in keys if _value(recipe, key) is not None), keys[0])
    command = f"redline train --resume {shlex.quote(str(path))} {key}=…"
    return f"finished   already, at step {int(step)} ({reason}): nothing to do\nnext    {command}"


def _value(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def _still_at_its_end(path: Path, recipe: Recipe, reason: StopReason, step: int, checkpoint: Path) -> bool:
    """Return whether the recipe, as a resume changed it, still ends the run where it is."""
    from redline.training.checkpoint import read_state
    from redline.training.schedule import TrainState

    if reason is not StopReason.PATIENCE:
        return reason is StopReason.STEPS and _reached(path, recipe, step)
    state = read_state(checkpoint)
    same_sequences = state.get("evaluated_on") == recipe.eval.sequences  # with others the count starts again
    return same_sequences and TrainState.from_json(state).out_of_patience(recipe.eval.patience)


def _reached(path: Path, recipe: Recipe, step: int) -> bool:
    """Return whether the step is at or beyond the last one that the recipe counts."""
    lock = read_lock(path)
    try:
        end = recipe_steps(recipe, int(lock["data"]["train_tokens"]), int(lock["batch"]["tokens_per_step"]))
    except (KeyError, TypeError, ValueError):
        return False  # an older lock; resuming reports what it lacks
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
    host: Host | None = None,
) -> int:
    """Prepare the data and plan; then print the plan (dry run) or train. Return the exit code."""
    host = host or Host.command()
    require_packages(loaded.recipe.monitor)
    with _exit_on_signal() if host.is_command else nullcontext(SignalExit()) as signal_exit:
        set_environment(loaded.recipe)
        ranks = join_ranks(loaded.recipe)
        # Rank 0 decides whether the run is started or resumed. Another rank may have seen the directory earlier, while
        # the ranks that were restarted still wrote there, or through a file system that shows new files late.
        recipe_of_rank0 = loaded.recipe.model_dump(mode="json") if ranks.is_main else None
        run_dir, rank0_resumed, name, recipe_tree = ranks.broadcast([str(path), resumed, loaded.name, recipe_of_rank0])
        path = Path(run_dir)
        if rank0_resumed != resumed:
            resumed, loaded = rank0_resumed, Loaded(name, validate(recipe_tree, where="rank 0"))
        _check_mirror(loaded.recipe, path, ranks, resumed=resumed)
        console = (host.view or Console()) if ranks.is_main else RankLog()
        for note in (*loaded.notes, *price_notes(loaded.recipe.monitor.price_per_hour)) if ranks.is_main else ():
            console.event({"type": "warning", "message": note})
        initial = None if resumed else _open_initial(loaded.recipe, console)
        recipe = initial.fill(loaded.recipe) if initial else loaded.recipe
        resolved, data = _plan(recipe, console, ranks, resumed=resumed, gpus=gpus)
        for note in initial.check(resolved.recipe, data.facts.tokenizer_fingerprint) if initial else ():
            console.event({"type": "warning", "message": note})
        if dry_run:
            plan = resolved.plan_event(price=price_of(loaded.recipe.monitor.price_per_hour))
            if resumed and (position := _resume_position(path)):
                plan["horizon"]["remaining"] = remaining_fields(plan, *position)
            console.event({"type": "plan", **plan})
            console.close()
            return EXIT_DONE
        session = Session(loaded.name, path, resolved, data, ranks, overrides, resumed, initial, continued_with, host)
        return session.train(console, signal_exit)


def _check_mirror(recipe: Recipe, path: Path, ranks: Ranks, *, resumed: bool) -> None:
    """Raise UserError on every rank if rank 0 cannot copy to `checkpoint.mirror`, before data are prepared.

    A resumed run that has a checkpoint continues even if the store does not answer now.
    """
    if (mirror := recipe.checkpoint.mirror) is None:
        return
    problem = None
    if ranks.is_main:
        from redline.training.checkpoint import newest_valid
        from redline.training.mirror import check_mirror

        try:
            check_mirror(mirror, path, resumed=resumed)
        except UserError as error:
            passing = isinstance(error, StoreError) and error.passing
            if not (passing and resumed and newest_valid(path / CHECKPOINTS_FOLDER)):
                fix = f"{error.fix} Or train without a mirror: checkpoint.mirror=null."
                problem = {"what": error.what, "where": f"{_MIRROR_KEY}={error.where}", "fix": fix}
    if problem := ranks.broadcast(problem):
        raise UsageError(**problem)


def _resume_position(path: Path) -> tuple[int, float] | None:
    """Return the step and the seconds of training from which the run would resume; None without a checkpoint."""
    from redline.training.checkpoint import newest_valid, read_state
    from redline.training.schedule import TrainState

    newest = newest_valid(path / CHECKPOINTS_FOLDER)
    if newest is None:
        return None
    state = TrainState.from_json(read_state(newest))
    return state.step, state.seconds


def _open_initial(recipe: Recipe, console: View) -> Initial | None:
    """Open the weights of model.init_from, before the data are prepared: a typo should not cost the preparation."""
    if recipe.model.init_from is None:
        return None
    from redline.evaluate.init_from import open_initial

    def warn(text: str) -> None:
        console.event({"type": "warning", "message": text})

    initial = open_initial(recipe.model.init_from, RUNS, warn)
    console.event({"type": "warmup", "message": f"starting from the weights of {initial.source}"})
    return initial


@contextmanager
def _exit_on_signal() -> Iterator[SignalExit]:
    """Exit at once if a signal of the scheduler arrives before or after training, with the exit code for "preempted".

    While it trains, the trainer handles the signals itself.
    """
    signal_exit = SignalExit()

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(signal_exit.code)

    previous = {number: signal.signal(number, leave) for number in preemption_signals()}
    try:
        yield signal_exit
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def unused_run_path(recipe: str, suffix: str = "") -> Path:
    """Return runs/RECIPE-DATE-TIME, with a number added if that exists."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = RUNS / f"{recipe}-{stamp}{suffix}"
    for count in range(2, 1000):
        if not path.exists():
            break
        path = RUNS / f"{recipe}-{stamp}-{count}{suffix}"
    return path


def _plan(recipe: Recipe, console: View, ranks: Ranks, *, resumed: bool, gpus: int) -> tuple[Resolved, Any]:
    """Prepare the data and resolve the recipe; return the plan and the data."""
    problem = None if resumed else indivisible_world(recipe.parallel.context, max(gpus, ranks.size))
    if problem is not None:  # found by `resolve` too, but only after the data are prepared
        raise RecipeError("recipe", [problem])
    console.event({"type": "warmup", "message": "preparing data"})
    from redline.hardware.nvml import foreign_use
    from redline.hardware.probe import detect_machine
    from redline.jobs.objective import job_runtime

    runtime = job_runtime(recipe.objective)
    recipe = runtime.complete(recipe, lambda text: console.event({"type": "warmup", "message": text}))
    if not ranks.is_main:
        ranks.barrier()  # rank 0 prepares the data; the others then find it in the cache
    HEARTBEAT.at(PREPARING)
    data = runtime.load_data(recipe, progress=_PreparationProgress(console) if isinstance(console, Console) else None)
    HEARTBEAT.at(STARTING)
    if ranks.is_main:
        ranks.barrier()
    for line in data.messages:  # for example how many rows were left out
        console.event({"type": "warmup", "message": line})
    console.event({"type": "warmup", "message": "detecting the machine"})
    if ranks.is_main and recipe.train.device != "cpu" and (warning := foreign_use()):
        console.event({"type": "warning", "message": warning})
    machine = detect_machine(recipe.train.device)
    if gpus > 1 and not ranks.joined:  # a dry run for several GPUs
        return resolve(adapt_to_world(recipe, gpus) if resumed else recipe, machine, data.facts, gpus=gpus), data
    return resolve_on_all_ranks(recipe, machine, data.facts, ranks, resumed=resumed), data


class _PreparationProgress:
    """Shows the progress of the data preparation on the console of the run."""

    def __init__(self, console: Console) -> None:
        self.console, self.stage, self.started = console, "", 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self.stage:
            self.stage, self.started = progress.stage, time.monotonic()
            if not self.console.interactive:
                self.console.event({"type": "warmup", "message": progress.stage})
        rate = progress.done / 1e6 / max(1e-3, time.monotonic() - self.started)
        counts = [f"{format_count(progress.tokens)} tokens"] if progress.tokens else []
        share = progress.done / progress.total if progress.total else None
        self.console.progress(share, progress.stage, [*counts, f"{rate:.1f} MB/s"] if progress.done else counts)


def set_environment(recipe: Recipe) -> None:
    """Set the environment variables that torch reads when it is imported."""
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
# Launchers parse options too. torchrun's argparse takes `--run` for an abbreviation of its own `--run-path`, even after
# the module's name ("ambiguous option", Python 3.11). Words of the form key=value pass through every launcher, and so
# does the environment: `run=DIR continue=true` and REDLINE_RUN=DIR REDLINE_CONTINUE=1 mean the same as
# `--run DIR --continue`. The command line takes precedence over the environment.


RUN_VARIABLE, CONTINUE_VARIABLE = "REDLINE_RUN", "REDLINE_CONTINUE"
RESTARTS, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"  # set by torchrun
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_CONTINUE_WORDS = "run=DIR continue=true"


@dataclass(frozen=True)
class Target:
    run: Path | None = None
    resume: str | None = None
    continued: bool = False  # start a run in `run`, or resume the one that it holds


def read_target(
    words: Sequence[str], options: Target, environment: Mapping[str, str], *, sweep: bool = False
) -> tuple[Target, list[str]]:
    """Return the target, and the words that are not about it. `options` is what --run, --resume and --continue say."""
    values: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if "=" not in word or key not in ("run", "resume", "continue"):
            rest.append(word)
        elif key in values or {"run": options.run, "resume": options.resume, "continue": options.continued}[key]:
            raise UsageError("is given twice.", where=key, fix=f"Use either --{key} or {key}=, once.")
        elif not value:
            raise UsageError("has no value.", where=word, fix="Write run=DIR, resume=RUN or continue=true.")
        else:
            values[key] = value
    run = Path(values["run"]) if "run" in values else options.run
    resume = values.get("resume", options.resume)
    continued = options.continued or is_true(values.get("continue", ""), "continue")
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
    """Return a warning if torchrun may restart the ranks. Raise UsageError if a restart would start a second run."""
    if target.continued or target.resume is not None:
        return None
    count, most = (_count(environment.get(name, "")) for name in (RESTARTS, MAX_RESTARTS))
    if count and target.run is None:
        what = f"torchrun has restarted these ranks (restart {count}); they would start a second run."
        raise UsageError(
            what, where=RESTARTS, fix=f"Start torchrun with {_CONTINUE_WORDS}: a restart then resumes the run."
        )
    if most and not count and environment.get("RANK") == "0":
        what = f"torchrun restarts these ranks up to {most} times"
        return f"{what}; {_CONTINUE_WORDS} is needed for a restart to resume the run"
    return None


# What `accelerate launch` passes on for its own library: the value that asks for nothing, and the key of the recipe.
_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": ("no", "train.precision"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "train.accumulation"),
    "ACCELERATE_DYNAMO_BACKEND": ("NO", "train.compile"),
    "ACCELERATE_USE_FSDP": ("false", "parallel.mode"),
    "ACCELERATE_USE_DEEPSPEED": ("false", "parallel.mode"),
}


def accelerate_warning(environment: Mapping[str, str]) -> str | None:
    """Return a warning if `accelerate launch` has options that the recipe decides."""
    if environment.get("RANK", "0") != "0":
        return None
    ignored = [
        f"{name.removeprefix('ACCELERATE_').lower()}={environment[name]} ({key})"
        for name, (nothing, key) in _ACCELERATE.items()
        if environment.get(name, nothing).lower() != nothing.lower()
    ]
    return f"options of accelerate have no effect; the recipe's keys do: {', '.join(ignored)}" if ignored else None


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
