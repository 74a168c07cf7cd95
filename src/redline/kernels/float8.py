"""fp8 operands (e4m3, one scale per tensor) and the matmuls that multiply them.

Hopper multiplies fp8 matrices only along the rows of both operands, and a training step sums over features (forward,
gradient of the input) and over tokens (gradient of the weight). So every kernel that makes an operand writes it in both
layouts, for the bytes of one bf16 copy, and no matmul transposes anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.dispatch import op

LARGEST = 448.0  # the largest e4m3 value
MULTIPLE = 16  # of every side of an fp8 matmul
# The tensor cores add up this many products in their own accumulator, which has fewer bits than float32: in longer sums
# the error grows, so those are flushed to float32 registers (use_fast_accum=False).
LONGEST_FAST_SUM = 8192
_E4M3 = torch.float8_e4m3fn


class Float8(NamedTuple):
    """A matrix in fp8: value = stored · unscale."""

    row: Tensor | None  # [N, K] e4m3, contiguous; None when only the backward still needs the operand
    column: Tensor | None  # [K, N] e4m3, contiguous: the transpose; None when no matmul reads it
    unscale: Tensor  # float32 scalar on the device

    @property
    def is_cuda(self) -> bool:
        return self.unscale.is_cuda


class Scale(NamedTuple):
    """How a tensor is stored in fp8: value · factor, rounded to e4m3, clamped to ±448. All are float32 scalars."""

    factor: Tensor
    unscale: Tensor  # 1 / factor
    amax: Tensor | None  # the kernel raises it to the largest finite magnitude of the tensor; None: not measured
    rows_alone: bool = False  # make no transpose: the weight is frozen, so no matmul sums over tokens


def normed_factor(width: int, weight: float = 2.0) -> float:
    """Return the factor for rows out of an RMSNorm, whose values are at most √width times the norm's weight.

    `weight` is the largest weight that the factor allows for.
    """
    return float(2.0 ** math.floor(math.log2(LARGEST / (weight * math.sqrt(width)))))


def current_scale(x: Tensor) -> Scale:
    """Return the scale for the tensor's present values, at the price of one more pass over it."""
    return scale_for(torch.linalg.vector_norm(x.detach(), float("inf"), dtype=torch.float32))


def scale_for(largest: Tensor) -> Scale:
    """Return the scale for a tensor whose largest magnitude is known. Factors are powers of two: unscaling is exact."""
    factor = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(LARGEST / largest))), 1.0)
    return Scale(factor, factor.reciprocal(), None)


@op(triton="float8:quantise")
def quantise(x_NK: Tensor, scale: Scale) -> Float8:
    """Round a tensor to fp8: a float32 weight, or an activation that no fused kernel wrote in fp8 already.

    NaN and infinity become NaN and do not count for `scale.amax`: one bad step must not ruin the scale of the next.
    """
    wide = x_NK.float()
    finite = wide.isfinite()
    if scale.amax is not None and wide.numel():
        torch.maximum(scale.amax, wide.abs().masked_fill(~finite, 0.0).amax(), out=scale.amax)
    # clamp first: implementations of the cast differ in what they make of values beyond the largest
    clamped = (wide * scale.factor).clamp(-LARGEST, LARGEST)
    row = clamped.masked_fill(~finite, float("nan")).to(_E4M3)
    return Float8(row, None if scale.rows_alone else row.T.contiguous(), scale.unscale)


@op(triton="float8:transpose")
def transpose(row_NK: Tensor) -> Tensor:
    """Return fp8 codes [K, N], contiguous, of codes [N, K]."""
    return row_NK.T.contiguous()


# ----------------------------------------------------------------------------------------------------
# The three matmuls of a linear layer.


def linear8(x: Float8, weight: Float8, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + bias in bf16."""
    assert x.row is not None
    assert weight.row is not None
    return _matmul(x.row, weight.row, x.unscale, weight.unscale, torch.bfloat16, bias_O)


def input_gradient8(grad: Float8, weight: Float8, bias_I: Tensor | None = None) -> Tensor:
    """Return grad·W + bias in bf16."""
    assert grad.row is not None
    assert weight.column is not None
    return _matmul(grad.row, weight.column, grad.unscale, weight.unscale, torch.bfloat16, bias_I)


def weight_gradient8(grad: Float8, x: Float8) -> Tensor:
    """Return gradᵀ·x in float32."""
    assert grad.column is not None
    assert x.column is not None
    return _matmul(grad.column, x.column, grad.unscale, x.unscale, torch.float32)


def _matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    unscale_a: Tensor,
    unscale_b: Tensor,
    dtype: torch.dtype,
    bias_N: Tensor | None = None,
) -> Tensor:
    """Return a·bᵀ + bias: cuBLASLt on a GPU; elsewhere, where torch has no fp8 matmul, in float32."""
    if not a_MK.is_cuda:
        product = (a_MK.float() * unscale_a) @ (b_NK.float() * unscale_b).T
        return (product if bias_N is None else product + bias_N).to(dtype)
    assert all(size % MULTIPLE == 0 for size in (*a_MK.shape, *b_NK.shape)), "fp8 matmuls need multiples of 16"
    fast = a_MK.shape[1] <= LONGEST_FAST_SUM
    return torch._scaled_mm(a_MK, b_NK.T, unscale_a, unscale_b, bias=bias_N, out_dtype=dtype, use_fast_accum=fast)


# ----------------------------------------------------------------------------------------------------
# Correction for the rounding of a weight: a bias vector that restores its product with the mean row.
#
# Rows of activations share a quarter to nine tenths of their energy, so the error of a rounded weight is much the same
# for every token. One bias vector takes it back, and matmuls add a bias for free: x·Wᵀ ≈ x·W₈ᵀ + mean(x)·(W − W₈)ᵀ. No
# gradient flows through the mean. The gradient of the logits is corrected in the same way: its rows are all close to
# the same distribution. Other gradients share too little for a sample of rows to estimate.


SAMPLED_ROWS = 2048  # how many rows estimate the mean


@op(triton="float8:mean_correction")
def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """Return the bias [O] in bf16 to add to x·W₈ᵀ; `exact` is the weight before it was rounded."""
    return (_rounding_error(weight, exact_OI) @ _mean_row(x)).to(torch.bfloat16)


@op(triton="float8:mean_gradient_correction")
def mean_gradient_correction(grad: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """Return the bias [I] in bf16 to add to grad·W₈; `exact` is the weight before it was rounded."""
    return (_mean_row(grad) @ _rounding_error(weight, exact_OI)).to(torch.bfloat16)


def sample_stride(rows: int) -> int:
    """Return the distance between sampled rows. It is odd, so that every position of a sequence is sampled.

    With a power of two every sixteenth sampled row would be the first token of a sequence, whose gradients are the
    largest.
    """
    return rows // SAMPLED_ROWS | 1


def _mean_row(x: Float8) -> Tensor:
    assert x.row is not None
    return x.row[:: sample_stride(len(x.row))].float().mean(0) * x.unscale


def _rounding_error(weight: Float8, exact_OI: Tensor) -> Tensor:
    """Return W − W₈. W is rounded again here: `weight` may lack the layout, and reading its codes would cost more."""
    exact = exact_OI.float()
    codes = (exact / weight.unscale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return exact - codes.float() * weight.unscale
