"""Residual add and RMSNorm (arXiv 1910.07467) in one pass, and the gradient, in the compute precision or to fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.dispatch import op
from redline.kernels.float8 import Float8, Scale, quantise


@op(triton="rms_norm:add_rms_norm")
def add_rms_norm(x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta (x itself without a delta), its RMSNorm, and 1/rms [N] in float32 for the gradient.

    The sum is rounded to x's precision before it is normed, so that the gradient is taken at the value that the next
    layer reads.
    """
    total = x_ND if delta_ND is None else x_ND + delta_ND
    wide = total.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return total, (wide * rstd[:, None] * weight_D.float()).to(x_ND.dtype), rstd


@op(triton="rms_norm:rms_norm_backward")
def rms_norm_backward(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum and, in float32, of the weight.

    `grad_sum` is the gradient that reaches the sum along the residual stream, past the norm; it is added.
    """
    grad, unit = grad_normed_ND.float(), sum_ND.float() * rstd_N[:, None]
    weighted = grad * weight_D.float()
    total = rstd_N[:, None] * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    if grad_sum_ND is not None:
        total = total + grad_sum_ND.float()
    return total.to(sum_ND.dtype), (grad * unit).sum(0)


@op(triton="rms_norm:add_rms_norm8")
def add_rms_norm8(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    """Do the same as add_rms_norm, with the normed rows rounded once from float32 to fp8."""
    total = x_ND if delta_ND is None else x_ND + delta_ND
    _, normed, rstd = add_rms_norm.reference(total.float(), None, weight_D, eps)
    return total, quantise.reference(normed, scale), rstd


@op(triton="rms_norm:rms_norm_backward8")
def rms_norm_backward8(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    """Return the gradient of the sum, the same in fp8 for the matmul before it, and the gradient of the weight."""
    grad, grad_weight = rms_norm_backward.reference(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND)
    return grad, quantise.reference(grad, scale), grad_weight
