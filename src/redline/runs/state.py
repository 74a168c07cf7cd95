"""The state of a run, kept from its events one by one in memory that does not grow with the run.

The live page reads logs of any length this way. `events.read_events` returns the events themselves; both drop what a
resumed run repeats by the same `ResumeRule`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic_core import from_json

from redline.runs.events import (
    REPEATED_TYPES,
    Event,
    Replaced,
    ResumeRule,
    clean,
    finite,
    number,
    one_line,
    parse_event,
    section,
    throttling,
)
from redline.runs.speed import RunSpeed
from redline.runs.summary import describe_event

# ----------------------------------------------------------------------------------------------------
# Curves of bounded size: of very many points those with the lowest and highest values are kept.
#
# A bucket holds neighbouring points. When there are too many buckets, neighbours are merged. Early buckets stay narrow,
# so that a logarithmic axis shows the beginning too. What is kept depends only on the points, never on how many of them
# arrived at once; otherwise two pages that read the same log would show different curves.


MAX_BUCKETS = 1000  # each is drawn as two points
_BUCKETS_PER_E = 32  # while the run grows by a factor of e: narrow enough for a logarithmic axis

Value = float | None


class _Bucket:
    """Neighbouring points. `rising` states for each field whether its lowest value came before its highest."""

    __slots__ = ("count", "first", "high", "last", "low", "rising", "start")

    def __init__(self, start: int, x: Sequence[Value], values: Sequence[Value]) -> None:
        self.start, self.count = start, 1
        self.first = self.last = x
        self.low, self.high = list(values), list(values)
        self.rising = [True] * len(values)

    def add(self, x: Sequence[Value], values: Sequence[Value]) -> None:
        self.count += 1
        self.last = x
        for place, value in enumerate(values):
            if value is None:
                continue
            low, high = self.low[place], self.high[place]
            if low is None or high is None:
                self.low[place] = self.high[place] = value
            elif value < low:
                self.low[place], self.rising[place] = value, False
            elif value > high:
                self.high[place], self.rising[place] = value, True

    def merge(self, later: _Bucket) -> None:
        self.count += later.count
        self.last = later.last
        for place, (low, high) in enumerate(zip(later.low, later.high, strict=True)):
            if low is None or high is None:
                continue
            own_low, own_high = self.low[place], self.high[place]
            if own_low is None or own_high is None:
                self.low[place], self.high[place], self.rising[place] = low, high, later.rising[place]
                continue
            lower, higher = low < own_low, high > own_high
            if lower and higher:
                self.rising[place] = later.rising[place]
            elif lower or higher:
                self.rising[place] = higher
            self.low[place], self.high[place] = min(low, own_low), max(high, own_high)

    def rows(self) -> list[tuple[Sequence[Value], list[Value]]]:
        """Return the points to draw: the lowest and the highest value of each field, in the order they came."""
        if self.count == 1:
            return [(self.first, self.low)]
        pairs = list(zip(self.low, self.high, self.rising, strict=True))
        before = [low if rising else high for low, high, rising in pairs]
        after = [high if rising else low for low, high, rising in pairs]
        return [(self.first, before), (self.last, after)]


class Curve:
    """Values of `fields` along `axes`, the first of which orders the points.

    `generation` is raised when points that a reader may already have were changed or removed.
    """

    def __init__(self, axes: Sequence[str], fields: Sequence[str], max_buckets: int = MAX_BUCKETS) -> None:
        self.axes, self.fields, self.generation = tuple(axes), tuple(fields), 0
        self._max_buckets = max_buckets
        self._reset()

    def _reset(self) -> None:
        self._buckets: list[_Bucket] = []
        self._max_width, self._buckets_per_e = 1, _BUCKETS_PER_E
        self._points = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def clear(self) -> None:
        self._reset()
        self.generation += 1

    def add(self, x: Sequence[Value], values: Sequence[Value]) -> None:
        last = self._buckets[-1] if self._buckets else None
        if last is not None and last.count < self._capacity(last):
            last.add(x, values)
        else:
            self._buckets.append(_Bucket(self._points, x, values))
            if len(self._buckets) > self._max_buckets:
                self._merge_neighbours()
        self._points += 1

    def drop_beyond(self, limit: float) -> None:
        """Remove the points after `limit`.

        A bucket that reaches beyond it is removed as a whole: its extremes may belong to removed points.
        """
        kept = [bucket for bucket in self._buckets if (bucket.last[0] or 0) <= limit]
        if len(kept) < len(self._buckets):
            self._buckets = kept
            self._points = kept[-1].start + kept[-1].count if kept else 0
            self.generation += 1

    def lowest(self, field: str) -> Value:
        place = self.fields.index(field)
        return min((low for bucket in self._buckets if (low := bucket.low[place]) is not None), default=None)

    def since(self, buckets: int) -> dict[str, Any]:
        """Return the rows that a reader with this many buckets lacks.

        The last of these buckets may have grown, so it is included: the reader replaces its rows from `from` on.
        """
        known = max(0, min(buckets, len(self._buckets)) - 1)
        rows = [row for bucket in self._buckets[known:] for row in bucket.rows()]
        x = {name: [_six_digits(row[0][place]) for row in rows] for place, name in enumerate(self.axes)}
        y = {name: [_six_digits(row[1][place]) for row in rows] for place, name in enumerate(self.fields)}
        before = sum(1 if bucket.count == 1 else 2 for bucket in self._buckets[:known])
        known_fields = {name: values for name, values in y.items() if any(value is not None for value in values)}
        return {"from": before, "buckets": len(self._buckets), "rows": len(rows), "x": x, "y": known_fields}

    def _capacity(self, bucket: _Bucket) -> int:
        """Return how many points the bucket may hold."""
        width = bucket.start // self._buckets_per_e if self._buckets_per_e else self._max_width
        return max(1, min(self._max_width, width))

    def _merge_neighbours(self) -> None:
        """Merge until a quarter of the buckets is free, so that this is rare. If the narrow early buckets alone take
        more than that, they become wider too."""
        self.generation += 1
        before = 0
        while (now := len(self._buckets)) > 0.75 * self._max_buckets:
            self._max_width *= 2
            if now == before:
                self._buckets_per_e //= 2
            before = now
            merged = [self._buckets[0]]
            for _, bucket in pairwise(self._buckets):
                if merged[-1].count + bucket.count <= self._capacity(merged[-1]):
                    merged[-1].merge(bucket)
                else:
                    merged.append(bucket)
            self._buckets = merged


def _six_digits(value: Value) -> Value:
    """Round to what a screen can show, which makes the answers of the live page much smaller."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


# ----------------------------------------------------------------------------------------------------
# The state itself.


AXES = ("step", "tokens", "hours")
STEP_FIELDS = (
    *("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "mfu_causal", "step_ms", "data_wait_ms", "memory_gib"),
    *("gpu_util", "power_w", "sm_clock_mhz", "temperature_c", "throttle"),
)
_STEP_MS, _DATA_WAIT, _MEMORY, _THROTTLE = map(STEP_FIELDS.index, ("step_ms", "data_wait_ms", "memory_gib", "throttle"))
# The names of the curves on the page: waiting as a share of the step, and throttling as a number.
CURVE_FIELDS = tuple({"data_wait_ms": "data_wait", "throttle": "held_back"}.get(name, name) for name in STEP_FIELDS)
RECENT = 50  # log lines from which current rates and health are judged
_MAX_NOTES, _MAX_ROUTINE_NOTES, _MAX_SAMPLES, _MAX_TEXT = 150, 50, 40, 4000
_ROUTINE = frozenset({"saved", "replan"})
_EXACT_INTEGERS = 1 << 53


class RunState:
    """The newest facts, curves of bounded size, and the last notes and samples of a run.

    `generation` changes when something that a page may already show no longer holds.
    """

    def __init__(self) -> None:
        self.steps, self.evals = Curve(AXES, CURVE_FIELDS), Curve(AXES, ("loss",))
        # Starts at a random number: a page that outlives its server must not take the state of another server's
        # run for the one it knows.
        self._replaced_count = secrets.randbits(40)
        self._reset()

    def _reset(self) -> None:
        self._resumes = ResumeRule()
        self.start: Event = {}
        self.plan: Event = {}
        self.step: Event = {}
        self.eval: Event = {}
        self.stop: Event | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT)
        self.samples: deque[dict[str, Any]] = deque(maxlen=_MAX_SAMPLES)
        self._notes: deque[dict[str, Any]] = deque(maxlen=_MAX_NOTES)
        self._routine_notes: deque[dict[str, Any]] = deque(maxlen=_MAX_ROUTINE_NOTES)  # must not crowd out a warning
        self.speed = RunSpeed()
        self.peak_memory_gib: float | None = None
        self.end_step: float | None = None  # of the newest plan of the schedule
        self.last_time: float | None = None
        self.activity = ""  # what the run does while it logs no steps
        self._skips: list[tuple[float, int]] = []  # (step, skipped updates)
        self.unreadable = self.numbered = 0
        self.throttled_lines = {"all": 0, "power": 0, "heat": 0}

    @property
    def generation(self) -> int:
        return self._replaced_count + self.steps.generation + self.evals.generation

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Events other than steps and evaluations, in order, as messages."""
        return sorted((*self._notes, *self._routine_notes), key=lambda note: note["number"])

    @property
    def skipped(self) -> int:
        """The number of skipped updates."""
        return sum(count for _, count in self._skips)

    @property
    def best_val(self) -> float | None:
        return self.evals.lowest("loss")

    def clear(self) -> None:
        self.steps.clear()
        self.evals.clear()
        self._reset()

    def read(self, line: bytes) -> None:
        """Add the event on a line of the log; count a line that is none."""
        event = _parse_fast(line)
        if event is not None:
            self.add(event)
        else:
            self.unreadable += bool(line.strip())

    def add(self, event: Event) -> None:
        self.last_time = _finite(event.get("time")) or self.last_time
        replaced = self._resumes.replaced_by(event)
        if replaced is not None:
            self._drop(replaced)
        handler = self._HANDLERS.get(event["type"])
        if handler is not None:
            handler(self, event)

    def _drop(self, replaced: Replaced) -> None:
        """Remove what an event replaces, as `ResumeRule` decided."""
        after = replaced.after
        if "step" not in replaced.types:  # the evaluation or the samples of the step that a resume began with
            if "eval" in replaced.types:
                self.evals.drop_beyond(after)
            else:
                self._replaced_count += 1
                label = _sample_text(replaced.label)
                gone = [s for s in self.samples if after < (s["step"] or 0) <= replaced.until and s["label"] == label]
                self._keep_samples(lambda sample: sample not in gone)
            return
        self._replaced_count += 1
        self.steps.drop_beyond(after)
        self.evals.drop_beyond(after)
        self.speed.drop_beyond(after)
        if (number(self.step, "step") or 0) > after:
            kept = [event for event in self.recent if (number(event, "step") or 0) <= after]
            self.step = kept[-1] if kept else {"step": int(after)}
        if (number(self.eval, "step") or 0) > after:
            self.eval = {}
        self._keep_samples(lambda sample: (sample["step"] or 0) <= after)
        self._skips = [(step, count) for step, count in self._skips if step <= after]
        for notes in (self._notes, self._routine_notes):
            kept_notes = [note for note in notes if not note["repeated"] or (note["step"] or 0) <= after]
            notes.clear()
            notes.extend(kept_notes)

    def _keep_samples(self, keep: Any) -> None:
        self.samples = deque(filter(keep, self.samples), maxlen=_MAX_SAMPLES)

    # --- handlers by type of event

    def _step(self, event: Event) -> None:
        x = [_integer(event, "step"), _integer(event, "tokens"), _finite(event.get("hours"))]
        if x[0] is None:
            return
        last = _finite(self.step.get("step"))
        # A curve runs forward. If a log goes back without a start event that says so, the later steps hold.
        if last is not None and x[0] <= last:
            self.steps.drop_beyond(x[0] - 1)
            self.speed.drop_beyond(x[0] - 1)
        self.step = event
        self.recent.append(event)
        self.speed.add(event)
        self.activity = ""
        values = [_finite(value) for value in map(event.get, STEP_FIELDS)]
        wait, step_ms = values[_DATA_WAIT], values[_STEP_MS]
        values[_DATA_WAIT] = wait / step_ms if wait is not None and step_ms else None
        values[_THROTTLE] = self._throttle_level(event)
        self.steps.add(x, values)
        if (memory := values[_MEMORY]) is not None:
            self.peak_memory_gib = max(memory, self.peak_memory_gib or 0.0)
        if skipped := _finite(event.get("skipped")):
            self._skips.append((x[0], int(skipped)))
            self._note(event)

    def _throttle_level(self, event: Event) -> Value:
        """Return 0 for a full clock, 1 at the power limit, 2 for heat or the power supply; None if not reported."""
        found = throttling(event)
        if found is None:
            return None
        self.throttled_lines["all"] += 1
        self.throttled_lines["power"] += found.power_limit
        self.throttled_lines["heat"] += found.heat
        return 2 if found.heat else 1 if found.power_limit else 0

    def _eval(self, event: Event) -> None:
        step, last = _integer(event, "step"), number(self.eval, "step")
        self.eval, self.activity = event, ""
        if step is None:
            return
        if last is not None and step < last:
            self.evals.drop_beyond(step)
        # Evaluations do not log their hours; they follow a step that does.
        hours = 0.0 if step == 0 else number(self.step, "hours")
        self.evals.add([step, _integer(event, "tokens"), hours], [number(event, "loss")])

    def _sample(self, event: Event) -> None:
        self.numbered += 1
        texts = {key: _sample_text(event.get(key)) for key in ("label", "prompt", "text")}
        self.samples.append({"number": self.numbered, "step": _integer(event, "step"), **texts})

    def _start(self, event: Event) -> None:
        resumed_from = number(event, "resumed_from")
        if resumed_from is not None:
            self._note(event, step=resumed_from)
        self.start, self.stop, self.activity = event, None, "starting"
        self.recent.clear()

    def _plan(self, event: Event) -> None:
        self.plan, self.end_step = event, number(section(event, "horizon"), "steps")
        warnings = event.get("warnings")
        for text in warnings if isinstance(warnings, list) else []:
            self._note({**event, "type": "warning", "message": text})

    def _replan(self, event: Event) -> None:
        self.end_step = number(event, "end") or self.end_step
        self._note(event)

    def _warmup(self, event: Event) -> None:
        self.activity = one_line(event.get("message"))

    def _stop(self, event: Event) -> None:
        self.stop, self.activity = event, ""
        self._note(event)

    def _note(self, event: Event, step: float | None = None) -> None:
        self.numbered += 1
        if step is None:
            step = number(event, "step") if number(event, "step") is not None else number(self.step, "step")
        kind = _NOTE_KINDS.get(event["type"], event["type"])
        notes = self._routine_notes if kind in _ROUTINE else self._notes
        message = event.get("path") if kind == "saved" else describe_event(event)
        notes.append(
            {
                "number": self.numbered,
                "kind": kind,
                "step": None if step is None else int(step),
                "time": self.last_time,
                "message": one_line(message)[:_MAX_TEXT],
                "repeated": event["type"] in REPEATED_TYPES,
            }
        )

    _HANDLERS = {  # noqa: RUF012 — a constant table of methods
        "step": _step,
        "eval": _eval,
        "sample": _sample,
        "start": _start,
        "plan": _plan,
        "replan": _replan,
        "warning": _note,
        "recovery": _note,
        "checkpoint": _note,
        "warmup": _warmup,
        "stop": _stop,
    }


# The kinds of notes where they are not called like the event they were made from.
_NOTE_KINDS = {"step": "skipped", "start": "resumed", "checkpoint": "saved"}


def _sample_text(value: object) -> str:
    return clean(value)[:_MAX_TEXT]


def _parse_fast(line: bytes) -> Event | None:
    """Parse like `parse_event`, in a third of the time for lines that are strict JSON."""
    try:
        event = from_json(line)
    except ValueError:
        return parse_event(line)
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def _finite(value: object) -> float | None:
    """Return `finite(value)`, with the usual cases first: it is called for every number of a long log."""
    if type(value) is float:
        return value if value - value == 0.0 else None
    return value if type(value) is int and -_EXACT_INTEGERS < value < _EXACT_INTEGERS else finite(value)


def _integer(event: Mapping[str, Any], key: str) -> int | None:
    value = _finite(event.get(key))
    return None if value is None else int(value)
