"""Progress towards the horizon — which moves, when the horizon is a clock.

Progress is piecewise linear in steps. With `train.hours` each re-plan lays a new piece from the present progress to
the step that measured speed will reach in time; so the learning rate never jumps and has decayed when time is up.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from redline.units import format_seconds

# shares of the time that there is to train in
REPLAN_AT = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97)

WITHIN = 0.02  # of the steps that are left: a change below this is not worth a new plan
SPENT = 0.05  # of the time: less is hardly worth going on with
AHEAD = 0.01  # of the whole run: so far may progress run ahead of what was planned for the time


@dataclass(frozen=True)
class Piece:
    """From `step` on, progress grows from `progress` to 1 within `length` steps."""

    step: int
    progress: float
    length: int


class Horizon:
    def __init__(self, steps: int | None, hours: float | None) -> None:
        self.steps, self.seconds = steps, hours * 3600 if hours else None
        # before anything is measured a clocked run is at its beginning, however long it will be
        self.pieces = [Piece(0, 0.0, steps or 1 << 62)]
        self._next = 0
        self._planned = (0.0, 0.0, self.seconds or 0.0)  # when last, at which progress, and when it shall be 1

    def _piece(self, step: int) -> Piece:
        return next((p for p in reversed(self.pieces) if p.step <= step), self.pieces[0])

    def per_step(self, step: int) -> float:
        """Return how much progress one step makes."""
        piece = self._piece(step)
        return (1.0 - piece.progress) / piece.length

    def progress(self, step: int) -> float:
        piece = self._piece(step)
        return min(1.0, piece.progress + (1.0 - piece.progress) * (step - piece.step) / piece.length)

    def done(self, step: int, seconds: float) -> float:
        """Share of the run that is: by steps or by the clock, whichever is further."""
        by_clock = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(self.progress(step), by_clock))

    def left_s(self, step: int, seconds: float, per_step: float) -> float | None:
        """Seconds until it ends, by what a step takes; None where nobody knows."""
        by_steps = [(self.steps - step) * per_step] if self.steps is not None and per_step else []
        by_clock = [self.seconds - seconds] if self.seconds is not None else []
        return max(0.0, min([*by_steps, *by_clock])) if by_steps or by_clock else None

    @property
    def end(self) -> int:
        """The step at which progress is 1."""
        return self.pieces[-1].step + self.pieces[-1].length

    def due(self, step: int, seconds: float) -> bool:
        """At certain shares of the budget; and as soon as steps turn out faster than they were planned (the first may
        have been slow for reasons of its own): their learning rate would have decayed long before time is up."""
        if self.seconds is None:
            return False
        if self._at_share(seconds):
            return True
        if self.steps is not None and self.end >= self.steps:  # the clock does not bind
            return False
        then, progress, end = self._planned
        by_now = min(1.0, progress + (1.0 - progress) * (seconds - then) / max(end - then, 1e-9))
        return self.progress(step) > by_now + AHEAD

    def _at_share(self, seconds: float) -> bool:
        return self._next < len(REPLAN_AT) and seconds >= REPLAN_AT[self._next] * self._planned[2]

    def replan(self, step: int, seconds: float, seconds_per_step: float, reserve: float) -> Piece | None:
        """Lay the rest of the run out from measured speed; `reserve` is kept for the last evaluation and save.
        None when that is what was planned anyway."""
        assert self.seconds is not None
        while self._at_share(seconds):
            self._next += 1
        self._planned = (seconds, self.progress(step), self.seconds - reserve)
        left = math.floor((self.seconds - seconds - reserve) / seconds_per_step)
        if self.steps is not None:
            left = min(left, self.steps - step)
            if self.steps <= step:
                return None
        left = max(1, left)
        if abs(self.end - step - left) <= WITHIN * left:
            return None
        self.pieces.append(Piece(step, self.progress(step), left))
        return self.pieces[-1]

    def spent(self, step: int, seconds: float) -> str:
        """What to tell who goes on with a run whose end lies behind it, or whose clock has all but run out."""
        if self.steps is not None and step > self.steps:
            return f"the run is at step {step:,} already: its end, step {self.steps:,}, lies behind it"
        if self.seconds is None or seconds < (1 - SPENT) * self.seconds:
            return ""
        left = format_seconds(max(0.0, self.seconds - seconds))
        return f"train.hours leaves {left} of {format_seconds(self.seconds)}; more, or train.hours=null, goes on longer"

    def ending(self, reason: str, step: int) -> dict[str, Any]:
        """Return what the stop event adds where train.hours ended the run: a budget that does so says it."""
        if reason != "hours" or self.seconds is None:
            return {}
        counted = f"{step:,} of {self.steps:,}" if self.steps is not None else f"{step:,}"
        budget = f"the time budget train.hours ({format_seconds(self.seconds)}) ended the run at step {counted}"
        return {"message": f"{budget}; resume with a larger train.hours, or train.hours=null, to train longer"}

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "pieces": [[p.step, p.progress, p.length] for p in self.pieces],
            "next": self._next,
            "planned": list(self._planned),
        }

    def load_state(self, state: dict[str, Any], step: int, seconds: float) -> None:
        """Replay the decisions. A horizon that was changed on resume lays the schedule anew, as if it had been the
        horizon from the start: going on from a progress of 1 would train at the lowest rate for ever."""
        if state["steps"] == self.steps and state["seconds"] == self.seconds:
            self.pieces = [Piece(int(s), float(progress), int(length)) for s, progress, length in state["pieces"]]
            self._next = int(state["next"])
            self._planned = tuple(state.get("planned", self._planned))
        elif self.seconds is not None:
            left = 1 << 62 if self.steps is None else max(1, self.steps - step)
            by_steps = step / self.steps if self.steps else 0.0
            self.pieces = [Piece(step, min(1.0, max(seconds / self.seconds, by_steps)), left)]


# ----------------------------------------------------------------------------------------------------
# Where a run stands in time. The clock counts over all resumes.


Clock = Callable[[], float]

RECENT = 32  # steps that tell what the next will take
_OUTLIERS = 3  # of the slowest among them, at least: a new shape was compiled, a disk was busy


class StepTimer:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._zero = clock()
        self.closing: dict[str, float] = {}  # seconds that the last step, evaluation, sample and save will take
        self.paused = 0.0  # seconds that were none of a step's
        self.begin()

    def resume(self, seconds: float) -> None:
        """Count on from what earlier parts of the run have used."""
        self._zero = self.clock() - seconds

    @property
    def seconds(self) -> float:
        return self.clock() - self._zero

    def begin(self) -> None:
        """The loop begins; compiling lies behind."""
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._first: float | None = None
        self._paused_before = self.paused
        self._last = self._stepping

    @property
    def _stepping(self) -> float:
        return self.clock() - self.paused

    def after(self) -> None:
        """A step was made. What only the first one pays for (a kernel not met before) is not the loop's pace."""
        now = self._stepping
        if self._steps:
            self._recent.append(now - self._last)
            self.closing["step"] = self._usual()
        else:
            self._first = now - self._last
        self._steps, self._last = self._steps + 1, now

    def seconds_per_step(self) -> float:
        """As the last ones were, with what evaluations and saves add to each: what the clock on the wall will see.
        0 before the first."""
        if not self._recent:
            return self._first or 0.0
        return self._usual() + (self.paused - self._paused_before) / self._steps

    def _usual(self) -> float:
        slow = min((len(self._recent) - 1) // 2, max(_OUTLIERS, len(self._recent) // 20))
        return fmean(sorted(self._recent)[: len(self._recent) - slow])

    @property
    def reserve(self) -> float:
        """What must be left of a time budget when the last step should end: that step may take twice its time, and
        the last save may find another one in flight."""
        return 1.25 * (sum(self.closing.values()) + self.closing.get("save", 0.0))

    def timed(self, what: str, action: Callable[[], None]) -> None:
        begin = self.clock()
        action()
        spent = self.clock() - begin
        self.closing[what] = max(self.closing.get(what, 0.0), spent)
        self.paused += spent
