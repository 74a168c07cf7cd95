"""The runs that the live page shows: finding them, following their logs, and answering what a page lacks.

A log is read only when a page asks, from where the last answer ended.
"""

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
from redline.runs.cards import cards_of
from redline.runs.console import plan_rows, step_facts
from redline.runs.events import number, one_line, section
from redline.runs.roofline import analyse
from redline.runs.state import RunState
from redline.runs.summary import (
    answers,
    expected_usd,
    is_locked,
    limit_sentences,
    recent,
    remaining_s,
    resolve_run,
    run_paths,
    speed_levels,
)
from redline.vocabulary import EVENTS_FILE, RECIPE_LOCK_FILE, Status, status_of_stop

# ----------------------------------------------------------------------------------------------------
# Following a log that grows.
#
# The file belongs to another process and may lie on any file system: it may be missing, torn, truncated, replaced, or
# not a regular file.


_BLOCK = 1 << 18
_MAX_LINE = 4 << 20  # bytes; a longer line is no event of redline
_HEAD = 256  # first bytes of the file, compared to notice that another log took its place


class Tail:
    """Return the new lines of a file: whole lines only, and all of them again if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.size = 0
        self._identity: tuple[int, int] | None = None
        self._head = self._rest = b""
        self._skipping = False  # inside a line that is too long

    @property
    def share(self) -> float:
        """The share of the file that has been read."""
        return min(1.0, self.offset / self.size) if self.size else 1.0

    def read(self, seconds: float | None = None) -> Iterator[list[bytes] | None]:
        """Yield lists of new lines, for about this many seconds; None when lines yielded before no longer hold."""
        descriptor = self._open()
        if descriptor is None:
            return
        end = None if seconds is None else time.monotonic() + seconds
        with open(descriptor, "rb", buffering=0) as file:
            if self._was_replaced(descriptor):
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
        try:  # follow no link, and do not block: the name may belong to a pipe, which would wait for a writer
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        self.size = status.st_size
        return descriptor

    def _was_replaced(self, descriptor: int) -> bool:
        """Return whether this is another file, a shorter one, or one with another beginning."""
        status = os.fstat(descriptor)
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        if before is None:
            return False
        changed = os.pread(descriptor, len(self._head), 0) != self._head
        return before != self._identity or status.st_size < self.offset or changed

    def _lines(self, block: bytes) -> list[bytes]:
        *lines, rest = (self._rest + block).split(b"\n")
        if lines and self._skipping:
            lines, self._skipping = lines[1:], False
        if len(rest) > _MAX_LINE:
            self._skipping = True
        self._rest = b"" if self._skipping else rest
        return [line for line in lines if len(line) <= _MAX_LINE]


# ----------------------------------------------------------------------------------------------------
# The runs of a page.


_READ_S = 0.2  # spent reading for one answer; of a long log the page shows the part that was read so far
_FIND_RUNS_S = 2.0  # between searches for new runs
_ANALYSE_S = 5.0  # between analyses of the roofline, which take a moment
_MAX_KNOWN, _MAX_SHOWN = 60, 8  # runs in the list of a page, and shown at once
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
_MAX_LOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Cursor:
    """How much of a run a page has already: the generation of its state, buckets of its curves, and numbered notes."""

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
    """A run, its state as far as its log was read, and its lock."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.state, self.tail = RunState(), Tail(path / EVENTS_FILE)
        self._lock = threading.Lock()
        self._lock_json: Mapping[str, Any] = {}
        self._lock_time: float | None = None
        self._limits: tuple[float, list[str]] = (-_ANALYSE_S, [])

    def update(self, cursor: Cursor, now: float, seconds: float | None = None) -> dict[str, Any]:
        """Read on, for at most this long, and return the state without the part of the curves that the page has."""
        with self._lock:
            self.read_on(seconds)
            state = self.state
            have = cursor if cursor.generation == state.generation else Cursor()
            return {
                **self.summary(now),
                "generation": state.generation,
                "reading": round(self.tail.share, 4),
                "plan": self._plan(),
                "held_back": self._limit_sentences(),
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
        """Return the figures and sentences of this moment."""
        state, status = self.state, self.status()
        newest = state.stop or state.step
        return {
            "name": self.name,
            "path": str(self.path),
            "status": status,
            "recipe": self._lock_json.get("recipe_name") or state.start.get("recipe"),
            "device": section(self._lock_json, "machine").get("name") or state.start.get("device"),
            "step": number(newest, "step"),
            "steps_planned": state.end_step,
            "tokens": number(newest, "tokens"),
            "loss": number(state.step, "loss"),
            "val_loss": number(state.eval, "loss"),
            "best_val_loss": state.best_val,
            "metrics": {
                k: v for k in state.eval if k not in ("time", "step") and (v := number(state.eval, k)) is not None
            },
            "tokens_per_s": state.speed.median("tokens_per_s"),
            "samples_per_s": state.speed.median("samples_per_s"),
            "mfu": state.speed.median("mfu"),
            "tokens_per_s_now": recent(state, "tokens_per_s"),
            "memory_gib": state.peak_memory_gib,
            "progress": 1.0 if status is Status.FINISHED else number(state.step, "progress"),
            "eta_s": remaining_s(state, status, now),
            "hours": number(newest, "hours"),
            "cost_usd": number(newest, "cost_usd"),
            "cost_expected_usd": expected_usd(state, status, now),
            "last_event_s": None if state.last_time is None else round(max(0.0, now - state.last_time), 1),
            "skipped": state.skipped,
            "unreadable": state.unreadable,
            "held_lines": state.throttled_lines,
            "cards": None if (cards := cards_of(state.recent)) is None else cards.as_dict(),
            "answers": answers(state, status, now, self._lock_json, str(self.path)).as_dict(),
        }

    def status(self) -> Status:
        """Return the status as `redline runs` does, from the part of the log that was read."""
        if is_locked(self.path):
            return Status.RUNNING
        return status_of_stop(self.state.stop) if self.state.stop else Status.CRASHED

    def _plan(self) -> dict[str, Any]:
        plan, memory = self.state.plan, section(self.state.plan, "memory_gib")
        speed, ceiling = section(plan, "throughput"), number(section(plan, "ceiling"), "tokens_per_s")
        share, rate = number(speed, "mfu"), number(speed, "tokens_per_s")
        return {
            "tokens_per_s": speed_levels(self.state, self._lock_json),
            "mfu": share,
            # In the unit of the run's `mfu`, a share of the bf16 peak. The ceiling's own mfu in the plan is a share of
            # the peak of the training precision.
            "mfu_ceiling": share * ceiling / rate if share and ceiling and rate else None,
            "memory": {part: gib for part in _PARTS if (gib := number(memory, part)) is not None},
            "memory_peak": number(memory, "peak"),
            "memory_available": number(memory, "available"),
        }

    def _limit_sentences(self) -> list[str]:
        """Return what limits the speed by the last log lines, in the sentences of the report."""
        now = time.monotonic()
        if now - self._limits[0] >= _ANALYSE_S and self.state.recent:
            roofline = analyse(list(self.state.recent), self.state.plan, self._lock_json)
            self._limits = (now, limit_sentences(roofline))
        return self._limits[1]

    def _read_lock(self) -> None:
        path = self.path / RECIPE_LOCK_FILE
        try:
            status = path.stat()
            if status.st_mtime != self._lock_time and status.st_size < _MAX_LOCK_BYTES:
                self._lock_time = status.st_mtime
                content = json.loads(read_text(path))
                self._lock_json = content if isinstance(content, dict) else {}
        except (OSError, ValueError, RecursionError):  # most of the page is made from the events
            pass


class Watch:
    """The runs that the user named or, if none was named, all runs in `root`, including those that start later."""

    def __init__(self, root: Path, named: Sequence[Path] = ()) -> None:
        self._root, self._finds_runs = root, not named
        self._runs: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        self._searched_at = float("-inf")
        names = [path.name or path.resolve().name for path in named]
        for path, name in zip(named, names, strict=True):
            unique = name if names.count(name) == 1 else str(path)
            self._runs[unique] = WatchedRun(path, unique)

    def answer(self, wanted: Sequence[str], cursors: Sequence[str], now: float | None = None) -> dict[str, Any]:
        """Return what a page lacks of the wanted runs, or of those shown at first if it names none that exist."""
        now = time.time() if now is None else now
        runs = self._known_runs()
        shown = self._shown_first(runs)
        page_has = dict(zip(wanted, map(Cursor.parse, cursors), strict=False))
        names = [name for name in wanted if name in runs][:_MAX_SHOWN] or shown
        return {
            "time": now,
            "waiting_in": str(self._root) if self._finds_runs else None,
            "known": [{"name": name, "first": name in shown, "running": is_locked(r.path)} for name, r in runs.items()],
            "runs": [runs[name].update(page_has.get(name, Cursor()), now, _READ_S) for name in dict.fromkeys(names)],
        }

    def _known_runs(self) -> dict[str, WatchedRun]:
        with self._lock:
            if self._finds_runs and time.monotonic() - self._searched_at > _FIND_RUNS_S:
                self._searched_at = time.monotonic()
                names = [path.relative_to(self._root).as_posix() for path in run_paths(self._root)[:_MAX_KNOWN]]
                self._runs = {name: run for name in names if (run := self._open_run(name)) is not None}
            return dict(self._runs)

    def _open_run(self, name: str) -> WatchedRun | None:
        if name in self._runs:
            return self._runs[name]
        try:
            return WatchedRun(resolve_run(str(self._root / name), self._root)[0], name)
        except (UserError, OSError):  # the run holds links to elsewhere, or was removed
            return None

    def _shown_first(self, runs: Mapping[str, WatchedRun]) -> list[str]:
        if not self._finds_runs:
            return list(runs)[:_MAX_SHOWN]
        return [name for name, run in runs.items() if is_locked(run.path)][:_MAX_SHOWN] or list(runs)[:1]


# ----------------------------------------------------------------------------------------------------
# `redline watch --once`: the head of the page as text, for a terminal or a log.


_NOTES = 5
_SHOWN_NOTES = frozenset({"warning", "recovery", "resumed", "skipped"})


def _card_lines(state: RunState) -> list[str]:
    cards = cards_of(state.recent)
    return [] if cards is None else cards.lines()


def snapshot(run: WatchedRun, now: float) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of the run, and lines to print."""
    run.read_on()
    summary, state = run.summary(now), run.state
    sentences = summary["answers"]
    title = " · ".join(filter(None, (one_line(summary[key]) for key in ("status", "recipe", "device"))))
    validation = "" if summary["val_loss"] is None else f"validation {summary['val_loss']:.4f}"
    best = "" if summary["best_val_loss"] in (None, summary["val_loss"]) else f"best {summary['best_val_loss']:.4f}"
    rows = [
        ("progress", sentences["far"]),
        ("speed", sentences["fast"]),
        ("health", sentences["health"]),
        ("cost", sentences["cost"]),
        ("last step", "  ".join([*step_facts(state.step), *filter(None, [validation, best])])),
        ("memory", next((text for label, text in plan_rows(state.plan) if label == "memory"), "")),
        *((label, text) for label, text in zip(("ranks", *[""] * 9), _card_lines(state), strict=False)),
    ]
    notes = [note for note in state.notes if note["kind"] in _SHOWN_NOTES][-_NOTES:]
    lines = [f"{run.path}  {title}", *(f"  {label:<11}{text}" for label, text in rows if text)]
    return summary, [*lines, *(f"  {note['kind']:<11}{note['message']}" for note in notes)]
