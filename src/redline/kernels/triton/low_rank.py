"""The low-rank kernels: each reads the wide operand once, and drops what is dropped while it is in registers.

Sums over more than one program are made of parts, added up afterwards: no atomics, the same result every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.low_rank import GOLDEN, Dropped, narrowed_dtype
from redline.kernels.triton.launch import processors

_ROWS, _COLUMNS = 64, 128  # of the wide operand that a program has at a time
_LEAST, _MOST = 16, 128  # ranks at a time
_TALL = 64  # rows that Hopper's matmuls have at the least: then the wide operand need not leave shared memory again
_WARPS, _STAGES = 8, 3
_PROGRAMS = 2  # on each processor, if there is work for them
_GOLDEN = tl.constexpr(GOLDEN)
_DRAWN = ["low", "high", "threshold"]  # are different every time, and no kernel is to be compiled for them


def narrow(x_NI: Tensor, a_RI: Tensor, dropped: Dropped | None, unscale: Tensor | None = None) -> Tensor:
    x, a = _in_rows(x_NI), _in_rows(a_RI)
    (n, width), rank = x.shape, a.shape[0]
    ranks = _ranks(rank, _LEAST)
    columns = _columns(a, ranks)
    grid = triton.cdiv(n, _ROWS), triton.cdiv(rank, ranks)
    parts, part = _parts(width, columns, grid[0] * grid[1], x)
    dtype = narrowed_dtype(x)
    out = torch.empty((parts, n, rank), device=x.device, dtype=dtype if parts == 1 else torch.float32)
    _narrow[(*grid, parts)](
        x, a, x if unscale is None else unscale, out, n, width, rank, x.stride(0), a.stride(0), part, *_drawn(dropped),
        DROPPED=dropped is not None, UNSCALED=unscale is not None, ROWS=_ROWS, COLUMNS=columns, RANKS=ranks,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0).to(dtype)


def narrow_gradient(grad_NR: Tensor, x_NI: Tensor, dropped: Dropped | None, unscale: Tensor | None = None) -> Tensor:
    grad, x = _in_rows(grad_NR), _in_rows(x_NI)
    (n, width), rank = x.shape, grad.shape[1]
    ranks = _ranks(rank, _TALL)
    columns = _columns(grad, ranks)
    grid = triton.cdiv(width, columns), triton.cdiv(rank, ranks)
    parts, part = _parts(n, _ROWS, grid[0] * grid[1], x)
    out = torch.empty((parts, rank, width), device=x.device, dtype=torch.float32)
    _narrow_gradient[(*grid, parts)](
        grad, x, x if unscale is None else unscale, out, n, width, rank, grad.stride(0), x.stride(0), part,
        *_drawn(dropped), DROPPED=dropped is not None, UNSCALED=unscale is not None,
        ROWS=_ROWS, COLUMNS=columns, RANKS=ranks, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def spread(grad_NR: Tensor, a_RI: Tensor, dropped: Dropped | None, out_NI: Tensor | None = None) -> Tensor:
    grad, a = _in_rows(grad_NR), _in_rows(a_RI)
    (n, rank), width = grad.shape, a.shape[1]
    out = torch.empty((n, width), device=grad.device, dtype=grad.dtype) if out_NI is None else out_NI
    assert out.shape == (n, width)
    assert out.stride(1) == 1, "written in place"
    ranks = min(64, _ranks(rank, _LEAST))
    columns = _columns(a, ranks)
    _spread[(triton.cdiv(n, _ROWS) * triton.cdiv(width, columns),)](
        grad, a, out, n, width, grad.stride(0), a.stride(0), out.stride(0), *_drawn(dropped),
        DROPPED=dropped is not None, ADD=out_NI is not None, RANK=rank, ROWS=_ROWS, COLUMNS=columns,
        RANKS=ranks, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def _in_rows(x: Tensor) -> Tensor:
    """Rows may lie apart, the values of one may not."""
    return x if x.stride(1) == 1 else x.contiguous()


def _ranks(rank: int, least: int) -> int:
    return min(_MOST, max(least, triton.next_power_of_2(rank)))


def _columns(operand: Tensor, ranks: int) -> int:
    """Two programs share a processor's memory. Float32 is multiplied without tensor cores, out of registers."""
    if operand.dtype == torch.float32:
        return _COLUMNS // 4
    return _COLUMNS if ranks < _MOST else _COLUMNS // 2


def _parts(length: int, step: int, programs: int, x: Tensor) -> tuple[int, int]:
    """How many programs share a sum of that length, and how much of it each has."""
    wanted = max(1, _PROGRAMS * processors(x.device) // max(1, programs))
    part = triton.cdiv(triton.cdiv(max(1, length), wanted), step) * step
    return triton.cdiv(max(1, length), part), part


def _drawn(dropped: Dropped | None) -> tuple[int, ...]:
    """The seed's words, signed as Triton's integers are, and the threshold."""
    if dropped is None:
        return 0, 0, 0
    return *(word - (word >> 31 << 32) for word in dropped.words), dropped.threshold


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _keys(row, low, high):  # type: ignore[no-untyped-def]
    return _mixed(row.to(tl.uint32) ^ low.to(tl.uint32)) + high.to(tl.uint32)


@triton.jit
def _kept(key, start, threshold, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of the columns from `start` on, an even one, pass in rows of these keys: a word tells of two."""
    pair = (start // 2 + tl.arange(0, COLUMNS // 2)).to(tl.uint32)
    word = _mixed(key[:, None] + (pair * _GOLDEN)[None, :])
    least = threshold.to(tl.uint32) << 16  # as a whole word decides for its higher half, and shifted for its lower one
    return tl.interleave(word << 16, word) >= least


@triton.jit(do_not_specialize=_DRAWN)
def _narrow(  # type: ignore[no-untyped-def]
    x, a, unscale, out, n, width, rank, x_stride, a_stride, part, low, high, threshold,
    DROPPED: tl.constexpr, UNSCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    first = tl.program_id(2) * part
    key = _keys(row, low, high)
    x += row.to(tl.int64)[:, None] * x_stride
    a += place[None, :] * a_stride
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for start in range(first, min(first + part, width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = tl.load(x + column[None, :], mask=(row < n)[:, None] & (column < width)[None, :], other=0.0)
        matrix = tl.load(a + column[:, None], mask=(place < rank)[None, :] & (column < width)[:, None], other=0.0)
        tile = tile.to(matrix.dtype)
        if DROPPED:
            tile = tl.where(_kept(key, start, threshold, COLUMNS), tile, 0.0)
        total = tl.dot(tile, matrix, total, input_precision="ieee")
    if UNSCALED:
        total *= tl.load(unscale)
    out += (tl.program_id(2).to(tl.int64) * n + row)[:, None] * rank + place[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=(row < n)[:, None] & (place < rank)[None, :])


@triton.jit(do_not_specialize=_DRAWN)
def _narrow_gradient(  # type: ignore[no-untyped-def]
    grad, x, unscale, out, n, width, rank, grad_stride, x_stride, part, low, high, threshold,
    DROPPED: tl.constexpr, UNSCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    column, place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    first = tl.program_id(2) * part
    total = tl.zeros((RANKS, COLUMNS), dtype=tl.float32)
    for start in range(first, min(first + part, n), ROWS):
        row = start + tl.arange(0, ROWS)
        far = row.to(tl.int64)[:, None]
        exists = (row < n)[:, None]
        tile = tl.load(x + far * x_stride + column[None, :], mask=exists & (column < width)[None, :], other=0.0)
        outer = tl.load(grad + far * grad_stride + place[None, :], mask=exists & (place < rank)[None, :], other=0.0)
        tile = tile.to(outer.dtype)
        if DROPPED:
            key = _keys(row, low, high)
            tile = tl.where(_kept(key, tl.program_id(0) * COLUMNS, threshold, COLUMNS), tile, 0.0)
        total = tl.dot(tl.trans(outer), tile, total, input_precision="ieee")
    if UNSCALED:
        total *= tl.load(unscale)
    out += (tl.program_id(2).to(tl.int64) * rank + place)[:, None] * width + column[None, :]
    tl.store(out, total, mask=(place < rank)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=_DRAWN)
def _spread(  # type: ignore[no-untyped-def]
    grad, a, out, n, width, grad_stride, a_stride, out_stride, low, high, threshold,
    DROPPED: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, COLUMNS)
    start = (tl.program_id(0) % across) * COLUMNS
    row, column = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    far, exists, inside = row.to(tl.int64)[:, None], (row < n)[:, None], (column < width)[None, :]
    out += far * out_stride + column[None, :]
    if ADD:
        before = tl.load(out, mask=exists & inside)  # arrives while the product is made
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for some in range(0, RANK, RANKS):
        place = some + tl.arange(0, RANKS)
        outer = tl.load(grad + far * grad_stride + place[None, :], mask=exists & (place < RANK)[None, :], other=0.0)
        matrix = tl.load(
            a + place[:, None] * a_stride + column[None, :], mask=(place < RANK)[:, None] & inside, other=0.0
        )
        total = tl.dot(outer, matrix, total, input_precision="ieee")
    if DROPPED:
        total = tl.where(_kept(_keys(row, low, high), start, threshold, COLUMNS), total, 0.0)
    if ADD:
        total += before.to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), mask=exists & inside)
