"""The runs on disk: which there are, how each is doing, and what a name like `latest@best` means."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from redline.cache import open_regular
from redline.errors import UsageError, UserError, did_you_mean
from redline.runs.events import Event, number, read_events
from redline.vocabulary import (
    EVENTS_FILE,
    LATEST_LINK,
    PROCESS_LOCK_FILE,
    RECIPE_LOCK_FILE,
    SWEEP_FILE,
    Status,
    status_of_stop,
)

Selector = int | Literal["best"]


@dataclass(frozen=True)
class RunSummary:
    """One line of `redline runs`. What the log does not say is None."""

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
    """Every run under `root`, the members of sweeps too, newest first."""
    return [replace(summarise(path), name=_name(path, root)) for path in run_paths(root)]


def summarise(run: Path, events: Sequence[Event] | None = None) -> RunSummary:
    """`events` are its log's, where somebody has read that already."""
    run = Path(run)
    events = read_events(run / EVENTS_FILE) if events is None else events
    steps = [e for e in events if e["type"] == "step"]
    counted = [e for e in events if e["type"] in ("step", "stop")]
    return RunSummary(
        name=run.name or run.resolve().name,
        path=run,
        status=run_status(run, events),
        step=_whole(last_number(counted, "step")),
        loss=last_number(steps, "loss"),
        val_loss=last_number([e for e in events if e["type"] == "eval"], "loss"),
        tokens=_whole(last_number(counted, "tokens")),
        hours=last_number(counted, "hours"),
        cost_usd=last_number(counted[-1:], "cost_usd"),  # of the same moment
        disk_bytes=disk_bytes(run),
    )


def run_status(run: Path, events: Sequence[Event]) -> Status:
    """Return `running` while a process holds the lock; otherwise how the newest attempt ended."""
    if is_locked(run):
        return Status.RUNNING
    for event in reversed(events):
        if event["type"] == "start":
            break
        if event["type"] == "stop":
            return status_of_stop(event)
    return Status.CRASHED


def is_locked(run: Path) -> bool:
    """Whether a live process holds the run. Asks for a shared lock, so that two onlookers never see each other."""
    try:
        descriptor = open_regular(Path(run) / PROCESS_LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks cannot tell
        return False
    finally:
        os.close(descriptor)
    return False


def resolve_run(name: str, root: Path) -> tuple[Path, Selector | None]:
    """RUN on the command line: a path, a run's name or `latest`, optionally with `@step` or `@best`."""
    run = _find(name, root)  # the whole name first: a directory may well have an @ in it
    if run is not None:
        return refuse_links(run), None
    bare, at, tail = name.rpartition("@")
    if not at:
        raise _unknown(name, root)
    if not bare:
        raise UsageError(f"no run is named before @{tail}.", where=name, fix=f"Write for instance latest@{tail}.")
    run = _find(bare, root)
    if run is None:
        raise _unknown(bare, root)
    return refuse_links(run), _selector(tail, name)


def refuse_links(run: Path) -> Path:
    """A run is written to, and may come from someone else: nothing in it may stand for a place outside of it."""
    whole = run.resolve()
    for entry in run.iterdir():
        if entry.is_symlink() and not entry.resolve().is_relative_to(whole):
            fix = "Put what it points to in its place, or take it away."
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
    raise UsageError(f"{text!r} selects no checkpoint.", where=name, fix="Write @best or @ and a step, like @300.")


def _unknown(name: str, root: Path) -> UsageError:
    if not name:
        fix = "Write its path, its name or `latest`; `redline runs` lists what there is."
        return UsageError("no run is named.", where="RUN", fix=fix)
    if sweep := next((path for path in (Path(name), root / name) if is_sweep(path)), None):
        runs = [shlex.quote(str(path)) for path in run_paths(sweep)] or [f"{sweep}/RUN, once it has begun one"]
        return UsageError("this is a sweep, not a run.", where=name, fix=f"Name one of its runs: {runs[0]}.")
    known = [_name(path, root) for path in run_paths(root)]
    if not known:
        fix = f"There is none in {root}/ yet; `redline train` makes one."
    else:
        fix = did_you_mean(name, known) or f"The newest in {root}/ is {known[0]!r}; `redline runs` lists them."
    return UsageError("There is no such run.", where=name, fix=fix)


def is_sweep(path: Path) -> bool:
    try:
        return (path / SWEEP_FILE).is_file()
    except OSError:  # a name too long for any folder, or in one that may not be entered
        return False


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and ((path / RECIPE_LOCK_FILE).is_file() or (path / EVENTS_FILE).is_file())
    except OSError:
        return False


def run_paths(root: Path) -> list[Path]:
    """The runs under `root`, newest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if not path.is_symlink()]
    found += [member for path in found if is_sweep(path) for member in path.iterdir()]
    runs = [path for path in found if not path.is_symlink() and _is_run(path)]
    return sorted(runs, key=lambda path: (_born(path), path.name), reverse=True)


def _name(run: Path, root: Path) -> str:
    """What finds it from `root`: a member of a sweep is SWEEP/MEMBER."""
    return run.relative_to(root).as_posix()


def _born(run: Path) -> float:
    """lock.json is written once, when the run begins; the log's own file changes with every event."""
    source = run / RECIPE_LOCK_FILE if (run / RECIPE_LOCK_FILE).is_file() else run / EVENTS_FILE
    try:
        return source.stat().st_mtime
    except OSError:
        return 0.0


def last_number(events: Sequence[Event], key: str) -> float | None:
    """The newest event's number under `key` that is one."""
    return next((value for event in reversed(events) if (value := number(event, key)) is not None), None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def disk_bytes(run: Path) -> int:
    """Bytes of the run's own files: links are not followed, and a hard-linked checkpoint counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(run):
        for name in names:
            try:
                found = os.lstat(Path(folder) / name)
            except OSError:  # a running trainer removes old checkpoints meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


RUNS = Path("runs")


_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, of Linux's file systems and system calls


_ROOM_IN_A_RUN = 128  # bytes for the files inside a run directory: checkpoints/step-00000000/model-00000.safetensors


def whole_run(name: str) -> Path:
    """RUN where a run is meant and no checkpoint of it."""

    path, selector = resolve_run(name, RUNS)
    if selector is not None:
        raise UsageError("the whole run is meant here.", where=name, fix=f"Leave out @{selector}.")
    return path


def refuse_too_long(path: Path) -> None:
    """Refuse a run directory whose path the file system cannot hold, before anything looks for it."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    whole = len(os.fsencode(path.absolute())) + _ROOM_IN_A_RUN
    if longest <= _LONGEST_NAME and whole <= _LONGEST_PATH:
        return
    shown = str(path)[:60] + "…"
    length = f"a name of {longest:,} bytes" if longest > _LONGEST_NAME else f"a path of {whole:,} bytes"
    limit = _LONGEST_NAME if longest > _LONGEST_NAME else _LONGEST_PATH
    raise UsageError(f"is too long: {length}, where {limit:,} is the most.", where=shown, fix="Choose a shorter --run.")


def refuse_unreadable(path: Path) -> None:
    """safetensors opens no path that is not UTF-8: what a run saved there, nobody could load again."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "replace")
        fix = "Choose another --run, or rename the folder."
        raise UsageError("this path is not UTF-8, and checkpoints could not be read.", where=shown, fix=fix) from None
