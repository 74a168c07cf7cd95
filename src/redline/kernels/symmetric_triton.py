"""One kernel for both: factor·A·Aᵀ + diagonal·I. A square of a symmetric matrix is its product with its transpose.

A program makes one tile on or above the diagonal, or two side by side, and writes it twice, the second time mirrored.
No sum is split and nothing is added in memory: the result is the same every time, and exactly symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver


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
