"""Muon's kernels: a run of one matrix's values per program, each read and written once.

Gradients and weights are found through a table of their addresses, so that one launch serves a whole batch of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

_RUN, _WARPS = 2048, 4  # four 16-byte loads a thread from each float32 operand


def nesterov_(
    gradients: Sequence[Tensor], momentum_NRC: Tensor, divisor: Tensor, bad: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    count, size = momentum_NRC.shape[0], momentum_NRC[0].numel()
    gradients = [gradient.contiguous() for gradient in gradients]
    table, aligned = _addresses(gradients)
    total = torch.empty_like(momentum_NRC, dtype=torch.bfloat16)
    runs = triton.cdiv(size, _RUN)
    squares = torch.empty((count, runs), device=momentum_NRC.device)  # summed in one order, whichever program is first
    _nesterov[(runs, count)](
        table, momentum_NRC, total, squares, divisor, bad, beta, size, ALIGNED=aligned, RUN=_RUN, num_warps=_WARPS
    )
    return total, squares.sum(-1)


def descend_(
    weights: Sequence[Tensor],
    update_NRC: Tensor,
    scales_NR: Tensor | None,
    bad: Tensor,
    *,
    rate: float,
    decay: float,
    cautious: bool,
) -> None:
    assert all(weight.is_contiguous() for weight in weights), "written in place"
    count, size = update_NRC.shape[0], update_NRC[0].numel()
    table, aligned = _addresses(weights)
    _descend[(triton.cdiv(size, _RUN), count)](
        table,
        update_NRC,
        update_NRC if scales_NR is None else scales_NR,
        bad,
        rate,
        decay,
        size,
        COLUMNS=update_NRC.shape[2],
        SCALED=scales_NR is not None,
        CAUTIOUS=cautious,
        ALIGNED=aligned,
        RUN=_RUN,
        num_warps=_WARPS,
    )


def _addresses(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Where they are, as the device reads it, and whether all may be read 16 bytes at a time."""
    device, numbers = tensors[0].device, [tensor.data_ptr() for tensor in tensors]
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), all(number % 16 == 0 for number in numbers)


@triton.jit
def _matrix(table, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program's matrix."""
    matrix = tl.load(table + tl.program_id(1)).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    return matrix


@triton.jit
def _written(bad, size):  # type: ignore[no-untyped-def]
    """How many of a matrix's values may change."""
    return tl.where(tl.load(bad) > 0.0, 0, size)


@triton.jit
def _nesterov(  # type: ignore[no-untyped-def]
    table, momentum, total, squares, divisor, bad, beta, size, ALIGNED: tl.constexpr, RUN: tl.constexpr
):
    program, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = program * RUN + tl.arange(0, RUN)
    inside = at < size
    gradient = tl.load(_matrix(table, ALIGNED) + at, mask=inside, other=0.0) * (1.0 / tl.load(divisor))
    before = tl.load(momentum + member * size + at, mask=inside, other=0.0)
    moved = before + (1.0 - beta) * (gradient - before)
    tl.store(momentum + member * size + at, moved, mask=at < _written(bad, size))
    ahead = gradient + beta * (moved - gradient)
    tl.store(total + member * size + at, ahead.to(total.dtype.element_ty), mask=inside)
    tl.store(squares + member * tl.num_programs(0) + program, tl.sum(ahead * ahead))


@triton.jit
def _descend(  # type: ignore[no-untyped-def]
    table,
    update,
    scales,
    bad,
    rate,
    decay,
    size,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * RUN + tl.arange(0, RUN)
    inside = at < size
    weight = _matrix(table, ALIGNED) + at
    change = tl.load(update + member * size + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(weight, mask=inside, other=0.0)
    kept = before * (1.0 - decay)
    if CAUTIOUS:
        kept = tl.where(before * change >= 0.0, kept, before)
    if SCALED:
        change *= tl.load(scales + member * (size // COLUMNS) + at // COLUMNS, mask=inside, other=0.0)
    tl.store(weight, kept - rate * change, mask=at < _written(bad, size))


# ----------------------------------------------------------------------------------------------------
# One kernel for both: factor·A·Aᵀ + diagonal·I. A square of a symmetric matrix is its product with its transpose.
#
# A program makes one tile on or above the diagonal, or two side by side, and writes it twice, the second time mirrored.
# No sum is split and nothing is added in memory: the result is the same every time, and exactly symmetric.


@dataclass(frozen=True)
class Tile:
    """How the work is cut. As it is here, two programs share a Hopper SM: one stores while the other multiplies."""

    side: int = 128  # rows and columns of the result
    depth: int = 64  # columns of A that one stage holds
    warps: int = 8
    stages: int = 3
    span: int = 1  # tiles of one program, 1 or 2: two read a quarter less, and make some below the diagonal in vain
    group: int = 4  # spans beside each other in a band: programs that run together share their operands in the L2


TILE = Tile()


def gram(x_NRC: Tensor, *, tall: bool, diagonal: float, tile: Tile = TILE) -> Tensor:
    return _product(x_NRC.mT if tall else x_NRC, 1.0, diagonal, tile)


def square(g_NKK: Tensor, *, factor: float, diagonal: float, tile: Tile = TILE) -> Tensor:
    return _product(g_NKK, factor, diagonal, tile)


def _product(a_NKD: Tensor, factor: float, diagonal: float, tile: Tile) -> Tensor:
    """Of any layout: a tall matrix comes transposed by its strides alone."""
    count, size, depth = a_NKD.shape
    tile = _fitting(tile, a_NKD.device, a_NKD.element_size())
    product = torch.empty((count, size, size), device=a_NKD.device, dtype=a_NKD.dtype)
    across = triton.cdiv(size, tile.side * tile.span)
    _times_transposed[(across * (across + 1) // 2 * tile.span, count)](
        a_NKD, product, factor, diagonal, size, depth, *a_NKD.stride(),
        WHOLE=size % (tile.side * tile.span) == 0 and depth % tile.depth == 0,
        SIDE=tile.side, DEPTH=tile.depth, SPAN=tile.span, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return product


@cache
def _fitting(tile: Tile, device: torch.device, value_bytes: int) -> Tile:
    """With as many stages as the card's shared memory holds: consumer cards have less than half of a Hopper's."""
    if device.type != "cuda":
        return tile
    stage = (1 + tile.span) * tile.side * tile.depth * value_bytes
    held = driver.active.utils.get_device_properties(device.index)["max_shared_mem"] // stage
    return replace(tile, stages=max(1, min(tile.stages, held)))


@triton.jit
def _triangular_root(number):  # type: ignore[no-untyped-def]
    """The largest n with n·(n + 1)/2 ≤ number; the root in float32 may be off by one."""
    n = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    n -= (n * (n + 1) // 2 > number).to(tl.int32)
    n += ((n + 1) * (n + 2) // 2 <= number).to(tl.int32)
    return n


@triton.jit
def _place(number, across, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row ≤ column of a square of a triangle: bands of GROUP columns, each row by row down to its own triangle."""
    first = _triangular_root(number) // GROUP * GROUP
    width = tl.minimum(GROUP, across - first)
    within = number - first * (first + 1) // 2
    in_triangle = within - first * width
    right = _triangular_root(tl.maximum(in_triangle, 0))
    row = tl.where(in_triangle < 0, within // width, first + in_triangle - right * (right + 1) // 2)
    column = tl.where(in_triangle < 0, first + within % width, first + right)
    return row, column


@triton.jit
def _operand(pointers, at, deep, size, left, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=(at < size) & (deep < left), other=0.0)


@triton.jit
def _write(total, out, row, column, factor, diagonal, size, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE)
    tile = (factor * total + tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)).to(out.dtype.element_ty)
    if row == column:  # whose halves the tensor cores need not have summed alike
        tile = tl.where(rows[:, None] <= columns[None, :], tile, tl.trans(tile))
    if row <= column:
        inside = (rows[:, None] < size) & (columns[None, :] < size)
        tl.store(out + rows[:, None] * size + columns[None, :], tile, mask=inside)
        mirrored = (columns[:, None] < size) & (rows[None, :] < size)
        tl.store(out + columns[:, None] * size + rows[None, :], tl.trans(tile), mask=mirrored)


@triton.jit
def _times_transposed(  # type: ignore[no-untyped-def]
    a, product, factor, diagonal, size, depth, member_stride, row_stride, deep_stride,
    WHOLE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _place(tl.program_id(0) // SPAN, tl.cdiv(size, SIDE * SPAN), GROUP)
    row, column = row * SPAN + tl.program_id(0) % SPAN, column * SPAN
    member = tl.program_id(1).to(tl.int64)  # a batch can pass 2³¹ values
    a += member * member_stride
    rows, columns, deep = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE), tl.arange(0, DEPTH)
    left = a + rows[:, None] * row_stride + deep[None, :] * deep_stride
    right = a + columns[None, :] * row_stride + deep[:, None] * deep_stride
    further = right + SIDE * row_stride
    total, beside = tl.zeros((SIDE, SIDE), dtype=tl.float32), tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        x = _operand(left, rows[:, None], deep[None, :], size, depth - start, WHOLE)
        y = _operand(right, columns[None, :], deep[:, None], size, depth - start, WHOLE)
        total = tl.dot(x, y, total)
        if SPAN == 2:
            z = _operand(further, columns[None, :] + SIDE, deep[:, None], size, depth - start, WHOLE)
            beside = tl.dot(x, z, beside)
            further += DEPTH * deep_stride
        left += DEPTH * deep_stride
        right += DEPTH * deep_stride
    out = product + member * size * size
    _write(total, out, row, column, factor, diagonal, size, SIDE)
    if SPAN == 2:
        _write(beside, out, row, column + 1, factor, diagonal, size, SIDE)
