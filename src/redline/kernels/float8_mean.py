"""What rounding a weight does to the mean row of what it multiplies: a bias that takes it back.

Rows of activations share a quarter to nine tenths of their energy. A rounded weight multiplies what they share wrongly
in the same way for every token, and one vector mends it, which matmuls add for nothing:
x·Wᵀ ≈ x·W₈ᵀ + mean(x)·(W − W₈)ᵀ. No gradient goes through the mean. The same holds for the gradient of the logits,
whose rows are much the same distribution each; those of other gradients share too little for a sample to show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.float8 import LARGEST, Float8

SAMPLED = 2048  # rows that show the mean


def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """bf16 [O], to be added to x·W₈ᵀ."""
    assert x.row is not None
    if x.row.is_cuda:
        from redline.kernels import float8_mean_triton

        return float8_mean_triton.mean_correction(x, weight, exact_OI)
    return reference_mean_correction(x, weight, exact_OI)


def mean_gradient_correction(grad: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """bf16 [I], to be added to grad·W₈."""
    assert grad.row is not None
    if grad.row.is_cuda:
        from redline.kernels import float8_mean_triton

        return float8_mean_triton.mean_gradient_correction(grad, weight, exact_OI)
    return reference_mean_gradient_correction(grad, weight, exact_OI)


def stride_of(rows: int) -> int:
    """Every so manieth row is looked at: an odd number, so that all places of a sequence have their turn.

    With a power of two every sixteenth row would be the first of a sequence, whose gradients are the largest.
    """
    return rows // SAMPLED | 1


def reference_mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    return (_lost(weight, exact_OI) @ _mean(x)).to(torch.bfloat16)


def reference_mean_gradient_correction(grad: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    return (_mean(grad) @ _lost(weight, exact_OI)).to(torch.bfloat16)


def _mean(x: Float8) -> Tensor:
    assert x.row is not None
    return x.row[:: stride_of(len(x.row))].float().mean(0) * x.unscale


def _lost(weight: Float8, exact_OI: Tensor) -> Tensor:
    """Rounded once more: the codes are there in one layout at a time, and reading them would cost more."""
    exact = exact_OI.float()
    codes = (exact / weight.unscale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return exact - codes.float() * weight.unscale
