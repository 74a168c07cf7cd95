"""The SwiGLU kernels: a tile of rows and columns per program, each value read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # with four warps, two 16-byte loads a thread from each half-precision operand
_WARPS = 4


def swiglu(h_N2F: Tensor) -> Tensor:
    h = h_N2F.contiguous()
    n, width = h.shape[0], h.shape[1] // 2
    out = torch.empty((n, width), device=h.device, dtype=h.dtype)
    rows, columns = _tile(width)
    grid = (triton.cdiv(n, rows) * triton.cdiv(width, columns),)
    _forward[grid](h, out, n, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=_WARPS)
    return out


def swiglu_backward_(grad_s_NF: Tensor, h_N2F: Tensor) -> Tensor:
    assert h_N2F.is_contiguous(), "written in place"
    n, width = grad_s_NF.shape
    rows, columns = _tile(width)
    grid = (triton.cdiv(n, rows) * triton.cdiv(width, columns),)
    _backward[grid](grad_s_NF.contiguous(), h_N2F, n, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=_WARPS)
    return h_N2F


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile: the widest power of two that divides the row, so that no lane is idle."""
    columns = min(width & -width, 1024)
    if columns < 128:  # none does: the last tile of a row is masked
        columns = min(triton.next_power_of_2(width), 512)
    return max(1, _TILE // columns), columns


@triton.jit
def _place(n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column numbers of this program's tile, and which of them exist."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = ((program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((program % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < n) & (column < WIDTH)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    h, out, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _place(n, WIDTH, ROWS, COLUMNS)
    at = h + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * WIDTH + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad_s, h, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _place(n, WIDTH, ROWS, COLUMNS)
    at = h + row * (2 * WIDTH) + column
    grad = tl.load(grad_s + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(at, grad_gate.to(h.dtype.element_ty), mask=inside)
    tl.store(at + WIDTH, (grad * gate * sigmoid).to(h.dtype.element_ty), mask=inside)
