"""The measurement of kernel time, on a simulated GPU clock (tests/gpu has a real one)."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.timing import TimingError, kernel_ms

CYCLES_A_MS = 2_000_000.0


class Gpu:
    """Runs what is queued in order, beside a host whose launches take time of their own."""

    def __init__(self, launch_ms: float, kernel_ms: float) -> None:
        self.host, self.device = 0.0, 0.0  # when each is free
        self.launch_ms, self.kernel_ms = launch_ms, kernel_ms

    def queue(self, ms: float) -> None:
        self.device = max(self.host, self.device) + ms

    def work(self) -> None:
        self.host += self.launch_ms
        self.queue(self.kernel_ms)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.gpu.queue(0.0)
        self.at = self.gpu.device

    def query(self) -> bool:
        return self.at <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def simulated(monkeypatch: pytest.MonkeyPatch, launch_ms: float) -> Gpu:
    gpu = Gpu(launch_ms, kernel_ms=0.3)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.queue(cycles / CYCLES_A_MS), raising=False)
    return gpu


@pytest.mark.parametrize("launch_ms", [0.001, 0.5, 5.0, 100.0])
def test_launches_are_not_counted_on_a_slow_host(monkeypatch: pytest.MonkeyPatch, launch_ms: float) -> None:
    assert kernel_ms(simulated(monkeypatch, launch_ms).work) == pytest.approx(0.3)


def test_a_host_that_is_too_slow_is_an_error_and_not_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimingError, match="too slow"):
        kernel_ms(simulated(monkeypatch, launch_ms=500.0).work)
