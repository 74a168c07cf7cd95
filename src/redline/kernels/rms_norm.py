"""Residual add and RMSNorm (arXiv 1910.07467) in one pass, and its gradient: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rms_norm(x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta (x itself without one), that normed, and 1/rms in float32 for the gradient.

    The sum is rounded to x's precision before it is normed: the gradient sees what the next layer sees.
    """
    if x_ND.is_cuda:
        from redline.kernels.triton import rms_norm as rms_norm_triton

        return rms_norm_triton.add_rms_norm(x_ND, delta_ND, weight_D, eps)
    return reference_add_rms_norm(x_ND, delta_ND, weight_D, eps)


def rms_norm_backward(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum (with what reaches it past the norm) and, in float32, of the weight."""
    if sum_ND.is_cuda:
        from redline.kernels.triton import rms_norm as rms_norm_triton

        return rms_norm_triton.rms_norm_backward(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND)
    return reference_rms_norm_backward(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND)


def reference_add_rms_norm(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x_ND if delta_ND is None else x_ND + delta_ND
    wide = total.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return total, (wide * rstd[:, None] * weight_D.float()).to(x_ND.dtype), rstd


def reference_rms_norm_backward(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad, unit = grad_normed_ND.float(), sum_ND.float() * rstd_N[:, None]
    weighted = grad * weight_D.float()
    total = rstd_N[:, None] * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    if grad_sum_ND is not None:
        total = total + grad_sum_ND.float()
    return total.to(sum_ND.dtype), (grad * unit).sum(0)
