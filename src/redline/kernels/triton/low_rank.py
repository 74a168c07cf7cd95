"""The low-rank kernels: each reads the wide operand once, and applies the dropout while the values are in registers.

A sum that several programs share is written in parts and added up afterwards: without atomics the order of additions,
and so the result, is the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.dispatch import sm_count
from redline.kernels.low_rank import GOLDEN, Dropout, projected_dtype

_ROWS, _COLUMNS = 64, 128  # the tile of the wide operand that a program multiplies at a time
_LEAST_RANKS, _MOST_RANKS = 16, 128  # adapter ranks of a tile: tl.dot takes no fewer than 16, registers hold no more
# Hopper's wgmma has at least 64 rows. With as many ranks, the wide operand is fed to it from shared memory, where the
# asynchronous copy puts it; with fewer it would have to go through registers.
_WGMMA_ROWS = 64
_WARPS, _STAGES = 8, 3
_PROGRAMS_PER_SM = 2  # if there is work for them
_GOLDEN = tl.constexpr(GOLDEN)
# The seed's words differ in every call. Without this, Triton would compile another kernel whenever one of them happens
# to be 1 or divisible by 16.
_DROPOUT_ARGUMENTS = ["low", "high", "threshold"]


def project_down(x_NI: Tensor, a_RI: Tensor, dropout: Dropout | None, unscale: Tensor | None = None) -> Tensor:
    assert x_NI.dtype in (a_RI.dtype, torch.float8_e4m3fn)
    x, a = _rows_contiguous(x_NI), _rows_contiguous(a_RI)
    (n, width), rank = x.shape, a.shape[0]
    ranks = _ranks(rank, _LEAST_RANKS)
    columns = _columns(a, ranks)
    grid = triton.cdiv(n, _ROWS), triton.cdiv(rank, ranks)
    parts, part = _parts(width, columns, grid[0] * grid[1], x)
    dtype = projected_dtype(x)
    out = torch.empty((parts, n, rank), device=x.device, dtype=dtype if parts == 1 else torch.float32)
    _project_down[(*grid, parts)](
        x, a, x if unscale is None else unscale, out, n, width, rank, x.stride(0), a.stride(0), part,
        *_dropout_arguments(dropout), DROPOUT=dropout is not None, UNSCALED=unscale is not None,
        ROWS=_ROWS, COLUMNS=columns, RANKS=ranks, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0).to(dtype)


def project_down_weight_gradient(
    grad_NR: Tensor, x_NI: Tensor, dropout: Dropout | None, unscale: Tensor | None = None
) -> Tensor:
    assert x_NI.dtype in (grad_NR.dtype, torch.float8_e4m3fn)
    grad, x = _rows_contiguous(grad_NR), _rows_contiguous(x_NI)
    (n, width), rank = x.shape, grad.shape[1]
    ranks = _ranks(rank, _WGMMA_ROWS)
    columns = _columns(grad, ranks)
    grid = triton.cdiv(width, columns), triton.cdiv(rank, ranks)
    parts, part = _parts(n, _ROWS, grid[0] * grid[1], x)
    out = torch.empty((parts, rank, width), device=x.device, dtype=torch.float32)
    _weight_gradient[(*grid, parts)](
        grad, x, x if unscale is None else unscale, out, n, width, rank, grad.stride(0), x.stride(0), part,
        *_dropout_arguments(dropout), DROPOUT=dropout is not None, UNSCALED=unscale is not None,
        ROWS=_ROWS, COLUMNS=columns, RANKS=ranks, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def project_down_input_gradient(
    grad_NR: Tensor, a_RI: Tensor, dropout: Dropout | None, out_NI: Tensor | None = None
) -> Tensor:
    assert grad_NR.dtype == a_RI.dtype
    grad, a = _rows_contiguous(grad_NR), _rows_contiguous(a_RI)
    (n, rank), width = grad.shape, a.shape[1]
    out = torch.empty((n, width), device=grad.device, dtype=grad.dtype) if out_NI is None else out_NI
    assert out.shape == (n, width)
    assert out.stride(1) == 1, "written in place"
    ranks = min(64, _ranks(rank, _LEAST_RANKS))
    columns = _columns(a, ranks)
    _input_gradient[(triton.cdiv(n, _ROWS) * triton.cdiv(width, columns),)](
        grad, a, out, n, width, grad.stride(0), a.stride(0), out.stride(0), *_dropout_arguments(dropout),
        DROPOUT=dropout is not None, ADD=out_NI is not None, RANK=rank, ROWS=_ROWS, COLUMNS=columns,
        RANKS=ranks, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return x, or a copy if the values of a row are not contiguous. Rows may be strided."""
    return x if x.stride(1) == 1 else x.contiguous()


def _ranks(rank: int, least: int) -> int:
    """Return the ranks of a tile: a power of two."""
    return min(_MOST_RANKS, max(least, triton.next_power_of_2(rank)))


def _columns(operand: Tensor, ranks: int) -> int:
    """Return the columns of a tile, so that the tiles of two programs fit into a multiprocessor's shared memory.

    Float32 is multiplied without tensor cores, out of registers, of which there are fewer.
    """
    if operand.dtype == torch.float32:
        return _COLUMNS // 4
    return _COLUMNS if ranks < _MOST_RANKS else _COLUMNS // 2


def _parts(length: int, step: int, programs: int, x: Tensor) -> tuple[int, int]:
    """Return how many programs share a sum of this length, and how many terms each adds up (a multiple of `step`).

    `programs` is the number of programs if none are shared.
    """
    wanted = max(1, _PROGRAMS_PER_SM * sm_count(x.device) // max(1, programs))
    part = triton.cdiv(triton.cdiv(max(1, length), wanted), step) * step
    return triton.cdiv(max(1, length), part), part


def _dropout_arguments(dropout: Dropout | None) -> tuple[int, ...]:
    """Return the seed's words, converted to signed integers as Triton takes them, and the threshold."""
    if dropout is None:
        return 0, 0, 0
    return *(word - (word >> 31 << 32) for word in dropout.seed_words), dropout.threshold


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _keys(row, low, high):  # type: ignore[no-untyped-def]
    return _mix(row.to(tl.uint32) ^ low.to(tl.uint32)) + high.to(tl.uint32)


@triton.jit
def _keep(key, start, threshold, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return which of the columns from `start` (even) on are kept, in rows with these keys. A word decides for two."""
    pair = (start // 2 + tl.arange(0, COLUMNS // 2)).to(tl.uint32)
    word = _mix(key[:, None] + (pair * _GOLDEN)[None, :])
    # compared with the whole word for the odd column, and with the word shifted up for the even one
    least = threshold.to(tl.uint32) << 16
    return tl.interleave(word << 16, word) >= least


@triton.jit(do_not_specialize=_DROPOUT_ARGUMENTS)
def _project_down(  # type: ignore[no-untyped-def]
    x, a, unscale, out, n, width, rank, x_stride, a_stride, part, low, high, threshold,
    DROPOUT: tl.constexpr, UNSCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
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
        if DROPOUT:
            tile = tl.where(_keep(key, start, threshold, COLUMNS), tile, 0.0)
        total = tl.dot(tile, matrix, total, input_precision="ieee")
    if UNSCALED:
        total *= tl.load(unscale)
    out += (tl.program_id(2).to(tl.int64) * n + row)[:, None] * rank + place[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=(row < n)[:, None] & (place < rank)[None, :])


@triton.jit(do_not_specialize=_DROPOUT_ARGUMENTS)
def _weight_gradient(  # type: ignore[no-untyped-def]
    grad, x, unscale, out, n, width, rank, grad_stride, x_stride, part, low, high, threshold,
    DROPOUT: tl.constexpr, UNSCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
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
        if DROPOUT:
            key = _keys(row, low, high)
            tile = tl.where(_keep(key, tl.program_id(0) * COLUMNS, threshold, COLUMNS), tile, 0.0)
        total = tl.dot(tl.trans(outer), tile, total, input_precision="ieee")
    if UNSCALED:
        total *= tl.load(unscale)
    out += (tl.program_id(2).to(tl.int64) * rank + place)[:, None] * width + column[None, :]
    tl.store(out, total, mask=(place < rank)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=_DROPOUT_ARGUMENTS)
def _input_gradient(  # type: ignore[no-untyped-def]
    grad, a, out, n, width, grad_stride, a_stride, out_stride, low, high, threshold,
    DROPOUT: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, COLUMNS)
    start = (tl.program_id(0) % across) * COLUMNS
    row, column = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    far, exists, inside = row.to(tl.int64)[:, None], (row < n)[:, None], (column < width)[None, :]
    out += far * out_stride + column[None, :]
    if ADD:
        before = tl.load(out, mask=exists & inside)  # loaded here, so that it arrives while the product is computed
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for some in range(0, RANK, RANKS):
        place = some + tl.arange(0, RANKS)
        outer = tl.load(grad + far * grad_stride + place[None, :], mask=exists & (place < RANK)[None, :], other=0.0)
        matrix = tl.load(
            a + place[:, None] * a_stride + column[None, :], mask=(place < RANK)[:, None] & inside, other=0.0
        )
        total = tl.dot(outer, matrix, total, input_precision="ieee")
    if DROPOUT:
        total = tl.where(_keep(_keys(row, low, high), start, threshold, COLUMNS), total, 0.0)
    if ADD:
        total += before.to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), mask=exists & inside)
