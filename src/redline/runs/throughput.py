"""Rates of a run: tokens over the time spent training, and MFU over the dense peak.

Evaluation, checkpoints and compilation are not training time, so they do not lower the rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from redline.planning.flops import FlopsPerToken, mfu

Clock = Callable[[], float]


@dataclass(frozen=True)
class Rates:
    tokens_per_s: float
    mfu: float | None  # PaLM form over the dense bf16 peak, which other projects report
    mfu_causal: float | None  # counts only the FLOPs that the attention mask and the loss mask leave
    step_ms: float
    data_wait_ms: float


class Throughput:
    """Count steps and tokens since the last reading."""

    def __init__(self, flops: FlopsPerToken, peak: float | None, clock: Clock = time.perf_counter) -> None:
        self._flops, self._peak, self._clock = flops, peak, clock
        self._restart()

    def _restart(self) -> None:
        self._begin = self._clock()
        self._paused = self._waited = 0.0
        self._tokens = self._steps = 0

    def begin(self) -> None:
        """Start to count now: compilation before the first step is not training time."""
        self._restart()

    def add(self, tokens: int, data_wait: float = 0.0) -> None:
        self._tokens += tokens
        self._steps += 1
        self._waited += data_wait

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def read(self) -> Rates | None:
        """Return the rates since the last reading; None if there was no step."""
        seconds = self._clock() - self._begin - self._paused
        if not self._steps or seconds <= 0:
            return None
        rate = self._tokens / seconds
        rates = Rates(
            tokens_per_s=rate,
            mfu=mfu(rate, self._flops.useful, self._peak),
            mfu_causal=mfu(rate, self._flops.executed, self._peak),
            step_ms=1000.0 * seconds / self._steps,
            data_wait_ms=1000.0 * self._waited / self._steps,
        )
        self._restart()
        return rates
