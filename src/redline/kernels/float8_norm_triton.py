"""RMSNorm to fp8: rows by the norm's own kernels, which need them whole; columns after that, by turning the codes.

One kernel for both would have to hold enough whole rows for a column's sector in registers, with nothing else running
beside it: 0.52 ms for the forward on an H200 at 131072×1024, where the bytes need 0.25.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.float8_triton import turned
from redline.kernels.rms_norm_triton import add_rms_norm_into, rms_norm_backward_into


def add_rms_norm8(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    codes = _codes_like(x_ND)
    total, rstd = add_rms_norm_into(codes, x_ND, delta_ND, weight_D, eps, scale)
    return total, _operand(codes, scale), rstd


def rms_norm_backward8(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    codes = _codes_like(sum_ND)
    grad, grad_weight = rms_norm_backward_into(codes, grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND, scale)
    return grad, _operand(codes, scale), grad_weight


def _operand(codes_ND: Tensor, scale: Scale) -> Float8:
    return Float8(codes_ND, None if scale.rows_alone else turned(codes_ND), scale.unscale)


def _codes_like(x_ND: Tensor) -> Tensor:
    return torch.empty(x_ND.shape, device=x_ND.device, dtype=torch.float8_e4m3fn)
