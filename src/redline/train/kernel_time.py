"""How much of the wall time the GPU spends in kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from redline.monitor.breakdown import covered

_NO_KERNELS = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Busy:
    """In seconds. The profiler slows the host a little: the share is a lower bound."""

    kernels: float
    wall: float

    @property
    def share(self) -> float:
        return self.kernels / self.wall


def kernel_time(work: Callable[[], object], device: torch.device) -> Busy | None:
    """`work` under the profiler, from its first kernel's launch until the GPU has done it all; None without a GPU."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            wall = time.perf_counter() - begin
        events = profiler.events() or []
    except RuntimeError:  # another profiler is at work, or the right to count is missing
        return None
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        # a named range covers the pauses between its kernels too
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(_NO_KERNELS)
    ]
    return Busy(covered(spans) / 1e6, wall) if spans else None
