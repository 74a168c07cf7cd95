"""The step log: the only place where training waits for the GPU."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import torch

from redline.hardware.nvml import Nvml, Reading, ThrottleWatch
from redline.runs.monitor import Monitor
from redline.runs.throughput import Throughput
from redline.training.state import TrainState
from redline.training.step import StepResult
from redline.units import GIB

_STEPS_AHEAD = 2  # the host may queue this many steps before it waits for the GPU


class StepLog:
    def __init__(
        self, monitor: Monitor, throughput: Throughput, device: torch.device, most_bad: int, seq_len: int
    ) -> None:
        self.monitor, self.throughput, self.device, self.most_bad = monitor, throughput, device, most_bad
        self.seq_len = seq_len
        self.skipped = 0
        self.bad_steps: list[int] = []  # the last of them: which data to look at
        self.storm: list[int] = []  # the first row of them that is longer than it may be
        self.row: list[int] = []  # of them, up to the last step that was looked at
        self._bad: list[torch.Tensor] = []
        self.said = 0  # the last step that an event tells of
        self._unsaid = 0  # bad steps that no event has counted yet
        self._last: StepResult | None = None
        self._queued: deque[torch.cuda.Event] = deque()
        self._nvml = Nvml() if device.type == "cuda" else None
        self._throttle = ThrottleWatch()

    def note(self, result: StepResult, tokens: int, data_wait: float) -> None:
        """Remember a step without looking at it."""
        self._last = result
        self._bad.append(result.bad)
        self.throughput.add(tokens, data_wait)
        if self.device.type == "cuda":
            # the GPU stays fed, and signals and clocks are answered within a step or two
            event = torch.cuda.Event()
            event.record()
            self._queued.append(event)
            if len(self._queued) > _STEPS_AHEAD:
                self._queued.popleft().synchronize()

    def emit(self, state: TrainState, *, lr: float, progress: float, eta_s: float | None) -> None:
        result = self._last
        if result is None:
            return
        self.said = state.step
        self.look(state.step)
        bad, self._unsaid = self._unsaid, 0
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
            skipped=bad,
        )
        if warning := self._throttle.note(card):
            self.monitor.warn(warning)

    def ending(self, reason: str, saved: bool) -> dict[str, Any]:
        """What a `stop` event says of the updates, and that their last state is not on disk."""
        bad = {"bad_steps": self.bad_steps} if reason == "nonfinite" else {}
        return {"skipped": self.skipped, **bad, **({} if saved else {"saved": False})}

    def wait(self) -> None:
        """Until the GPU has done what was queued."""
        while self._queued:
            self._queued.popleft().synchronize()

    def look(self, step: int) -> None:
        """Which steps since the last look changed nothing."""
        bad = [value > 0 for value in torch.stack(self._bad).tolist()] if self._bad else []  # waits for the GPU
        self._bad.clear()
        steps = []
        for number, is_bad in enumerate(bad, start=step - len(bad)):  # counted from 0, as data are
            self.row = [*self.row, number] if is_bad else []
            steps += [number] if is_bad else []
            if len(self.row) >= self.most_bad:
                self.storm = self.row
        self.skipped += len(steps)
        self._unsaid += len(steps)
        if steps:
            self.bad_steps = [*self.bad_steps, *steps][-100:]
            which = ", ".join(map(str, steps[:10])) + (" …" if len(steps) > 10 else "")
            self.monitor.warn(f"loss or gradient not finite in the batches of step {which}; they changed nothing")


def peak_memory_gib(device: torch.device) -> float | None:
    """The most that was used: of the GPU by tensors, of the host by this process."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / GIB, 3)
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) * 1024 / GIB, 3)
    return None
