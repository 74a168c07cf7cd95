"""The runs on disk: a summary of each, and what a name like `latest@best` on the command line stands for."""

from __future__ import annotations

import fcntl
import os
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from redline.cache import open_regular
from redline.errors import UsageError, UserError, did_you_mean
from redline.runs.events import History, one_line, read_events, read_last_events
from redline.vocabulary import (
    EVENTS_FILE,
    LATEST_LINK,
    PROCESS_LOCK_FILE,
    RECIPE_LOCK_FILE,
    RUNS,
    SWEEP_FILE,
    Status,
    status_of_stop,
)

Selector = int | Literal["best"]


@dataclass(frozen=True)
class RunSummary:
    """One line of `redline runs`. Figures that the log does not hold are None."""

    name: str
    path: Path
    status: Status
    step: int | None
    loss: float | None
    val_loss: float | None
    tokens: int | None
    hours: float | None
    cost_usd: float | None
    disk_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def find_runs(root: Path) -> list[RunSummary]:
    """Return every run under `root`, including members of sweeps, newest first."""
    return [replace(summarise(path), name=_name(path, root)) for path in run_paths(root)]


def summarise(run: Path, history: History | None = None) -> RunSummary:
    """Return the newest figures of a run. Pass its history if it was read already."""
    run = Path(run)
    history = read_events(run / EVENTS_FILE) if history is None else history
    # The cost belongs to the newest hours: an older one must not stand in if the newest is unknown.
    newest = History(history.of_type("step", "stop")[-1:])
    return RunSummary(
        name=run.name or run.resolve().name,
        path=run,
        status=run_status(run, history),
        step=_integer(history.last_number("step", "step", "stop")),
        loss=history.last_number("loss", "step"),
        val_loss=history.last_number("loss", "eval"),
        tokens=_integer(history.last_number("tokens", "step", "stop")),
        hours=history.last_number("hours", "step", "stop"),
        cost_usd=newest.last_number("cost_usd", "step", "stop"),
        disk_bytes=disk_bytes(run),
    )


def run_status(run: Path, history: History | None = None) -> Status:
    """Return `running` while a process holds the lock; otherwise how the newest attempt ended."""
    if is_locked(run):
        return Status.RUNNING
    stop = (read_events(run / EVENTS_FILE) if history is None else history).stop
    return Status.CRASHED if stop is None else status_of_stop(stop)


def is_locked(run: Path) -> bool:
    """Return whether a live process trains this run.

    The check takes a shared lock for a moment, so that two commands that check at once do not take each other for it.
    """
    try:
        descriptor = open_regular(Path(run) / PROCESS_LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: assume that nothing runs
        return False
    finally:
        os.close(descriptor)
    return False


def resolve_run(name: str, root: Path) -> tuple[Path, Selector | None]:
    """Return the run and the checkpoint that RUN on the command line stands for.

    RUN is a path, the name of a run or `latest`, optionally followed by `@STEP` or `@best`.
    """
    run = _find(name, root)  # first with the @: the name of a directory may contain one
    if run is not None:
        return refuse_links(run), None
    bare, at, tail = name.rpartition("@")
    if not at:
        raise _unknown(name, root)
    if not bare:
        raise UsageError(f"no run is named before @{tail}.", where=name, fix=f"Write, for example, latest@{tail}.")
    run = _find(bare, root)
    if run is None:
        raise _unknown(bare, root)
    return refuse_links(run), _selector(tail, name)


def refuse_links(run: Path) -> Path:
    """Refuse a run that holds a symbolic link to outside of it.

    redline writes to a run, and the run may come from somebody else: a link could make it overwrite other files.
    """
    resolved = run.resolve()
    for entry in run.iterdir():
        if entry.is_symlink() and not entry.resolve().is_relative_to(resolved):
            fix = "Replace the link by a copy of the file, or remove it."
            raise UserError(f"{entry.name} is a link to outside of the run.", where=str(run), fix=fix)
    return run


def _find(name: str, root: Path) -> Path | None:
    if name == LATEST_LINK:
        return _latest(root)
    return next((path for path in (Path(name), root / name) if name and _is_run(path)), None)


def _latest(root: Path) -> Path | None:
    link = root / LATEST_LINK
    if _is_run(link):
        target = link.resolve()
        return root / target.name if target.parent == root.resolve() else target
    return next(iter(run_paths(root)), None)


def _selector(text: str, name: str) -> Selector:
    if text == "best":
        return "best"
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"{text!r} is not a checkpoint.", where=name, fix="Write @best, or @ and a step, such as @300.")


def _unknown(name: str, root: Path) -> UsageError:
    if not name:
        fix = "Write its path, its name or `latest`; `redline runs` lists the runs."
        return UsageError("no run is named.", where="RUN", fix=fix)
    if sweep := next((path for path in (Path(name), root / name) if is_sweep(path)), None):
        runs = [shlex.quote(str(path)) for path in run_paths(sweep)] or [f"{sweep}/RUN, once it has started one"]
        return UsageError("this is a sweep, not a run.", where=name, fix=f"Name one of its runs: {runs[0]}.")
    known = [_name(path, root) for path in run_paths(root)]
    if not known:
        fix = f"{root}/ holds no runs yet; `redline train` starts one."
    else:
        fix = did_you_mean(name, known) or f"The newest in {root}/ is {known[0]!r}; `redline runs` lists them."
    return UsageError("There is no such run.", where=name, fix=fix)


def is_sweep(path: Path) -> bool:
    try:
        return (path / SWEEP_FILE).is_file()
    except OSError:  # a name that is too long, or a folder without permission
        return False


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and ((path / RECIPE_LOCK_FILE).is_file() or (path / EVENTS_FILE).is_file())
    except OSError:
        return False


def run_paths(root: Path) -> list[Path]:
    """Return the runs under `root`, newest first."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if not path.is_symlink()]
    paths += [member for path in paths if is_sweep(path) for member in path.iterdir()]
    runs = [path for path in paths if not path.is_symlink() and _is_run(path)]
    return sorted(runs, key=lambda path: (_start_time(path), path.name), reverse=True)


@dataclass(frozen=True)
class NewestRun:
    """The newest run, and how many runs there are."""

    name: str
    status: Status
    count: int


def newest_run(root: Path) -> NewestRun | None:
    """Return the newest run under `root`, or None if there is none. It reads only the end of the run's log."""
    paths = run_paths(root)
    if not paths:
        return None
    status = run_status(paths[0], read_last_events(paths[0] / EVENTS_FILE))
    return NewestRun(one_line(_name(paths[0], root)), status, len(paths))


def _name(run: Path, root: Path) -> str:
    """Return the name that `resolve_run` finds under `root`; for a member of a sweep, SWEEP/MEMBER."""
    return run.relative_to(root).as_posix()


def _start_time(run: Path) -> float:
    """Return when the run started. lock.json is written once, at the start; the log changes with every event."""
    source = run / RECIPE_LOCK_FILE if (run / RECIPE_LOCK_FILE).is_file() else run / EVENTS_FILE
    try:
        return source.stat().st_mtime
    except OSError:
        return 0.0


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def disk_bytes(run: Path) -> int:
    """Return the bytes of all files in a folder. Links are not followed, and a hard-linked file counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(run):
        for name in names:
            try:
                status = os.lstat(Path(folder) / name)
            except OSError:  # the trainer of a running run has just removed an old checkpoint
                continue
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


# Limits of Linux: bytes of a name in a folder, and of a path in a system call.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
# Room for files inside a run directory, such as checkpoints/step-00000000/model-00000.safetensors.
_RESERVED_PATH_BYTES = 128


def run_without_checkpoint(name: str) -> Path:
    """Return the run that RUN stands for, in commands that take no checkpoint of it."""
    path, selector = resolve_run(name, RUNS)
    if selector is not None:
        raise UsageError("this command takes a run, not a checkpoint.", where=name, fix=f"Leave out @{selector}.")
    return path


def refuse_too_long(path: Path) -> None:
    """Refuse a run directory whose path the file system cannot hold, before any other check accesses it."""
    name_bytes = max((len(os.fsencode(part)) for part in path.parts), default=0)
    path_bytes = len(os.fsencode(path.absolute())) + _RESERVED_PATH_BYTES
    if name_bytes <= _MAX_NAME_BYTES and path_bytes <= _MAX_PATH_BYTES:
        return
    shown = str(path)[:60] + "…"
    if name_bytes > _MAX_NAME_BYTES:
        what = f"the path has a name of {name_bytes:,} bytes; the limit is {_MAX_NAME_BYTES:,}."
    else:
        what = f"the path would have {path_bytes:,} bytes; the limit is {_MAX_PATH_BYTES:,}."
    raise UsageError(what, where=shown, fix="Choose a shorter --run.")


def refuse_unreadable(path: Path) -> None:
    """Refuse a path that is not UTF-8: safetensors cannot open it, so nobody could load the checkpoints again."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "replace")
        fix = "Choose another --run, or rename the folder."
        raise UsageError("the path is not UTF-8, so checkpoints could not be read.", where=shown, fix=fix) from None
