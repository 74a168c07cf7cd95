"""The speed of a run, defined once for the report, the live page, comparisons and sweeps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from redline.runs.events import Event, number

RATES = ("tokens_per_s", "samples_per_s", "mfu", "mfu_causal")
_MAX_STEPS = 4096

Rates = tuple[float | None, ...]


class RunSpeed:
    """The median of each rate over the logged steps of a run.

    The first logged step counts only if it is alone: its kernels may still compile. Of more than `_MAX_STEPS` steps
    every second is kept, then every fourth and so on, so that memory does not grow with the run.
    """

    def __init__(self, steps: Iterable[Event] = ()) -> None:
        self._kept: list[tuple[float, Rates]] = []  # (step, rates), after the first logged step
        self._first: tuple[float, Rates] | None = None
        self._stride, self._seen = 1, 0
        for step in steps:
            self.add(step)

    def add(self, event: Event) -> None:
        """Add a step event."""
        rates = tuple(number(event, key) for key in RATES)
        entry = (number(event, "step") or 0.0, rates)
        if self._first is None:
            self._first = entry
            return
        if self._seen % self._stride == 0:
            self._kept.append(entry)
        self._seen += 1
        if len(self._kept) > _MAX_STEPS:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def drop_beyond(self, step: float) -> None:
        """Remove the steps after `step`, which a resumed run does again."""
        self._kept = [entry for entry in self._kept if entry[0] <= step]
        if self._first is not None and self._first[0] > step:
            self._first = None

    def median(self, key: str) -> float | None:
        """Return the median of one of RATES; None if no step logs it."""
        place = RATES.index(key)
        values = [value for _, rates in self._kept if (value := rates[place]) is not None]
        if values:
            return statistics.median(values)
        return None if self._first is None else self._first[1][place]
