"""What rounding a weight does to the mean row of its input: a bias that takes it back.

Rows of activations share much of what they hold: a quarter to nine tenths of their energy is in the mean row. A rounded
weight multiplies that wrongly in the same way for every token, and one vector mends it, which matmuls add for nothing:
x·Wᵀ ≈ x·W₈ᵀ + mean(x)·(W − W₈)ᵀ. No gradient goes through the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.float8 import Float8

SAMPLED = 1024  # rows that show the mean


def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """bf16 [O], to be added to x·W₈ᵀ."""
    assert x.row is not None
    if x.row.is_cuda:
        from redline.kernels import float8_mean_triton

        return float8_mean_triton.mean_correction(x, weight, exact_OI)
    return reference_mean_correction(x, weight, exact_OI)


def stride_of(rows: int) -> int:
    """Every so manieth row is looked at."""
    return max(1, rows // SAMPLED)


def reference_mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    assert x.row is not None
    assert weight.row is not None
    mean = x.row[:: stride_of(len(x.row))].float().mean(0) * x.unscale
    lost = exact_OI.float() - weight.row.float() * weight.unscale
    return (lost @ mean).to(torch.bfloat16)
