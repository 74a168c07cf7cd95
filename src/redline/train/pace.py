"""Where a run stands in time. The clock counts over all resumes."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Pace:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._zero = clock()
        self._began: tuple[int, float] | None = None
        self._settled: tuple[int, float] | None = None
        self.closing: dict[str, float] = {}  # seconds that the last step, evaluation, sample and save will take

    def resume(self, seconds: float) -> None:
        """Count on from what earlier parts of the run have used."""
        self._zero = self.clock() - seconds

    @property
    def seconds(self) -> float:
        return self.clock() - self._zero

    def begin(self, step: int) -> None:
        """The loop begins; compiling lies behind."""
        self._began, self._settled = (step, self.seconds), None

    def after(self, step: int) -> None:
        """A step was made. What only the first one pays for (a kernel not met before) is not the loop's pace."""
        if self._settled is None:
            self._settled = (step, self.seconds)

    def seconds_per_step(self, step: int) -> float:
        """Measured over the loop, with its evaluations and saves: what the clock on the wall will see."""
        since = self._settled if self._settled and step > self._settled[0] else self._began
        if since is None or step <= since[0]:
            return 0.0
        self.closing["step"] = (self.seconds - since[1]) / (step - since[0])
        return self.closing["step"]

    @property
    def reserve(self) -> float:
        """What must be left of a time budget when the last step should end: that step may take twice its time, and
        the last save may find another one in flight."""
        return 1.25 * (sum(self.closing.values()) + self.closing.get("save", 0.0))

    def timed(self, what: str, action: Callable[[], None]) -> None:
        begin = self.clock()
        action()
        self.closing[what] = max(self.closing.get(what, 0.0), self.clock() - begin)
