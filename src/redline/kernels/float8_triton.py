"""The kernels that make fp8 operands: each value is computed once and leaves both ways round from registers.

A program has a tile of tokens × columns in four interleaved quarters. Codes go out as rows; those of four neighbouring
tokens are packed into a word, and the words are turned through shared memory and stored as columns.

No pair of codes is used twice: where ptxas 12.8 (Triton 3.6's) joins two pairs into a word, as every row's store does,
another use of the first one reads an undefined register. So words are made of pairs of their own.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale


class Tile(NamedTuple):
    """One program's share."""

    tokens: int  # as many bytes side by side in a column
    columns: int
    warps: int


# 16-byte loads, several of them in flight, no spilled registers, and tokens for whole 128-byte lines in a column
TILES = {
    "quantise": Tile(128, 64, 4),
    "swiglu": Tile(128, 64, 4),
    "swiglu_backward": Tile(128, 64, 4),
}
WORD = tl.constexpr(4)  # tokens whose codes travel together
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # which knows no assembly


def quantise(x_NK: Tensor, scale: Scale) -> Float8:
    x = x_NK.contiguous()
    n, width = x.shape
    out = Made(n, width, scale)
    grid, tile = _tiles("quantise", n, width)
    _quantise[grid](x, *out.pointers, n, WIDTH=width, **out.flags, **tile)
    return out.operand()


def swiglu8(h_N2F: Tensor, scale: Scale) -> Float8:
    h = h_N2F.contiguous()
    n, width = h.shape[0], h.shape[1] // 2
    out = Made(n, width, scale)
    grid, tile = _tiles("swiglu", n, width)
    _swiglu[grid](h, *out.pointers, n, WIDTH=width, **out.flags, **tile)
    return out.operand()


def swiglu_backward8(grad_s_NF: Tensor, h_N2F: Tensor, scale: Scale) -> Float8:
    grad_s, h = grad_s_NF.contiguous(), h_N2F.contiguous()
    n, width = grad_s.shape
    out = Made(n, 2 * width, scale)
    grid, tile = _tiles("swiglu_backward", n, width)
    _swiglu_backward[grid](grad_s, h, *out.pointers, n, WIDTH=width, **out.flags, **tile)
    return out.operand()


class Made:
    """An operand while a kernel makes it. Columns whose words would not be aligned are turned after it, by torch."""

    def __init__(self, n: int, width: int, scale: Scale, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        device, self.scale = scale.factor.device, scale
        self.row = torch.empty((n, width), device=device, dtype=dtype)
        self.column = torch.empty((width, n), device=device, dtype=dtype) if n and n % WORD.value == 0 else None

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both layouts, the factor, and amax; in place of what is not there, something that is not touched."""
        factor, amax = self.scale.factor, self.scale.amax
        words = factor if self.column is None else self.column.view(torch.int32)
        return self.row, words, factor, factor if amax is None else amax

    @property
    def flags(self) -> dict[str, Any]:
        return {"COLUMN": self.column is not None, "AMAX": self.scale.amax is not None}

    def operand(self) -> Float8:
        column = self.column
        if column is None:
            column = self.row.view(torch.uint8).T.contiguous().view(self.row.dtype)
        return Float8(self.row, column, self.scale.unscale)


def fitting(size: int, available: int) -> int:
    """A tile's side: no larger than the tensor needs, no smaller than a word."""
    return max(WORD.value, min(size, triton.next_power_of_2(max(1, available))))


def _tiles(kernel: str, n: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    tile = TILES[kernel]
    tokens, columns = fitting(tile.tokens, n), fitting(tile.columns, width)
    grid = (triton.cdiv(n, tokens) * triton.cdiv(width, columns),)
    return grid, {"GROUPS": tokens // WORD.value, "COLUMNS": columns, "num_warps": tile.warps}


@triton.jit
def finite_or_nan(value):  # type: ignore[no-untyped-def]
    """inf·0 is NaN, and the cast would make 448 of inf: one multiply-add instead of a test and a choice."""
    return value * 0.0 + value


@triton.jit
def store_row(value, factor, row, token, place, n, width, inside):  # type: ignore[no-untyped-def]
    """Stores the codes of value [tokens, columns], and returns what was rounded.

    `place` are the columns in the operand, `inside` which of them exist. The cast rounds to nearest even, keeps NaN
    and cuts off at the largest.
    """
    value = value * factor
    there = (token < n)[:, None] & inside[None, :]
    tl.store(row + token.to(tl.int64)[:, None] * width + place[None, :], value.to(row.dtype.element_ty), mask=there)
    return value


@triton.jit
def store_column(a, b, c, d, row, column, group, place, n, inside):  # type: ignore[no-untyped-def]
    """The codes of the four quarters [groups, columns], as rows of the transposed layout."""
    words = _words(a, b, c, d, row.dtype.element_ty)
    there = inside[:, None] & (group * WORD < n)[None, :]
    tl.store(column + place.to(tl.int64)[:, None] * (n // WORD) + group[None, :], tl.trans(words), mask=there)


@triton.jit
def _words(a, b, c, d, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        words = _byte(a, kind) | (_byte(b, kind) << 8) | (_byte(c, kind) << 16) | (_byte(d, kind) << 24)
    elif kind == tl.float8e5:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _byte(value, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return value.to(kind).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def raise_amax(amax, a, b, c, d):  # type: ignore[no-untyped-def]
    """By the largest of four magnitudes; NaN where all of a tile was: the other operand of a maximum wins over NaN."""
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    tl.atomic_max(amax, tl.maximum(tl.max(largest), 0.0), sem="relaxed")


@triton.jit
def place_of(width, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's words along the tokens, and its columns."""
    across = (width + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    return (program // across) * GROUPS + tl.arange(0, GROUPS), (program % across) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _quantise_quarter(x, row, times, group, place, n, quarter, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """What was rounded, and its magnitude before it was scaled; so do the other quarters."""
    token = group * WORD + quarter
    inside = (token < n)[:, None] & (place < WIDTH)[None, :]
    value = tl.load(x + token.to(tl.int64)[:, None] * WIDTH + place[None, :], mask=inside, other=0.0)
    value = finite_or_nan(value.to(tl.float32))
    return store_row(value, times, row, token, place, n, WIDTH, place < WIDTH), tl.abs(value)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x, row, column, factor, amax, n,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, a_size = _quantise_quarter(x, row, times, group, place, n, 0, WIDTH)
    b, b_size = _quantise_quarter(x, row, times, group, place, n, 1, WIDTH)
    c, c_size = _quantise_quarter(x, row, times, group, place, n, 2, WIDTH)
    d, d_size = _quantise_quarter(x, row, times, group, place, n, 3, WIDTH)
    if COLUMN:
        store_column(a, b, c, d, row, column, group, place, n, place < WIDTH)
    if AMAX:
        raise_amax(amax, a_size, b_size, c_size, d_size)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """The square of a reciprocal root: two instructions, where a division takes five, and as exact to 2⁻²²."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _swiglu_quarter(h, row, times, group, place, n, quarter, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    token = group * WORD + quarter
    inside = (token < n)[:, None] & (place < WIDTH)[None, :]
    at = h + token.to(tl.int64)[:, None] * (2 * WIDTH) + place[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = finite_or_nan(gate * _sigmoid(gate) * up)
    return store_row(value, times, row, token, place, n, WIDTH, place < WIDTH), tl.abs(value)


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    h, row, column, factor, amax, n,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, a_size = _swiglu_quarter(h, row, times, group, place, n, 0, WIDTH)
    b, b_size = _swiglu_quarter(h, row, times, group, place, n, 1, WIDTH)
    c, c_size = _swiglu_quarter(h, row, times, group, place, n, 2, WIDTH)
    d, d_size = _swiglu_quarter(h, row, times, group, place, n, 3, WIDTH)
    if COLUMN:
        store_column(a, b, c, d, row, column, group, place, n, place < WIDTH)
    if AMAX:
        raise_amax(amax, a_size, b_size, c_size, d_size)


@triton.jit
def _swiglu_backward_quarter(  # type: ignore[no-untyped-def]
    grad_s, h, row, times, group, place, n, quarter, WIDTH: tl.constexpr
):
    """The gradients of gate and up."""
    token = group * WORD + quarter
    exists = place < WIDTH
    inside = (token < n)[:, None] & exists[None, :]
    at = h + token.to(tl.int64)[:, None] * (2 * WIDTH) + place[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_s + token.to(tl.int64)[:, None] * WIDTH + place[None, :], mask=inside, other=0.0)
    sigmoid = _sigmoid(gate)
    along = grad.to(tl.float32) * sigmoid
    grad_gate = finite_or_nan(along * up * (1.0 + gate * (1.0 - sigmoid)))
    grad_up = finite_or_nan(along * gate)
    size = tl.maximum(tl.abs(grad_gate), tl.abs(grad_up))
    grad_gate = store_row(grad_gate, times, row, token, place, n, 2 * WIDTH, exists)
    grad_up = store_row(grad_up, times, row, token, WIDTH + place, n, 2 * WIDTH, exists)
    return grad_gate, grad_up, size


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    grad_s, h, row, column, factor, amax, n,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, a_up, a_size = _swiglu_backward_quarter(grad_s, h, row, times, group, place, n, 0, WIDTH)
    b, b_up, b_size = _swiglu_backward_quarter(grad_s, h, row, times, group, place, n, 1, WIDTH)
    c, c_up, c_size = _swiglu_backward_quarter(grad_s, h, row, times, group, place, n, 2, WIDTH)
    d, d_up, d_size = _swiglu_backward_quarter(grad_s, h, row, times, group, place, n, 3, WIDTH)
    if COLUMN:
        store_column(a, b, c, d, row, column, group, place, n, place < WIDTH)
        store_column(a_up, b_up, c_up, d_up, row, column, group, WIDTH + place, n, place < WIDTH)
    if AMAX:
        raise_amax(amax, a_size, b_size, c_size, d_size)
