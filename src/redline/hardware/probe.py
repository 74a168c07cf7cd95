"""Short measurements of what the hardware really does."""

from __future__ import annotations

import time

import torch


def cpu_matmul_flops(dtype: torch.dtype, seconds: float = 0.08) -> float:
    """FLOP/s of a matmul at the shapes of a small model, all threads."""
    rows, inner, columns = 2048, 256, 768
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    a @ b
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        a @ b
        done += 1
    return 2.0 * rows * inner * columns * done / elapsed
