"""The one event log of a run: append-only JSON lines that everything people look at is made from.

A log outlives its writer: a line may be torn by a kill, the disk may fill up, and a resumed run repeats steps that
the log already holds. Writing never stops training, and reading never stops at a bad line.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redline.cache import open_regular
from redline.errors import redact

SCHEMA = 1

Event = dict[str, Any]

# What a resumed run does again; everything else (warnings, plans, recoveries) stays true.
REPEATED = frozenset({"step", "eval", "checkpoint", "sample"})
MOST_EVENTS = 1 << 16  # of a log; of more steps some are left out, or a reader's memory would grow with the run


class EventLog:
    """Appends events to `path`, one flushed write a line. Safe to call from several threads."""

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
        self._error_told = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _ends_torn(self.path)
        opener = None if self.path.parent == Path("/dev") else open_regular  # a device that the caller names is meant
        self._file = open(self.path, "ab", buffering=0, opener=opener)  # noqa: SIM115 — open for as long as the run
        if self._torn:
            self._append(b"")

    def emit(self, type: str, **fields: Any) -> Event:
        """Write one event and return it as it was written."""
        event: Event = _plain({"type": type, "time": self._clock(), **fields})
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A lone surrogate has no UTF-8 form; the escape that `backslashreplace` writes is valid JSON for it.
        # What a resume changed is told by its start alone: a power cut must not take that back.
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
                self._tell_once(error)

    def _tell_once(self, error: OSError) -> None:
        if not self._error_told:
            self._error_told = True
            reason = error.strerror or str(error)
            self._on_error(f"{self.path}: events are being lost ({reason}). Training goes on; free some disk space.")


class NullEventLog(EventLog):
    """The log of a rank other than the first: events are cleaned and returned as usual, and written nowhere."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock

    def close(self) -> None:
        return

    def _append(self, line: bytes, *, synced: bool = False) -> None:
        return


class EventList(list[Event]):
    """Events in order; how many lines of the log could not be read, and how many steps are not kept."""

    unreadable: int = 0
    left_out: int = 0
    resumed_from: float | None = None  # by the last start


def read_events(path: Path) -> EventList:
    """Every event that still holds: bad lines are skipped, steps that a resumed run did again are dropped, and of very
    many steps the lows and the highs of the loss stand for the others."""
    events = EventList()
    if not Path(path).is_file():
        return events
    stretch, longest = list[Event](), 3 * -(-_lines(path) // MOST_EVENTS)
    with open(path, "rb", opener=open_regular) as file:
        for line in file:
            event = parse_event(line)
            if event is None:
                events.unreadable += bool(line.strip())
            elif longest > 3 and event["type"] == "step" and not event.get("skipped"):
                stretch.append(event)
                if len(stretch) == longest:
                    _close(stretch, events)
            else:
                _close(stretch, events)
                _drop_repeated(events, event)
                events.append(event)
    _close(stretch, events)
    return events


def _lines(path: Path) -> int:
    with open(path, "rb", opener=open_regular) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _close(stretch: list[Event], events: EventList) -> None:
    """Of these steps the lowest, the highest and the last are kept, so that no spike is lost."""
    losses = [math.inf if (loss := number(step, "loss")) is None else loss for step in stretch]
    kept = {losses.index(min(losses)), losses.index(max(losses)), len(losses) - 1} if losses else set()
    events += [stretch[place] for place in sorted(kept)]
    events.left_out += len(stretch) - len(kept)
    stretch.clear()


def finite(value: object) -> float | None:
    """`value` if it is a finite number, else None: logs may be older, newer or odder than their reader."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def only_finite(data: Any) -> Any:
    """The same with None for each NaN and infinity, which JSON has no word for."""
    if isinstance(data, Mapping):
        return {key: only_finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [only_finite(value) for value in data]
    return finite(data) if isinstance(data, float) else data


def number(fields: Mapping[str, Any], key: str) -> float | None:
    return finite(fields.get(key))


def section(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object of an event, empty when it is missing or something else."""
    value = fields.get(key)
    return value if isinstance(value, Mapping) else {}


def computed_flops(plan: Event) -> float | None:
    """FLOPs per token with recomputation. In older logs `executed` includes it and there is no `recomputed`."""
    flops = section(plan, "flops_per_token")
    executed = number(flops, "executed")
    return None if executed is None else executed + (number(flops, "recomputed") or 0.0)


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb", opener=open_regular) as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """Strict JSON has no NaN or infinity: they become null; and a log is no place for secrets. Anything that is not
    plain data is left to fail."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return redact(str(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def parse_event(line: bytes) -> Event | None:
    try:
        event = _DECODER.decode(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def _drop_repeated(events: EventList, event: Event) -> None:
    resumed_from = number(event, "resumed_from")
    if event["type"] == "start" and resumed_from is not None:
        events[:] = [e for e in events if e["type"] not in REPEATED or (number(e, "step") or 0) <= resumed_from]
        events.resumed_from = resumed_from
    elif event["type"] in ("eval", "sample") and number(event, "step") == events.resumed_from is not None:
        start = max(at for at, e in enumerate(events) if e["type"] == "start")
        events[:] = [e for at, e in enumerate(events) if at > start or not _same_look(e, event)]


def _same_look(one: Event, other: Event) -> bool:
    return all(one.get(key) == other.get(key) for key in ("type", "step", "label"))
