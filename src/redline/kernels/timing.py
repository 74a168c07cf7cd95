"""How long kernels take, and not how long a host takes to launch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CALLS = 5
_WAIT = 20_000_000  # cycles, some 10 ms
_TRIES = 4  # each waits four times as long as the one before


def kernel_ms(work: Callable[[], Any]) -> float:
    """Milliseconds of a call on the GPU's clock. The GPU waits until all calls are queued: of many small kernels the
    launches take longer than they do, and most of all on a busy host."""
    for _ in range(2):
        work()  # what is made at a first call: code, plans, workspaces
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for attempt in range(_TRIES):
        torch.cuda.synchronize()
        torch.cuda._sleep(_WAIT * 4**attempt)
        begin.record()
        for _ in range(_CALLS):
            work()
        end.record()
        in_time = not begin.query()  # the GPU still waits
        end.synchronize()
        if in_time:
            break
    return begin.elapsed_time(end) / _CALLS
