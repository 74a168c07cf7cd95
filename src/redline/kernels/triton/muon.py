"""Muon's kernels: each program serves a piece of one matrix; each value is read and written once.

Gradients and weights are read through a table of their addresses, so that one launch serves a whole batch of matrices
that lie anywhere in memory.
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

_PIECE, _WARPS = 2048, 4  # values of one program: four 16-byte loads a thread from each float32 operand


def nesterov_(
    gradients: Sequence[Tensor],
    momentum_NRC: Tensor,
    divisor: Tensor,
    bad: Tensor,
    beta: float,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    count, size = momentum_NRC.shape[0], momentum_NRC[0].numel()
    gradients = [gradient.contiguous() for gradient in gradients]
    table, aligned = _addresses(gradients)
    total = torch.empty_like(momentum_NRC, dtype=dtype)
    pieces = triton.cdiv(size, _PIECE)
    squares = torch.empty((count, pieces), device=momentum_NRC.device)  # no atomics: added in the same order every time
    _nesterov[(pieces, count)](
        table, momentum_NRC, total, squares, divisor, bad, beta, size, ALIGNED=aligned, PIECE=_PIECE, num_warps=_WARPS
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
    _descend[(triton.cdiv(size, _PIECE), count)](
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
        PIECE=_PIECE,
        num_warps=_WARPS,
    )


def _addresses(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return the tensors' addresses in device memory, and whether all are multiples of 16 bytes."""
    device, numbers = tensors[0].device, [tensor.data_ptr() for tensor in tensors]
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), all(number % 16 == 0 for number in numbers)


@triton.jit
def _matrix(table, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the address of the program's matrix."""
    matrix = tl.load(table + tl.program_id(1)).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    return matrix


@triton.jit
def _written(bad, size):  # type: ignore[no-untyped-def]
    """Return how many values of a matrix may be written: none when the step is bad."""
    return tl.where(tl.load(bad) > 0.0, 0, size)


@triton.jit
def _nesterov(  # type: ignore[no-untyped-def]
    table, momentum, total, squares, divisor, bad, beta, size, ALIGNED: tl.constexpr, PIECE: tl.constexpr
):
    program, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = program * PIECE + tl.arange(0, PIECE)
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
    PIECE: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
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
# Symmetric products: factor·A·Aᵀ + diagonal·I. One kernel serves the square of a symmetric matrix, too, because that is
# its product with its transpose.
#
# A program computes one tile on or above the diagonal, or two neighbouring ones, and stores it twice, the second time
# mirrored. No sum is split between programs: the result is the same every time, and exactly symmetric.


@dataclass(frozen=True)
class Tile:
    """How the work is cut. With these defaults two programs share a Hopper SM: one stores while the other computes."""

    side: int = 128  # rows and columns of the result
    depth: int = 64  # columns of A that one stage holds
    warps: int = 8
    stages: int = 3
    span: int = 1  # tiles of one program, 1 or 2: two read a quarter less, but compute some below the diagonal in vain
    group: int = 4  # spans side by side in a band: programs that run at the same time share their operands in the L2


TILE = Tile()


def gram(x_NRC: Tensor, *, tall: bool, diagonal: float, tile: Tile = TILE) -> Tensor:
    return _product(x_NRC.mT if tall else x_NRC, 1.0, diagonal, tile)


def square(g_NKK: Tensor, *, factor: float, diagonal: float, tile: Tile = TILE) -> Tensor:
    return _product(g_NKK, factor, diagonal, tile)


def _product(a_NKD: Tensor, factor: float, diagonal: float, tile: Tile) -> Tensor:
    # any strides will do: a tall matrix is passed as a transposed view
    count, size, depth = a_NKD.shape
    tile = _with_fewer_stages(tile, a_NKD.device, a_NKD.element_size())
    product = torch.empty((count, size, size), device=a_NKD.device, dtype=a_NKD.dtype)
    across = triton.cdiv(size, tile.side * tile.span)
    _times_transposed[(across * (across + 1) // 2 * tile.span, count)](
        a_NKD, product, factor, diagonal, size, depth, *a_NKD.stride(),
        UNMASKED=size % (tile.side * tile.span) == 0 and depth % tile.depth == 0,
        SIDE=tile.side, DEPTH=tile.depth, SPAN=tile.span, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return product


@cache
def _with_fewer_stages(tile: Tile, device: torch.device, value_bytes: int) -> Tile:
    """Return the tile with as many stages as the GPU's shared memory holds; consumer cards have less than half of a
    Hopper's.
    """
    if device.type != "cuda":
        return tile
    stage = (1 + tile.span) * tile.side * tile.depth * value_bytes
    held = driver.active.utils.get_device_properties(device.index)["max_shared_mem"] // stage
    return replace(tile, stages=max(1, min(tile.stages, held)))


@triton.jit
def _triangular_root(number):  # type: ignore[no-untyped-def]
    """Return the largest n with n·(n + 1)/2 ≤ number. The square root in float32 may be off by one; correct it."""
    n = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    n -= (n * (n + 1) // 2 > number).to(tl.int32)
    n += ((n + 1) * (n + 2) // 2 <= number).to(tl.int32)
    return n


@triton.jit
def _place(number, across, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return row ≤ column of the program's tile in the triangle of tiles.

    Tiles are numbered in bands of GROUP columns, and within a band row by row: first the rectangle above, then the
    triangle at the diagonal.
    """
    first = _triangular_root(number) // GROUP * GROUP
    width = tl.minimum(GROUP, across - first)
    within = number - first * (first + 1) // 2
    in_triangle = within - first * width
    right = _triangular_root(tl.maximum(in_triangle, 0))
    row = tl.where(in_triangle < 0, within // width, first + in_triangle - right * (right + 1) // 2)
    column = tl.where(in_triangle < 0, first + within % width, first + right)
    return row, column


@triton.jit
def _operand(pointers, at, inner, size, left, UNMASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    if UNMASKED:
        return tl.load(pointers)
    return tl.load(pointers, mask=(at < size) & (inner < left), other=0.0)


@triton.jit
def _write(total, out, row, column, factor, diagonal, size, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE)
    tile = (factor * total + tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)).to(out.dtype.element_ty)
    if row == column:  # the tensor cores may have summed the two halves in different orders
        tile = tl.where(rows[:, None] <= columns[None, :], tile, tl.trans(tile))
    if row <= column:
        inside = (rows[:, None] < size) & (columns[None, :] < size)
        tl.store(out + rows[:, None] * size + columns[None, :], tile, mask=inside)
        mirrored = (columns[:, None] < size) & (rows[None, :] < size)
        tl.store(out + columns[:, None] * size + rows[None, :], tl.trans(tile), mask=mirrored)


@triton.jit
def _times_transposed(  # type: ignore[no-untyped-def]
    a, product, factor, diagonal, size, depth, member_stride, row_stride, inner_stride,
    UNMASKED: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _place(tl.program_id(0) // SPAN, tl.cdiv(size, SIDE * SPAN), GROUP)
    row, column = row * SPAN + tl.program_id(0) % SPAN, column * SPAN
    member = tl.program_id(1).to(tl.int64)  # a batch can pass 2³¹ values
    a += member * member_stride
    rows, columns, inner = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE), tl.arange(0, DEPTH)
    left = a + rows[:, None] * row_stride + inner[None, :] * inner_stride
    right = a + columns[None, :] * row_stride + inner[:, None] * inner_stride
    right_second = right + SIDE * row_stride
    total, second = tl.zeros((SIDE, SIDE), dtype=tl.float32), tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        x = _operand(left, rows[:, None], inner[None, :], size, depth - start, UNMASKED)
        y = _operand(right, columns[None, :], inner[:, None], size, depth - start, UNMASKED)
        total = tl.dot(x, y, total)
        if SPAN == 2:
            z = _operand(right_second, columns[None, :] + SIDE, inner[:, None], size, depth - start, UNMASKED)
            second = tl.dot(x, z, second)
            right_second += DEPTH * inner_stride
        left += DEPTH * inner_stride
        right += DEPTH * inner_stride
    out = product + member * size * size
    _write(total, out, row, column, factor, diagonal, size, SIDE)
    if SPAN == 2:
        _write(second, out, row, column + 1, factor, diagonal, size, SIDE)
