"""The RMSNorm kernels: whole rows per program, so that each is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES = {"forward": 4096, "backward": 2048}  # in one program's rows: enough loads in flight, no spilled registers
_WARPS_PER_SM = 20  # of the gradient, whose programs stay and keep a sum per column: what its registers allow


def add_rms_norm(x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x_ND.contiguous()
    n, width = x.shape
    total = x_ND if delta_ND is None else torch.empty_like(x)
    delta = x if delta_ND is None else delta_ND.contiguous()
    normed, rstd = torch.empty_like(x), torch.empty(n, device=x.device, dtype=torch.float32)
    rows, block, warps = _rows(width, _VALUES["forward"])
    _forward[(triton.cdiv(n, rows),)](
        x, delta, weight_D, total, normed, rstd, n, eps,
        WIDTH=width, ROWS=rows, BLOCK=block, ADD=delta_ND is not None, num_warps=warps,
    )  # fmt: skip
    return total, normed, rstd


def rms_norm_backward(
    grad_normed_ND: Tensor, sum_ND: Tensor, rstd_N: Tensor, weight_D: Tensor, grad_sum_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, grad_normed = sum_ND.contiguous(), grad_normed_ND.contiguous()
    grad_sum = x if grad_sum_ND is None else grad_sum_ND.contiguous()
    n, width = x.shape
    rows, block, warps = _rows(width, _VALUES["backward"])
    programs = min(triton.cdiv(n, rows), _processors(x.device) * max(1, _WARPS_PER_SM // warps))
    grad = torch.empty_like(x)
    partial = torch.empty((programs, width), device=x.device, dtype=torch.float32)
    _backward[(programs,)](
        grad_normed, x, rstd_N, weight_D, grad_sum, grad, partial, n, programs,
        WIDTH=width, ROWS=rows, BLOCK=block, ADD=grad_sum_ND is not None, num_warps=warps,
    )  # fmt: skip
    return grad, partial.sum(0)  # no atomics: the same sum in the same order every time


def _rows(width: int, values: int) -> tuple[int, int, int]:
    """Rows per program, columns padded to a power of two, warps: 16 or 32 values a thread until warps run out."""
    block = triton.next_power_of_2(width)
    rows = max(1, values // block)
    return rows, block, min(16, max(4, 4 * rows * block // values))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, delta, weight, total, normed, rstd, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * WIDTH + column[None, :]
    inside = (row < n)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(rstd + row, scale, mask=row < n)
    tl.store(normed + at, (value * scale[:, None] * factor[None, :]).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_normed, x, rstd, weight, grad_sum, grad, partial, n, programs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for group in range(tl.program_id(0), (n + ROWS - 1) // ROWS, programs):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * WIDTH + column[None, :]
        inside = (row < n)[:, None] & (column < WIDTH)[None, :]
        scale = tl.load(rstd + row, mask=row < n, other=0.0)
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        outer = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        past = tl.load(grad_sum + at, mask=inside & ADD, other=0.0)  # asked for before the rows are summed
        grad_weight += outer * unit
        outer *= factor[None, :]
        along = tl.sum(outer * unit, 1) / WIDTH
        value = scale[:, None] * (outer - unit * along[:, None]) + past.to(tl.float32)
        tl.store(grad + at, value.to(grad.dtype.element_ty), mask=inside)
    slot = tl.program_id(0).to(tl.int64) * WIDTH
    tl.store(partial + slot + column, tl.sum(grad_weight, 0), mask=column < WIDTH)
