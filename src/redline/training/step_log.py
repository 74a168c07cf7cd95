"""The log of training steps: their rates, and their results.

Reading a step's results is the only point at which training waits for the GPU.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.hardware.nvml import Nvml, Reading, ThrottleWatch
from redline.planning.flops import FlopsPerToken, mfu
from redline.runs.monitor import Monitor
from redline.training.schedule import TrainState
from redline.training.step import StepResult
from redline.units import GIB
from redline.vocabulary import StopReason

# ----------------------------------------------------------------------------------------------------
# Rates: tokens over the time spent training, and MFU over the dense peak. Evaluation, checkpoints and compilation are
# not training time, so they do not lower the rates.

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


# ----------------------------------------------------------------------------------------------------
# Results of steps.


_MAX_STEPS_AHEAD = 2  # steps that the host may queue before it waits for the GPU
_MAX_LISTED = 100  # skipped steps that the stop event lists


class StepLog:
    def __init__(
        self, monitor: Monitor, throughput: Throughput, device: torch.device, max_nonfinite: int, seq_len: int
    ) -> None:
        self.monitor, self.throughput, self.device = monitor, throughput, device
        self.max_nonfinite, self.seq_len = max_nonfinite, seq_len
        self.skipped = 0  # steps of the whole run that changed nothing, because loss or gradient was not finite
        self.skipped_steps: list[int] = []  # the last of them, so that a person can look at their data
        self.streak: list[int] = []  # skipped steps in a row, up to the last step that was read
        self.fatal_streak: list[int] = []  # the first streak as long as train.max_nonfinite, which ends the run
        self.logged_step = 0  # of the last step event
        self._unlogged_skips = 0  # skipped steps that no step event has counted yet
        self._flags: list[torch.Tensor] = []  # `bad` of the steps that were not read yet
        self._last: StepResult | None = None
        self._queued: deque[torch.cuda.Event] = deque()
        self._nvml = Nvml() if device.type == "cuda" else None
        self._throttle = ThrottleWatch()

    def record(self, result: StepResult, tokens: int, data_wait: float) -> None:
        """Keep the results of a step on the device, to be read later."""
        self._last = result
        self._flags.append(result.bad)
        self.throughput.add(tokens, data_wait)
        if self.device.type == "cuda":
            # Without a limit the host would queue steps far ahead of the GPU: a signal or the end of the time budget
            # would then take effect only after all of them. Two steps ahead keep the GPU busy.
            event = torch.cuda.Event()
            event.record()
            self._queued.append(event)
            if len(self._queued) > _MAX_STEPS_AHEAD:
                self._queued.popleft().synchronize()

    def log(self, state: TrainState, *, lr: float, progress: float, eta_s: float | None) -> None:
        """Write a step event with the results of the last step."""
        result = self._last
        if result is None:
            return
        self.logged_step = state.step
        self.read_skipped(state.step)
        skipped, self._unlogged_skips = self._unlogged_skips, 0
        rates = self.throughput.read()
        hours = state.seconds / 3600
        card = self._nvml.read() if self._nvml else Reading()
        self.monitor.emit(
            "step",
            step=state.step,
            tokens=state.tokens,
            loss=result.loss.item(),
            **({f"loss_{n}": v.item() for n, v in result.terms.items()} if len(result.terms) > 1 else {}),
            **{name: value.item() for name, value in result.figures.items()},
            lr=lr,
            grad_norm=result.grad_norm.item(),
            **({**vars(rates), "samples_per_s": rates.tokens_per_s / self.seq_len} if rates else {}),
            memory_gib=peak_memory_gib(self.device),
            **card.fields(),
            hours=hours,
            cost_usd=self.monitor.cost(hours),
            progress=progress,
            eta_s=eta_s,
            skipped=skipped,
        )
        if warning := self._throttle.note(card):
            self.monitor.warn(warning)

    def stop_fields(self, reason: StopReason, saved: bool) -> dict[str, Any]:
        """Return the fields of the stop event about skipped steps, and `saved` if the last state is not on disk."""
        bad = {"bad_steps": self.skipped_steps} if reason is StopReason.NONFINITE else {}
        return {"skipped": self.skipped, **bad, **({} if saved else {"saved": False})}

    def wait(self) -> None:
        """Wait until the GPU has done all queued steps."""
        while self._queued:
            self._queued.popleft().synchronize()

    def read_skipped(self, step: int) -> None:
        """Find out which steps since the last call were skipped, and warn of them; waits for the GPU."""
        flags = [value > 0 for value in torch.stack(self._flags).tolist()] if self._flags else []
        self._flags.clear()
        skipped = []
        for number, bad in enumerate(flags, start=step - len(flags)):  # counted from 0, as the data are
            self.streak = [*self.streak, number] if bad else []
            skipped += [number] if bad else []
            if len(self.streak) >= self.max_nonfinite:
                self.fatal_streak = self.streak
        self.skipped += len(skipped)
        self._unlogged_skips += len(skipped)
        if skipped:
            self.skipped_steps = [*self.skipped_steps, *skipped][-_MAX_LISTED:]
            listed = ", ".join(map(str, skipped[:10])) + (" …" if len(skipped) > 10 else "")
            self.monitor.warn(f"loss or gradient not finite in the batches of step {listed}; these steps were skipped")


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak memory: of tensors on a GPU, or of this process on a CPU; None if it is not known."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / GIB, 3)
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) * 1024 / GIB, 3)
    return None
