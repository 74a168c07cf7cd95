"""The RMSNorm kernels, in the compute precision and to fp8: whole rows per program, so that each is read once.

The row layout of an fp8 operand is written by the norm's own kernels, which hold whole rows; the transposed layout is
made from it afterwards. One kernel for both would have to hold enough whole rows for a 32-byte sector of a column in
registers, and no second program would fit beside it: 0.52 ms for the forward on an H200 at 131072×1024, where the bytes
need 0.25.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.dispatch import sm_count
from redline.kernels.float8 import Float8, Scale
from redline.kernels.triton.float8 import finite_or_nan, transpose

_VALUES = {"forward": 4096, "backward": 2048}  # in one program's rows: enough loads in flight, no spilled registers
# Programs of the backward stay on their multiprocessor and accumulate the weight's gradient per column; more warps do
# not fit its registers.
_WARPS_PER_SM = 20
# Neighbouring values of one thread. Without this hint fp8 stores would use another layout than the bf16 loads, and the
# values would be exchanged between threads first.
_NEIGHBOURS = tl.constexpr(8)


def add_rms_norm(x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    normed = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    total, rstd = add_rms_norm_into(normed, x_ND, delta_ND, weight_D, eps, None)
    return total, normed, rstd


def rms_norm_backward(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    return rms_norm_backward_into(None, grad_normed_ND, sum_ND, rstd_N, weight_D, grad_sum_ND, None)


def add_rms_norm_into(
    normed_ND: Tensor, x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, scale: Scale | None
) -> tuple[Tensor, Tensor]:
    """Write the normed rows to `normed`, by `scale` if it is in fp8. Return the sum and 1/rms."""
    x = x_ND.contiguous()
    n, width = x.shape
    total = x_ND if delta_ND is None else torch.empty_like(x)
    delta = x if delta_ND is None else delta_ND.contiguous()
    rstd = torch.empty(n, device=x.device, dtype=torch.float32)
    rows, block, warps = _rows(width, _VALUES["forward"])
    _forward[(triton.cdiv(n, rows),)](
        x, delta, weight_D, total, normed_ND, rstd, *_pointers(scale, rstd), n, eps,
        WIDTH=width, ROWS=rows, BLOCK=block, ADD=delta_ND is not None, **_flags(scale), num_warps=warps,
    )  # fmt: skip
    return total, rstd


def rms_norm_backward_into(
    codes_ND: Tensor | None,
    grad_normed_ND: Tensor,
    sum_ND: Tensor,
    rstd_N: Tensor,
    weight_D: Tensor,
    grad_sum_ND: Tensor | None,
    scale: Scale | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of sum and weight. With a scale, also write the sum's gradient in fp8 to `codes`."""
    x, grad_normed = sum_ND.contiguous(), grad_normed_ND.contiguous()
    grad_sum = x if grad_sum_ND is None else grad_sum_ND.contiguous()
    n, width = x.shape
    rows, block, warps = _rows(width, _VALUES["backward"])
    programs = min(triton.cdiv(n, rows), sm_count(x.device) * max(1, _WARPS_PER_SM // warps))
    grad = torch.empty_like(x)
    partial = torch.empty((programs, width), device=x.device, dtype=torch.float32)
    _backward[(programs,)](
        grad_normed, x, rstd_N, weight_D, grad_sum, grad, grad if codes_ND is None else codes_ND,
        *_pointers(scale, rstd_N), partial, n, programs,
        WIDTH=width, ROWS=rows, BLOCK=block, ADD=grad_sum_ND is not None, **_flags(scale), num_warps=warps,
    )  # fmt: skip
    return grad, partial.sum(0)  # no atomics: added in the same order every time


def _pointers(scale: Scale | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor and amax. Where the flags say that one is not used, any tensor serves as its pointer."""
    if scale is None:
        return other, other
    return scale.factor, scale.factor if scale.amax is None else scale.amax


def _flags(scale: Scale | None) -> dict[str, bool]:
    return {"FLOAT8": scale is not None, "AMAX": scale is not None and scale.amax is not None}


def _rows(width: int, values: int) -> tuple[int, int, int]:
    """Return rows per program, columns padded to a power of two, and warps.

    A thread has 16 or 32 values, more only for rows so wide that 16 warps do not suffice.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, values // block)
    return rows, block, min(16, max(4, 4 * rows * block // values))


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, delta, weight, total, normed, rstd, times, amax, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    FLOAT8: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * WIDTH + column[None, :]
    inside = (row < n)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    to_codes = tl.load(times) if FLOAT8 else 1.0
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(rstd + row, scale, mask=row < n)
    value = value * scale[:, None] * factor[None, :]
    if FLOAT8:
        value = finite_or_nan(value)
        if AMAX:
            tl.atomic_max(amax, tl.maximum(tl.max(tl.abs(value)), 0.0), sem="relaxed")
        value *= to_codes
        at = tl.max_contiguous(at, (1, min(_NEIGHBOURS, BLOCK)))
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_normed, x, rstd, weight, grad_sum, grad, codes, times, amax, partial, n, programs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    FLOAT8: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    near: tl.constexpr = min(_NEIGHBOURS, BLOCK)
    largest = tl.full((ROWS, BLOCK // near), 0.0, tl.float32)
    to_codes = tl.load(times) if FLOAT8 else 1.0
    for group in range(tl.program_id(0), (n + ROWS - 1) // ROWS, programs):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * WIDTH + column[None, :]
        inside = (row < n)[:, None] & (column < WIDTH)[None, :]
        scale = tl.load(rstd + row, mask=row < n, other=0.0)
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        outer = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        # loaded here, so that it arrives while the rows are summed
        past = tl.load(grad_sum + at, mask=inside & ADD, other=0.0)
        grad_weight += outer * unit
        outer *= factor[None, :]
        along = tl.sum(outer * unit, 1) / WIDTH
        value = (scale[:, None] * (outer - unit * along[:, None]) + past.to(tl.float32)).to(grad.dtype.element_ty)
        tl.store(grad + at, value, mask=inside)
        if FLOAT8:
            exact = finite_or_nan(value.to(tl.float32))
            code = (exact * to_codes).to(codes.dtype.element_ty)
            tl.store(codes + tl.max_contiguous(at, (1, near)), code, mask=inside)
            if AMAX:
                size = tl.reshape(tl.abs(exact), (ROWS, BLOCK // near, near))
                largest = tl.maximum(largest, tl.max(size, 2))
    if AMAX:
        tl.atomic_max(amax, tl.maximum(tl.max(largest), 0.0), sem="relaxed")
    slot = tl.program_id(0).to(tl.int64) * WIDTH
    tl.store(partial + slot + column, tl.sum(grad_weight, 0), mask=column < WIDTH)


# ----------------------------------------------------------------------------------------------------
# To fp8.


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
    return Float8(codes_ND, None if scale.rows_alone else transpose(codes_ND), scale.unscale)


def _codes_like(x_ND: Tensor) -> Tensor:
    return torch.empty(x_ND.shape, device=x_ND.device, dtype=torch.float8_e4m3fn)
