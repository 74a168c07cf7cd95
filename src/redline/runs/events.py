"""The event log of a run: JSON lines that are only ever appended, and how they are read back.

The console, the report, the live page, comparisons and trackers are all made from it. A log outlives the process that
writes it: a kill may tear a line, the disk may fill up, and a resumed run repeats steps that the log already holds.
So writing an event never stops training, and reading never stops at a bad line. `ResumeRule` alone decides which
events of earlier attempts still hold; every reader uses it.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.cache import open_regular
from redline.errors import redact

SCHEMA = 1

Event = dict[str, Any]

# Types that a resumed run writes again; every other event (warnings, plans, recoveries) stays true.
REPEATED_TYPES = frozenset({"step", "eval", "checkpoint", "mirror", "sample"})
MAX_EVENTS = 1 << 16  # of longer logs some steps are left out, or the memory of a reader would grow with the run
TAIL_BYTES = 64 << 10  # enough to hold the last events of any log


class EventLog:
    """Append events to `path`, one line and one flushed write each. Safe to call from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        on_error: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.path = Path(path)
        self._clock, self._on_error = clock, on_error
        self._lock = threading.RLock()
        self._error_reported = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _ends_torn(self.path)
        opener = None if self.path.parent == Path("/dev") else open_regular  # a device is what the caller asked for
        self._file = open(self.path, "ab", buffering=0, opener=opener)  # noqa: SIM115 — open for as long as the run
        if self._torn:
            self._append(b"")

    def emit(self, type: str, **fields: Any) -> Event:
        """Write one event and return it as written."""
        event: Event = _to_json_types({"type": type, "time": self._clock(), **fields})
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A lone surrogate has no UTF-8 form; the escape that `backslashreplace` writes is valid JSON for it.
        # Only the start event records what a resume changed, so it has to survive a power cut.
        self._append(text.encode("utf-8", "backslashreplace") + b"\n", synced=type == "start")
        return event

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, line: bytes, *, synced: bool = False) -> None:
        with self._lock:
            # After a torn line a newline comes first, so that only the torn event is lost and not this one too.
            rest = memoryview(b"\n" + line if self._torn else line)
            try:
                while rest:
                    self._torn = True
                    rest = rest[self._file.write(rest) or 0 :]
                self._torn = False
                if synced:
                    os.fsync(self._file.fileno())
            except OSError as error:
                self._report_once(error)

    def _report_once(self, error: OSError) -> None:
        if not self._error_reported:
            self._error_reported = True
            reason = error.strerror or str(error)
            self._on_error(f"{self.path}: events cannot be written ({reason}). Training continues; free disk space.")


class NullEventLog(EventLog):
    """The log of every rank but rank 0: return events as `EventLog` does, and write nothing."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def close(self) -> None:
        return

    def _append(self, line: bytes, *, synced: bool = False) -> None:
        return


# ----------------------------------------------------------------------------------------------------
# Reading a log back: which events still hold after a resume.


_ANY_LABEL = object()


@dataclass(frozen=True)
class Replaced:
    """Earlier events that no longer hold: those of `types` with `after` < step <= `until`, and with this label."""

    types: frozenset[str]
    after: float
    until: float = math.inf
    label: object = _ANY_LABEL

    def covers(self, event: Event) -> bool:
        if event["type"] not in self.types or not self.after < (number(event, "step") or 0) <= self.until:
            return False
        return self.label is _ANY_LABEL or event.get("label") == self.label


class ResumeRule:
    """Tell which earlier events an event replaces. Pass it the events of a log in order.

    A start with `resumed_from: N` replaces the steps, evaluations, checkpoints and samples after step N, because the
    resumed run does them again. Whether it also repeats the evaluation and the samples of step N itself depends on
    whether they came before or after the checkpoint; if they are in the log again, the earlier ones are replaced.
    """

    def __init__(self) -> None:
        self.resumed_from: float | None = None
        self._repeated: set[tuple[str, str]] = set()  # evaluations and samples of step N, by label

    def replaced_by(self, event: Event) -> Replaced | None:
        kind = event["type"]
        if kind == "step":  # most events are steps, and they replace nothing
            return None
        if kind == "start":
            resumed_from = number(event, "resumed_from")
            if resumed_from is None:
                return None
            self.resumed_from = resumed_from
            self._repeated.clear()
            return Replaced(REPEATED_TYPES, resumed_from)
        if kind in ("eval", "sample") and self.resumed_from is not None and number(event, "step") == self.resumed_from:
            label = event.get("label")
            if (kind, repr(label)) not in self._repeated:
                self._repeated.add((kind, repr(label)))
                return Replaced(frozenset({kind}), self.resumed_from - 1, self.resumed_from, label)
        return None


class History(list[Event]):
    """The events of a run that still hold, in order."""

    unreadable: int = 0  # lines of the log that are no events
    left_out: int = 0  # steps that were dropped to bound the memory of the reader

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__()
        self._resumes = ResumeRule()
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Append an event after removing those that it replaces."""
        replaced = self._resumes.replaced_by(event)
        if replaced is not None:
            self[:] = [earlier for earlier in self if not replaced.covers(earlier)]
        self.append(event)

    def of_type(self, *types: str) -> list[Event]:
        return [event for event in self if event["type"] in types]

    def until(self, step: float) -> History:
        """Return the history up to a step. Events without a step are kept."""
        return History(event for event in self if (number(event, "step") or 0) <= step)

    def last_number(self, key: str, *types: str) -> float | None:
        """Return the newest number under `key` in events of these types."""
        return next(
            (value for event in reversed(self) if event["type"] in types and (value := number(event, key)) is not None),
            None,
        )

    @property
    def first_start(self) -> Event:
        """The start event of the first attempt; empty if the log has none."""
        return next((event for event in self if event["type"] == "start"), {})

    @property
    def resumes(self) -> list[Event]:
        """The start events of attempts that continued from a checkpoint, or from step 0 for lack of one."""
        return [event for event in self if event["type"] == "start" and event.get("resumed_from") is not None]

    def resume_overrides(self) -> list[list[str]]:
        """Return the `key=value` words of each resume, in order; they stay in force for later resumes.

        `stops` of a start event holds the counted stop conditions in force from there on. Logs of older versions lack
        it: there an override changed one of the three conditions and left the others.
        """
        words: list[list[str]] = []
        for start in self.resumes:
            stops = section(start, "stops")
            words += [override_words(start), [f"train.{key}={json.dumps(value)}" for key, value in stops.items()]]
        changed = any(override_words(start) for start in self.resumes)
        return [group for group in words if group] if changed else []

    @property
    def plan(self) -> Event:
        """The newest plan; empty if the log has none."""
        return next((event for event in reversed(self) if event["type"] == "plan"), {})

    @property
    def stop(self) -> Event | None:
        """The stop event of the newest attempt; None if that attempt is running or crashed."""
        last = next((event for event in reversed(self) if event["type"] in ("start", "stop")), None)
        return last if last is not None and last["type"] == "stop" else None


def read_events(path: Path) -> History:
    """Return the events of a log that still hold.

    Lines that are no events are counted and skipped. Of a very long log some steps are left out; those with the lowest
    and the highest loss of each stretch are kept, so that no spike disappears from a curve.
    """
    history = History()
    if not Path(path).is_file():
        return history
    stretch, longest = list[Event](), 3 * -(-_count_lines(path) // MAX_EVENTS)
    with open(path, "rb", opener=open_regular) as file:
        for line in file:
            event = parse_event(line)
            if event is None:
                history.unreadable += bool(line.strip())
            elif longest > 3 and event["type"] == "step" and not event.get("skipped"):
                stretch.append(event)
                if len(stretch) == longest:
                    _add_extremes(stretch, history)
            else:
                _add_extremes(stretch, history)
                history.add(event)
    _add_extremes(stretch, history)
    return history


def read_last_events(path: Path) -> History:
    """Return the events in the last TAIL_BYTES of a log: enough to tell how the run ended, however long the log is."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return History()
    return History(event for line in lines if (event := parse_event(line)) is not None)


def _count_lines(path: Path) -> int:
    with open(path, "rb", opener=open_regular) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _add_extremes(stretch: list[Event], history: History) -> None:
    """Add the steps with the lowest and the highest loss and the last step to the history, and empty the stretch."""
    losses = [math.inf if (loss := number(step, "loss")) is None else loss for step in stretch]
    kept = {losses.index(min(losses)), losses.index(max(losses)), len(losses) - 1} if losses else set()
    history += [stretch[place] for place in sorted(kept)]
    history.left_out += len(stretch) - len(kept)
    stretch.clear()


_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and Infinity, which older logs may hold, become None


def parse_event(line: bytes) -> Event | None:
    """Return the event on a line of the log, or None if the line is torn or is no event."""
    try:
        event = _DECODER.decode(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


# ----------------------------------------------------------------------------------------------------
# Fields of events. Logs may be older or newer than the code that reads them, so no field is trusted to have its type.


def finite(value: object) -> float | None:
    """Return `value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def only_finite(data: Any) -> Any:
    """Return the data with None for every NaN and infinity, which strict JSON does not have."""
    if isinstance(data, Mapping):
        return {key: only_finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [only_finite(value) for value in data]
    return finite(data) if isinstance(data, float) else data


def number(fields: Mapping[str, Any], key: str) -> float | None:
    return finite(fields.get(key))


def numbers(events: Iterable[Event], key: str) -> list[float]:
    """Return the finite numbers that the events have under `key`."""
    return [value for event in events if (value := number(event, key)) is not None]


def section(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested object of an event; empty if it is missing or something else."""
    value = fields.get(key)
    return value if isinstance(value, Mapping) else {}


# C0 and C1 controls (escape codes among them), lone surrogates, and the marks that reverse the reading direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def clean(value: object) -> str:
    """Return text of unknown origin made safe to print: without escape codes and half characters."""
    return "" if value is None else _UNPRINTABLE.sub("�", str(value).replace("\r\n", "\n"))


def one_line(value: object) -> str:
    """Return `clean(value)` with every run of white space as one space."""
    return " ".join(clean(value).split())


def override_words(event: Event, key: str = "overrides") -> list[str]:
    """Return the `key=value` words of the command that a start event records; empty if it records none."""
    words = event.get(key)
    return [str(word) for word in words] if isinstance(words, list) else []


def overridden_keys(event: Event) -> set[str]:
    """Return the recipe keys that the command of a start event set."""
    return {word.removeprefix("+").partition("=")[0] for word in override_words(event)}


def computed_flops(plan: Event) -> float | None:
    """Return the FLOPs per token including recomputation. In older logs `executed` includes it and `recomputed` is
    missing."""
    flops = section(plan, "flops_per_token")
    executed = number(flops, "executed")
    return None if executed is None else executed + (number(flops, "recomputed") or 0.0)


# Values of `throttle` in step events that mean a slower clock because of heat or the power supply.
_OVERHEATING = frozenset({"thermal", "hw_thermal", "hw_slowdown", "power_brake"})


@dataclass(frozen=True)
class Throttling:
    """Why the GPU ran below its highest clock during a step."""

    power_limit: bool
    heat: bool  # or the power supply


def throttling(step: Event) -> Throttling | None:
    """Return why the GPU was slowed in a step event; None if the card does not report it."""
    reasons = step.get("throttle")  # names of NVML's reasons joined by +; empty if the clock was not limited
    if not isinstance(reasons, str):
        return None
    names = set(reasons.split("+"))
    return Throttling("power_cap" in names, not _OVERHEATING.isdisjoint(names))


def _ends_torn(path: Path) -> bool:
    """Return whether the last line of the file has no newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb", opener=open_regular) as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _to_json_types(value: Any) -> Any:
    """Return the value as strict JSON has it: None for NaN and infinity, text for paths, secrets replaced.

    `json.dumps` refuses anything else, which is a mistake in the code that emits the event.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return redact(str(value))
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_types(item) for item in value]
    return value
