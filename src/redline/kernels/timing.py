"""Measure how long kernels take on the GPU, without the time that the host takes to launch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CALLS = 5
_WAIT_CYCLES = 20_000_000  # about 10 ms
_WAIT_MS = 10.0
_ATTEMPTS = 4  # each waits four times as long as the one before


class TimingError(RuntimeError):
    """The host queued the work too slowly to time it on the GPU."""


def kernel_ms(work: Callable[[], Any]) -> float:
    """Return the milliseconds of one call on the GPU's clock.

    The GPU is made to wait until all calls are queued. Otherwise the time of many small kernels would be that of their
    launches, and most of all on a busy host. Raise a TimingError if the host is too slow even for the longest wait.
    """
    for _ in range(2):
        work()  # warm up: the first calls compile code, choose algorithms and allocate workspaces
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for attempt in range(_ATTEMPTS):
        torch.cuda.synchronize()
        torch.cuda._sleep(_WAIT_CYCLES * 4**attempt)
        begin.record()
        for _ in range(_CALLS):
            work()
        end.record()
        all_queued_in_time = not begin.query()  # the GPU is still waiting
        end.synchronize()
        if all_queued_in_time:
            return begin.elapsed_time(end) / _CALLS
    longest = _WAIT_MS * 4 ** (_ATTEMPTS - 1)
    raise TimingError(f"the host takes more than {longest:.0f} ms to queue {_CALLS} calls, too slow to time the GPU")
