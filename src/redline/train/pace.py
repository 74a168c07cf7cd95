"""Where a run stands in time. The clock counts over all resumes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

Clock = Callable[[], float]

RECENT = 32  # steps that tell what the next will take
_OUTLIERS = 3  # of the slowest among them, at least: a new shape was compiled, a disk was busy


class Pace:
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
