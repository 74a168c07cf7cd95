"""fp8 operands (e4m3, one scale per tensor) and their matmuls: Triton on a GPU, plain torch elsewhere.

Hopper multiplies fp8 only along rows of both operands, and a step sums over features (forward, gradient of the input)
and over tokens (gradient of the weight). So whatever makes an operand writes it both ways round, at the price of one
bf16 copy, and no matmul transposes anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.rms_norm import reference_add_rms_norm, reference_rms_norm_backward
from redline.kernels.rotary import reference_merge_rotated_gradients
from redline.kernels.swiglu import reference_swiglu, reference_swiglu_backward_

LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of every side of a matmul
SHORT_SUM = 8192  # terms that the tensor cores add up by themselves: they drop bits, and longer sums shrink
_E4M3 = torch.float8_e4m3fn


class Float8(NamedTuple):
    """value = stored · unscale."""

    row: Tensor | None  # [N, K] e4m3, contiguous; None where only the backward still needs it
    column: Tensor | None  # [K, N] e4m3, contiguous: the same, transposed; None where nothing multiplies it
    unscale: Tensor  # float32 scalar on the device


class Scale(NamedTuple):
    """How one tensor is stored: value · factor, rounded to e4m3, cut off at ±448. All are float32 scalars."""

    factor: Tensor
    unscale: Tensor  # 1 / factor
    amax: Tensor | None  # raised by the kernel to the largest finite magnitude it met; None where nobody asks
    rows_alone: bool = False  # nothing sums over tokens: no weight learns from it


def normed_factor(width: int, weight: float = 2.0) -> float:
    """For rows that were normed: no value lies beyond √width times its weight, which may be up to that."""
    return float(2.0 ** math.floor(math.log2(LARGEST / (weight * math.sqrt(width)))))


def current_scale(x: Tensor) -> Scale:
    """From the tensor as it is: one more look at it."""
    return scale_for(torch.linalg.vector_norm(x.detach(), float("inf"), dtype=torch.float32))


def scale_for(largest: Tensor) -> Scale:
    """Of a tensor whose largest magnitude is known."""
    factor = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(LARGEST / largest))), 1.0)
    return Scale(factor, factor.reciprocal(), None)


def quantise(x_NK: Tensor, scale: Scale) -> Float8:
    """A weight in float32, or what no kernel of ours made."""
    if x_NK.is_cuda:
        from redline.kernels.triton import float8 as float8_triton

        return float8_triton.quantise(x_NK, scale)
    return reference_quantise(x_NK, scale)


def turned(row_NK: Tensor) -> Tensor:
    """Codes [K, N] of codes [N, K]."""
    if row_NK.is_cuda:
        from redline.kernels.triton import float8 as float8_triton

        return float8_triton.turned(row_NK)
    return row_NK.T.contiguous()


def add_rms_norm8(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    """As rms_norm.add_rms_norm; normed values go from float32 to fp8 (of very wide rows, by way of x's precision)."""
    if x_ND.is_cuda:
        from redline.kernels.triton import rms_norm as float8_norm_triton

        return float8_norm_triton.add_rms_norm8(x_ND, delta_ND, weight_D, eps, scale)
    return reference_add_rms_norm8(x_ND, delta_ND, weight_D, eps, scale)


def rms_norm_backward8(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    """As rms_norm.rms_norm_backward, and the gradient of the sum, as it is passed on, in fp8 besides."""
    if sum_ND.is_cuda:
        from redline.kernels.triton import rms_norm as float8_norm_triton

        return float8_norm_triton.rms_norm_backward8(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND, scale)
    return reference_rms_norm_backward8(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND, scale)


def swiglu8(h_N2F: Tensor, scale: Scale) -> Float8:
    """As swiglu.swiglu, [N, F]."""
    if h_N2F.is_cuda:
        from redline.kernels.triton import float8 as float8_triton

        return float8_triton.swiglu8(h_N2F, scale)
    return reference_swiglu8(h_N2F, scale)


def swiglu_backward8(grad_s_NF: Tensor, h_N2F: Tensor, scale: Scale) -> Float8:
    """As swiglu.swiglu_backward_, [N, 2F], but h is left alone."""
    if h_N2F.is_cuda:
        from redline.kernels.triton import float8 as float8_triton

        return float8_triton.swiglu_backward8(grad_s_NF, h_N2F, scale)
    return reference_swiglu_backward8(grad_s_NF, h_N2F, scale)


def merge_rotated_gradients8(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor, scale: Scale
) -> Float8:
    """As rotary.merge_rotated_gradients, [B·T, W]."""
    if grad_q_BHTK.is_cuda:
        from redline.kernels.triton import rotary as float8_rotary_triton

        return float8_rotary_triton.merge_rotated_gradients8(
            grad_q_BHTK, grad_k_BHTK, grad_v_BHTK, cos_TF, sin_TF, scale
        )
    return reference_merge_rotated_gradients8(grad_q_BHTK, grad_k_BHTK, grad_v_BHTK, cos_TF, sin_TF, scale)


def linear8(x: Float8, weight: Float8, bias_O: Tensor | None = None) -> Tensor:
    """x·Wᵀ in bf16, and a bias in bf16 added to it."""
    assert x.row is not None
    assert weight.row is not None
    return _matmul(x.row, weight.row, x.unscale, weight.unscale, torch.bfloat16, bias_O)


def input_gradient8(grad: Float8, weight: Float8, bias_I: Tensor | None = None) -> Tensor:
    """grad·W in bf16, and a bias in bf16 added to it."""
    assert grad.row is not None
    assert weight.column is not None
    return _matmul(grad.row, weight.column, grad.unscale, weight.unscale, torch.bfloat16, bias_I)


def weight_gradient8(grad: Float8, x: Float8) -> Tensor:
    """gradᵀ·x in float32."""
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
    """a·bᵀ: rows by rows, as the hardware has it."""
    if not a_MK.is_cuda:
        product = (a_MK.float() * unscale_a) @ (b_NK.float() * unscale_b).T
        return (product if bias_N is None else product + bias_N).to(dtype)
    assert all(size % 16 == 0 for size in (*a_MK.shape, *b_NK.shape)), "fp8 matmuls need multiples of 16"
    fast = a_MK.shape[1] <= SHORT_SUM
    return torch._scaled_mm(a_MK, b_NK.T, unscale_a, unscale_b, bias=bias_N, out_dtype=dtype, use_fast_accum=fast)


def reference_quantise(x_NK: Tensor, scale: Scale) -> Float8:
    wide = x_NK.float()
    finite = wide.isfinite()
    if scale.amax is not None and wide.numel():
        torch.maximum(scale.amax, wide.abs().masked_fill(~finite, 0.0).amax(), out=scale.amax)
    cut = (wide * scale.factor).clamp(-LARGEST, LARGEST)  # casts differ in what they make of more
    row = cut.masked_fill(~finite, float("nan")).to(_E4M3)
    return Float8(row, None if scale.rows_alone else row.T.contiguous(), scale.unscale)


def reference_add_rms_norm8(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    total = x_ND if delta_ND is None else x_ND + delta_ND
    _, normed, rstd = reference_add_rms_norm(total.float(), None, weight_D, eps)
    return total, reference_quantise(normed, scale), rstd


def reference_rms_norm_backward8(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    grad, grad_weight = reference_rms_norm_backward(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND)
    return grad, reference_quantise(grad, scale), grad_weight


def reference_swiglu8(h_N2F: Tensor, scale: Scale) -> Float8:
    return reference_quantise(reference_swiglu(h_N2F.float()), scale)


def reference_swiglu_backward8(grad_s_NF: Tensor, h_N2F: Tensor, scale: Scale) -> Float8:
    return reference_quantise(reference_swiglu_backward_(grad_s_NF.float(), h_N2F.float().clone()), scale)


def reference_merge_rotated_gradients8(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor, scale: Scale
) -> Float8:
    q, k, v = (grad.float() for grad in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    return reference_quantise(reference_merge_rotated_gradients(q, k, v, cos_TF, sin_TF).flatten(0, 1), scale)


# ----------------------------------------------------------------------------------------------------
# What rounding a weight does to the mean row of what it multiplies: a bias that takes it back.
#
# Rows of activations share a quarter to nine tenths of their energy. A rounded weight multiplies what they share
# wrongly in the same way for every token, and one vector mends it, which matmuls add for nothing: x·Wᵀ ≈ x·W₈ᵀ +
# mean(x)·(W − W₈)ᵀ. No gradient goes through the mean. The same holds for the gradient of the logits, whose rows are
# much the same distribution each; those of other gradients share too little for a sample to show.


SAMPLED = 2048  # rows that show the mean


def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """bf16 [O], to be added to x·W₈ᵀ."""
    assert x.row is not None
    if x.row.is_cuda:
        from redline.kernels.triton import float8 as float8_mean_triton

        return float8_mean_triton.mean_correction(x, weight, exact_OI)
    return reference_mean_correction(x, weight, exact_OI)


def mean_gradient_correction(grad: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    """bf16 [I], to be added to grad·W₈."""
    assert grad.row is not None
    if grad.row.is_cuda:
        from redline.kernels.triton import float8 as float8_mean_triton

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
