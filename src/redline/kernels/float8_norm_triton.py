"""RMSNorm straight to fp8, whole rows in registers; and its gradient, in two kernels.

The gradient needs two sums over a row before it can write a value. A kernel that did all would have to hold more rows
than fit, or sweep them twice (0.62 ms against 0.42 for both of these, on an H200 at 131072×1024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.float8_triton import (
    WORD,
    Made,
    finite_or_nan,
    fitting,
    quantise,
    raise_amax,
    store_column,
    store_row,
)
from redline.kernels.rms_norm_triton import add_rms_norm, rms_norm_backward

TOKENS, WARPS = 32, 16  # 32 tokens fill one sector of a column
WIDEST = 2048  # that stays in registers


def add_rms_norm8(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    n, width = x_ND.shape
    if width > WIDEST:
        total, normed, rstd = add_rms_norm(x_ND, delta_ND, weight_D, eps)
        return total, quantise(normed, scale), rstd
    x = x_ND.contiguous()
    total = x_ND if delta_ND is None else torch.empty_like(x)
    delta = x if delta_ND is None else delta_ND.contiguous()
    out, rstd = Made(n, width, scale), torch.empty(n, device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    tokens = fitting(TOKENS if block <= 1024 else TOKENS // 2, n)
    _forward[(triton.cdiv(n, tokens),)](
        x, delta, weight_D, x if delta_ND is None else total, rstd, *out.pointers, n, eps,
        WIDTH=width, ADD=delta_ND is not None, **out.flags, GROUPS=tokens // WORD.value, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return total, out.operand(), rstd


def rms_norm_backward8(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None, scale: Scale
) -> tuple[Tensor, Float8, Tensor]:
    grad, grad_weight = rms_norm_backward(grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND)
    return grad, quantise(grad, scale), grad_weight


@triton.jit
def _quarter(  # type: ignore[no-untyped-def]
    x, delta, total, rstd, row, times, gain, group, place, n, eps, quarter, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """The normed rows as they were rounded, and their magnitude before."""
    token = group * WORD + quarter
    exists = place < WIDTH
    at = token.to(tl.int64)[:, None] * WIDTH + place[None, :]
    inside = (token < n)[:, None] & exists[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(rstd + token, scale, mask=token < n)
    normed = finite_or_nan(value * scale[:, None] * gain[None, :])
    return store_row(normed, times, row, token, place, n, WIDTH, exists), tl.abs(normed)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, delta, weight, total, rstd, row, column, factor, amax, n, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)
    times = tl.load(factor)
    gain = tl.load(weight + place, mask=place < WIDTH, other=0.0).to(tl.float32)
    a, a_size = _quarter(x, delta, total, rstd, row, times, gain, group, place, n, eps, 0, WIDTH, ADD)
    b, b_size = _quarter(x, delta, total, rstd, row, times, gain, group, place, n, eps, 1, WIDTH, ADD)
    c, c_size = _quarter(x, delta, total, rstd, row, times, gain, group, place, n, eps, 2, WIDTH, ADD)
    d, d_size = _quarter(x, delta, total, rstd, row, times, gain, group, place, n, eps, 3, WIDTH, ADD)
    if COLUMN:
        store_column(a, b, c, d, row, column, group, place, n, place < WIDTH)
    if AMAX:
        raise_amax(amax, a_size, b_size, c_size, d_size)
