"""Kernel time as a share of wall time, on a busy GPU and on an idle one."""

from __future__ import annotations

import time

import pytest
import torch

from redline.kernels.timing import kernel_ms
from redline.training.trial import kernel_time

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_pauses_do_not_count_as_kernel_time() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    device = torch.device("cuda")

    def busy() -> None:
        for _ in range(100):
            a @ a

    def idle() -> None:
        busy()
        torch.cuda.synchronize()
        with torch.profiler.record_function("a named range that covers a pause"):
            time.sleep(1.0)

    busy()
    worked, paused = kernel_time(busy, device), kernel_time(idle, device)
    assert worked is not None
    assert paused is not None
    assert 0.8 < worked.share <= 1.0
    assert paused.kernels == pytest.approx(worked.kernels, rel=0.3)
    assert paused.wall > worked.wall + 0.9


def test_kernel_time_does_not_depend_on_the_host() -> None:
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def from_a_slow_host() -> None:
        time.sleep(0.004)
        a @ a

    at_once, slowly = kernel_ms(lambda: a @ a), kernel_ms(from_a_slow_host)
    assert at_once < 0.1
    assert slowly < 0.1
