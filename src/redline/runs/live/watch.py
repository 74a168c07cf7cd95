"""The runs that a page looks at: found, read on when somebody asks, and told from where the asker left off."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.cache import read_text
from redline.errors import UserError
from redline.runs.console import one_line, plan_rows, step_facts
from redline.runs.events import number, section
from redline.runs.live.answers import answer, expected_usd, limits, recent, remaining_s
from redline.runs.report.roofline import standing
from redline.runs.state import RunState
from redline.runs.summary import is_locked, resolve_run, run_paths
from redline.vocabulary import EVENTS_FILE, RECIPE_LOCK_FILE, Status, status_of_stop

# ----------------------------------------------------------------------------------------------------
# The end of a growing log, read on from where one was: whole lines only, and all of them again when it was begun anew.
#
# The file belongs to another process and may lie on any file system: it may be missing, torn, cut, replaced, or no
# file.


_BLOCK = 1 << 18
_LONGEST_LINE = 4 << 20  # bytes; what is longer is no event of ours
_HEAD = 256  # bytes by which a log that was begun anew is told from one that grew


class Tail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.size = 0
        self._identity: tuple[int, int] | None = None
        self._head = self._rest = b""
        self._skipping = False  # within a line that is too long

    @property
    def share(self) -> float:
        """How much of the file has been read."""
        return min(1.0, self.offset / self.size) if self.size else 1.0

    def read(self, seconds: float | None = None) -> Iterator[list[bytes] | None]:
        """Lists of new lines, for about so many seconds; None when what was read before no longer holds."""
        descriptor = self._open()
        if descriptor is None:
            return
        end = None if seconds is None else time.monotonic() + seconds
        with open(descriptor, "rb", buffering=0) as file:
            if self._begun_anew(descriptor):
                self.offset, self._head, self._rest, self._skipping = 0, b"", b"", False
                yield None
            self._head = os.pread(descriptor, _HEAD, 0)
            file.seek(self.offset)
            while block := file.read(_BLOCK):
                self.offset += len(block)
                if lines := self._lines(block):
                    yield lines
                if end is not None and time.monotonic() > end:
                    return

    def _open(self) -> int | None:
        try:  # no link, and never waiting: what looks like a log may be a pipe
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            return None
        self.size = about.st_size
        return descriptor

    def _begun_anew(self, descriptor: int) -> bool:
        about = os.fstat(descriptor)
        before, self._identity = self._identity, (about.st_dev, about.st_ino)
        if before is None:
            return False
        changed = os.pread(descriptor, len(self._head), 0) != self._head
        return before != self._identity or about.st_size < self.offset or changed

    def _lines(self, block: bytes) -> list[bytes]:
        *lines, rest = (self._rest + block).split(b"\n")
        if lines and self._skipping:
            lines, self._skipping = lines[1:], False
        if len(rest) > _LONGEST_LINE:
            self._skipping = True
        self._rest = b"" if self._skipping else rest
        return [line for line in lines if len(line) <= _LONGEST_LINE]


_AT_ONCE_S = 0.2  # reading for one answer: of a long log the page shows what is there so far
_LOOK_AGAIN_S = 2.0  # for runs that began meanwhile
_STANDING_S = 5.0
_MOST_KNOWN, _MOST_SHOWN = 60, 8
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
_LARGEST_LOCK = 16 << 20


@dataclass(frozen=True)
class Cursor:
    """What a page has of a run already."""

    generation: int = -1
    steps: int = 0
    evals: int = 0
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Cursor:
        parts = text.split(".")
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
            return cls()
        return cls(*map(int, parts))


class WatchedRun:
    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.state, self.tail = RunState(), Tail(path / EVENTS_FILE)
        self._lock = threading.Lock()
        self._lock_json: Mapping[str, Any] = {}
        self._lock_time: float | None = None
        self._held_back: tuple[float, list[str]] = (-_STANDING_S, [])

    def tell(self, cursor: Cursor, now: float, seconds: float | None = None) -> dict[str, Any]:
        """Read on, for so long at most; then everything but the part of the curves that the asker has."""
        with self._lock:
            self.read_on(seconds)
            state = self.state
            have = cursor if cursor.generation == state.generation else Cursor()
            return {
                **self.summary(now),
                "generation": state.generation,
                "reading": round(self.tail.share, 4),
                "plan": self._plan(),
                "held_back": self._binding(),
                "steps": state.steps.since(have.steps),
                "evals": state.evals.since(have.evals),
                "samples": [sample for sample in state.samples if sample["number"] > have.number],
                "notes": [note for note in state.notes if note["number"] > have.number],
                "number": state.numbered,
            }

    def read_on(self, seconds: float | None = None) -> None:
        for lines in self.tail.read(seconds):
            if lines is None:
                self.state.clear()
            else:
                for line in lines:
                    self.state.read(line)
        self._read_lock()

    def summary(self, now: float) -> dict[str, Any]:
        """The figures and sentences of this moment."""
        state, status = self.state, self.status()
        counted = state.stop or state.step
        return {
            "name": self.name,
            "path": str(self.path),
            "status": status,
            "recipe": self._lock_json.get("recipe_name") or state.start.get("recipe"),
            "device": section(self._lock_json, "machine").get("name") or state.start.get("device"),
            "step": number(counted, "step"),
            "steps_planned": state.end_step,
            "tokens": number(counted, "tokens"),
            "loss": number(state.step, "loss"),
            "val_loss": number(state.eval, "loss"),
            "best_val_loss": state.best_val,
            "metrics": {
                k: v for k in state.eval if k not in ("time", "step") and (v := number(state.eval, k)) is not None
            },
            "tokens_per_s": recent(state, "tokens_per_s"),
            "mfu": recent(state, "mfu"),
            "memory_gib": state.peak_memory_gib,
            "progress": 1.0 if status == "finished" else number(state.step, "progress"),
            "eta_s": remaining_s(state, status, now),
            "hours": number(counted, "hours"),
            "cost_usd": number(counted, "cost_usd"),
            "cost_expected_usd": expected_usd(state, status, now),
            "last_event_s": None if state.last_time is None else round(max(0.0, now - state.last_time), 1),
            "skipped": state.skipped,
            "unreadable": state.unreadable,
            "held_lines": state.held_lines,
            "answers": answer(state, status, now, self._lock_json, str(self.path)).as_dict(),
        }

    def status(self) -> Status:
        """As `redline runs` has it, from what is read so far."""
        if is_locked(self.path):
            return Status.RUNNING
        return status_of_stop(self.state.stop) if self.state.stop else Status.CRASHED

    def _plan(self) -> dict[str, Any]:
        plan, memory = self.state.plan, section(self.state.plan, "memory_gib")
        speed, ceiling = section(plan, "throughput"), number(section(plan, "ceiling"), "tokens_per_s")
        share, rate = number(speed, "mfu"), number(speed, "tokens_per_s")
        return {
            "tokens_per_s": limits(self.state, self._lock_json),
            "mfu": share,
            # in the unit of the run's own `mfu`; the ceiling's in the plan is of the precision that is trained in
            "mfu_ceiling": share * ceiling / rate if share and ceiling and rate else None,
            "memory": {part: gib for part in _PARTS if (gib := number(memory, part)) is not None},
            "memory_peak": number(memory, "peak"),
            "memory_available": number(memory, "available"),
        }

    def _binding(self) -> list[str]:
        """What holds it back, as the report says it, by the last log lines. Counting it takes a moment."""
        now = time.monotonic()
        if now - self._held_back[0] >= _STANDING_S and self.state.recent:
            sentences = standing(list(self.state.recent), self.state.plan, self._lock_json).sentences
            self._held_back = (now, sentences)
        return self._held_back[1]

    def _read_lock(self) -> None:
        path = self.path / RECIPE_LOCK_FILE
        try:
            about = path.stat()
            if about.st_mtime != self._lock_time and about.st_size < _LARGEST_LOCK:
                self._lock_time = about.st_mtime
                found = json.loads(read_text(path))
                self._lock_json = found if isinstance(found, dict) else {}
        except (OSError, ValueError, RecursionError):  # the events still tell most of it
            pass


class Watch:
    """The runs that were named; or, when none was, those in `root`, also those that begin later."""

    def __init__(self, root: Path, named: Sequence[Path] = ()) -> None:
        self._root, self._follows = root, not named
        self._runs: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        self._looked = float("-inf")
        names = [path.name or path.resolve().name for path in named]
        for path, name in zip(named, names, strict=True):
            unique = name if names.count(name) == 1 else str(path)
            self._runs[unique] = WatchedRun(path, unique)

    def answer(self, wanted: Sequence[str], cursors: Sequence[str], now: float | None = None) -> dict[str, Any]:
        """`wanted` are names; those of no run are passed over. With none, the runs that are shown at first."""
        now = time.time() if now is None else now
        runs = self._look()
        shown = self._shown_first(runs)
        places = dict(zip(wanted, map(Cursor.parse, cursors), strict=False))
        asked = [name for name in wanted if name in runs][:_MOST_SHOWN] or shown
        return {
            "time": now,
            "waiting_in": str(self._root) if self._follows else None,
            "known": [{"name": name, "first": name in shown, "running": is_locked(r.path)} for name, r in runs.items()],
            "runs": [runs[name].tell(places.get(name, Cursor()), now, _AT_ONCE_S) for name in dict.fromkeys(asked)],
        }

    def _look(self) -> dict[str, WatchedRun]:
        with self._lock:
            if self._follows and time.monotonic() - self._looked > _LOOK_AGAIN_S:
                self._looked = time.monotonic()
                names = [path.relative_to(self._root).as_posix() for path in run_paths(self._root)[:_MOST_KNOWN]]
                self._runs = {name: run for name in names if (run := self._found(name)) is not None}
            return dict(self._runs)

    def _found(self, name: str) -> WatchedRun | None:
        if name in self._runs:
            return self._runs[name]
        try:
            return WatchedRun(resolve_run(str(self._root / name), self._root)[0], name)
        except (UserError, OSError):  # it holds links to elsewhere, or is gone again
            return None

    def _shown_first(self, runs: Mapping[str, WatchedRun]) -> list[str]:
        if not self._follows:
            return list(runs)[:_MOST_SHOWN]
        return [name for name, run in runs.items() if is_locked(run.path)][:_MOST_SHOWN] or list(runs)[:1]


# ----------------------------------------------------------------------------------------------------
# One look at a run as text: what the page's headline says, for a terminal or a log.


_NOTES = 5
_TOLD = frozenset({"warning", "recovery", "resumed", "skipped"})


def snapshot(run: WatchedRun, now: float) -> tuple[dict[str, Any], list[str]]:
    """The run's figures, and lines to print."""
    run.read_on()
    summary, state = run.summary(now), run.state
    answers = summary["answers"]
    title = " · ".join(filter(None, (one_line(summary[key]) for key in ("status", "recipe", "device"))))
    validation = "" if summary["val_loss"] is None else f"validation {summary['val_loss']:.4f}"
    best = "" if summary["best_val_loss"] in (None, summary["val_loss"]) else f"best {summary['best_val_loss']:.4f}"
    rows = [
        ("how far", answers["far"]),
        ("how fast", answers["fast"]),
        ("health", answers["health"]),
        ("cost", answers["cost"]),
        ("last step", "  ".join([*step_facts(state.step), *filter(None, [validation, best])])),
        ("memory", next((text for label, text in plan_rows(state.plan) if label == "memory"), "")),
    ]
    told = [note for note in state.notes if note["kind"] in _TOLD][-_NOTES:]
    lines = [f"{run.path}  {title}", *(f"  {label:<11}{text}" for label, text in rows if text)]
    return summary, [*lines, *(f"  {note['kind']:<11}{note['message']}" for note in told)]
