"""What is known of a run, made from its events one by one, at a memory that does not grow with the run."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic_core import from_json

from redline.runs.console import clean, one_line
from redline.runs.events import REPEATED, Event, finite, number, parse_event, section

# ----------------------------------------------------------------------------------------------------
# Curves that stay small: of very many points the lows and the highs are kept, however long the run.
#
# A bucket holds neighbouring points. When there are too many buckets, neighbours merge; early ones stay narrow, so that
# a logarithmic axis shows the beginning too. What is kept depends on the points alone, never on when they were read.


MOST_BUCKETS = 1000  # of which each is drawn as two points
_PER_E = 32  # buckets while the run grows by a factor of e: narrow enough for a logarithmic axis

Value = float | None


class _Bucket:
    """Neighbouring points. `rising` says of each field whether its low came before its high."""

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

    def absorb(self, later: _Bucket) -> None:
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
        if self.count == 1:
            return [(self.first, self.low)]
        pairs = list(zip(self.low, self.high, self.rising, strict=True))
        before = [low if rising else high for low, high, rising in pairs]
        after = [high if rising else low for low, high, rising in pairs]
        return [(self.first, before), (self.last, after)]


class Curve:
    """Fields over places (`axes`, of which the first orders the points). `rebuilt` counts changes of what was there."""

    def __init__(self, axes: Sequence[str], fields: Sequence[str], most: int = MOST_BUCKETS) -> None:
        self.axes, self.fields, self.rebuilt = tuple(axes), tuple(fields), 0
        self._most = most
        self._empty()

    def _empty(self) -> None:
        self._buckets: list[_Bucket] = []
        self._width, self._fine = 1, _PER_E
        self._points = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def clear(self) -> None:
        self._empty()
        self.rebuilt += 1

    def add(self, x: Sequence[Value], values: Sequence[Value]) -> None:
        last = self._buckets[-1] if self._buckets else None
        if last is not None and last.count < self._room(last):
            last.add(x, values)
        else:
            self._buckets.append(_Bucket(self._points, x, values))
            if len(self._buckets) > self._most:
                self._merge()
        self._points += 1

    def drop_beyond(self, limit: float) -> None:
        """Forget points after `limit`. A bucket that reaches beyond it goes whole: its lows and highs may lie there."""
        kept = [bucket for bucket in self._buckets if (bucket.last[0] or 0) <= limit]
        if len(kept) < len(self._buckets):
            self._buckets = kept
            self._points = kept[-1].start + kept[-1].count if kept else 0
            self.rebuilt += 1

    def lowest(self, field: str) -> Value:
        place = self.fields.index(field)
        return min((low for bucket in self._buckets if (low := bucket.low[place]) is not None), default=None)

    def since(self, buckets: int) -> dict[str, Any]:
        """What a reader lacks who has so many buckets; the last of those may have grown since."""
        known = max(0, min(buckets, len(self._buckets)) - 1)
        rows = [row for bucket in self._buckets[known:] for row in bucket.rows()]
        x = {name: [_short(row[0][place]) for row in rows] for place, name in enumerate(self.axes)}
        y = {name: [_short(row[1][place]) for row in rows] for place, name in enumerate(self.fields)}
        before = sum(1 if bucket.count == 1 else 2 for bucket in self._buckets[:known])
        told = {name: values for name, values in y.items() if any(value is not None for value in values)}
        return {"from": before, "buckets": len(self._buckets), "rows": len(rows), "x": x, "y": told}

    def _room(self, bucket: _Bucket) -> int:
        return max(1, min(self._width, bucket.start // self._fine if self._fine else self._width))

    def _merge(self) -> None:
        """Until a quarter is free, so that this is rare. Where the beginning alone fills it, that gets coarser, too."""
        self.rebuilt += 1
        before = 0
        while (now := len(self._buckets)) > 0.75 * self._most:
            self._width *= 2
            if now == before:
                self._fine //= 2
            before = now
            merged = [self._buckets[0]]
            for _, bucket in pairwise(self._buckets):
                if merged[-1].count + bucket.count <= self._room(merged[-1]):
                    merged[-1].absorb(bucket)
                else:
                    merged.append(bucket)
            self._buckets = merged


def _short(value: Value) -> Value:
    """Six digits are more than a screen has."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


AXES = ("step", "tokens", "hours")
STEP_FIELDS = (
    *("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "mfu_causal", "step_ms", "data_wait_ms", "memory_gib"),
    *("gpu_util", "power_w", "sm_clock_mhz", "temperature_c", "throttle"),
)
_STEP_MS, _WAIT, _MEMORY, _HELD = map(STEP_FIELDS.index, ("step_ms", "data_wait_ms", "memory_gib", "throttle"))
# As the page has them: waiting as a share of the step, and a number for what holds the card back.
SHOWN_AS = tuple({"data_wait_ms": "data_wait", "throttle": "held_back"}.get(field, field) for field in STEP_FIELDS)
RECENT = 50  # log lines by which "now" is judged
_MOST_NOTES, _MOST_ROUTINE, _MOST_SAMPLES, _LONGEST_TEXT = 150, 50, 40, 4000
_ROUTINE = frozenset({"saved", "replan"})
_EXACT = 1 << 53
_HEAT = frozenset({"thermal", "hw_thermal", "hw_slowdown", "power_brake"})


class RunState:
    """Feed it with `read`. `generation` changes when something that was told before no longer holds."""

    def __init__(self) -> None:
        self.steps, self.evals = Curve(AXES, SHOWN_AS), Curve(AXES, ("loss",))
        self._dropped = secrets.randbits(40)  # a page that outlives its server must not take another's for this one
        self._empty()

    def _empty(self) -> None:
        self.start: Event = {}
        self.plan: Event = {}
        self.step: Event = {}
        self.eval: Event = {}
        self.stop: Event | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT)
        self.samples: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self._told: deque[dict[str, Any]] = deque(maxlen=_MOST_NOTES)
        self._routine: deque[dict[str, Any]] = deque(maxlen=_MOST_ROUTINE)  # must not crowd out a warning
        self.peak_memory_gib: float | None = None
        self.end_step: float | None = None  # as the schedule was last planned
        self.last_time: float | None = None
        self.doing = ""
        self._resumed_from: float | None = None
        self._seen: set[str] = set()  # of the looks at that step, since
        self._skips: list[tuple[float, int]] = []  # at which step, and how many
        self.unreadable = self.numbered = 0
        self.held_lines = {"all": 0, "power": 0, "heat": 0}

    @property
    def generation(self) -> int:
        return self._dropped + self.steps.rebuilt + self.evals.rebuilt

    @property
    def notes(self) -> list[dict[str, Any]]:
        """What happened on the way, in order."""
        return sorted((*self._told, *self._routine), key=lambda note: note["number"])

    @property
    def skipped(self) -> int:
        """Updates that were skipped."""
        return sum(count for _, count in self._skips)

    @property
    def best_val(self) -> float | None:
        return self.evals.lowest("loss")

    def clear(self) -> None:
        self.steps.clear()
        self.evals.clear()
        self._empty()

    def read(self, line: bytes) -> None:
        """One line of the log; one that cannot be read is counted."""
        event = _parse(line)
        if event is not None:
            self.add(event)
        else:
            self.unreadable += bool(line.strip())

    def add(self, event: Event) -> None:
        self.last_time = _finite(event.get("time")) or self.last_time
        take = self._TAKE.get(event["type"])
        if take is not None:
            take(self, event)

    # --- by type of event

    def _step(self, event: Event) -> None:
        x = [_whole(event, "step"), _whole(event, "tokens"), _finite(event.get("hours"))]
        if x[0] is None:
            return
        last = _finite(self.step.get("step"))
        if last is not None and x[0] <= last:  # a log that says nothing of being resumed: the later word holds
            self.steps.drop_beyond(x[0] - 1)
        self.step = event
        self.recent.append(event)
        self.doing = ""
        values = [_finite(value) for value in map(event.get, STEP_FIELDS)]
        wait, whole = values[_WAIT], values[_STEP_MS]
        values[_WAIT] = wait / whole if wait is not None and whole else None
        values[_HELD] = self._held_back(event)
        self.steps.add(x, values)
        if (memory := values[_MEMORY]) is not None:
            self.peak_memory_gib = max(memory, self.peak_memory_gib or 0.0)
        if skipped := _finite(event.get("skipped")):
            self._skips.append((x[0], int(skipped)))
            self._note("skipped", f"{skipped:.0f} update(s) skipped: a loss or gradient was not finite", event)

    def _held_back(self, event: Event) -> Value:
        """0 free, 1 at its power limit, 2 by heat or the power supply; None when the card does not tell."""
        told = event.get("throttle")
        if not isinstance(told, str):
            return None
        self.held_lines["all"] += 1
        if not told:
            return 0
        words = told.split("+")
        hot, capped = not _HEAT.isdisjoint(words), "power_cap" in words
        self.held_lines["power"] += capped
        self.held_lines["heat"] += hot
        return 2 if hot else 1 if capped else 0

    def _eval(self, event: Event) -> None:
        step, last = _whole(event, "step"), number(self.eval, "step")
        self.eval, self.doing = event, ""
        if step is None:
            return
        if last is not None and step < last:
            self.evals.drop_beyond(step)
        if self._again("eval", step):
            self.evals.drop_beyond(step - 1)
        hours = number(self.step, "hours")  # evaluations do not say theirs, but follow a step
        self.evals.add([step, _whole(event, "tokens"), 0.0 if step == 0 else hours], [number(event, "loss")])

    def _sample(self, event: Event) -> None:
        self.numbered += 1
        texts = {key: clean(event.get(key))[:_LONGEST_TEXT] for key in ("label", "prompt", "text")}
        step, label = _whole(event, "step"), texts["label"]
        if self._again(f"sample {label}", step):
            self._dropped += 1
            held = (sample for sample in self.samples if (sample["step"], sample["label"]) != (step, label))
            self.samples = deque(held, maxlen=_MOST_SAMPLES)
        self.samples.append({"number": self.numbered, "step": step, **texts})

    def _again(self, what: str, step: float | None) -> bool:
        """Whether it is the first of its kind at the step that a resume began with: then those before it are past."""
        if step is None or step != self._resumed_from or what in self._seen:
            return False
        self._seen.add(what)
        return True

    def _start(self, event: Event) -> None:
        resumed_from = number(event, "resumed_from")
        if resumed_from is not None:
            self._forget_beyond(resumed_from)
            self._resumed_from, self._seen = resumed_from, set()
            message = f"went on from the checkpoint of step {resumed_from:,.0f}" if resumed_from else "began again"
            self._note("resumed", message, {"step": resumed_from})
        self.start, self.stop, self.doing = event, None, "starting"
        self.recent.clear()

    def _forget_beyond(self, step: float) -> None:
        """What the resumed run does again."""
        self._dropped += 1
        self.steps.drop_beyond(step)
        self.evals.drop_beyond(step)
        if (number(self.step, "step") or 0) > step:
            holds = [event for event in self.recent if (number(event, "step") or 0) <= step]
            self.step = holds[-1] if holds else {"step": int(step)}
        if (number(self.eval, "step") or 0) > step:
            self.eval = {}
        self.samples = deque((s for s in self.samples if (s["step"] or 0) <= step), maxlen=_MOST_SAMPLES)
        self._skips = [(at, count) for at, count in self._skips if at <= step]
        for notes in (self._told, self._routine):
            kept = [note for note in notes if not note["repeated"] or (note["step"] or 0) <= step]
            notes.clear()
            notes.extend(kept)

    def _plan(self, event: Event) -> None:
        self.plan, self.end_step = event, number(section(event, "horizon"), "steps")
        warnings = event.get("warnings")
        for text in warnings if isinstance(warnings, list) else []:
            self._note("warning", text, event)

    def _replan(self, event: Event) -> None:
        self.end_step = number(event, "end") or self.end_step
        self._note("replan", event.get("message"), event)

    def _message(self, event: Event) -> None:
        self._note(event["type"], event.get("message"), event)

    def _checkpoint(self, event: Event) -> None:
        self._note("saved", event.get("path"), event)

    def _warmup(self, event: Event) -> None:
        self.doing = one_line(event.get("message"))

    def _stop(self, event: Event) -> None:
        self.stop, self.doing = event, ""
        self._note("stop", event.get("reason"), event)

    def _note(self, kind: str, message: object, event: Mapping[str, Any]) -> None:
        self.numbered += 1
        step = _whole(event, "step")
        notes = self._routine if kind in _ROUTINE else self._told
        notes.append(
            {
                "number": self.numbered,
                "kind": kind,
                "step": _whole(self.step, "step") if step is None else step,
                "time": self.last_time,
                "message": one_line(message)[:_LONGEST_TEXT],
                "repeated": event.get("type") in REPEATED,
            }
        )

    _TAKE = {  # noqa: RUF012 — never changed
        "step": _step,
        "eval": _eval,
        "sample": _sample,
        "start": _start,
        "plan": _plan,
        "replan": _replan,
        "warning": _message,
        "recovery": _message,
        "checkpoint": _checkpoint,
        "warmup": _warmup,
        "stop": _stop,
    }


def _parse(line: bytes) -> Event | None:
    """As everybody reads a log, but a third of the time where the line is plain."""
    try:
        event = from_json(line)
    except ValueError:
        return parse_event(line)
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def _finite(value: object) -> float | None:
    """The usual cases first: of a long log this is asked very often."""
    if type(value) is float:
        return value if value - value == 0.0 else None
    return value if type(value) is int and -_EXACT < value < _EXACT else finite(value)


def _whole(event: Mapping[str, Any], key: str) -> int | None:
    value = _finite(event.get(key))
    return None if value is None else int(value)
