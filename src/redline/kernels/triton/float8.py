"""The kernels that make fp8 operands: each value is computed once and leaves both ways round from registers.

A program has a tile of tokens × columns in four interleaved quarters. Codes go out as rows; those of four neighbouring
tokens are packed into a word, and the words are turned through shared memory and stored as columns. All of a tile is
loaded before any of it is stored: no load is moved over a store, and four waits would take the place of one.

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

from redline.kernels.float8 import Float8, Scale, stride_of


class Tile(NamedTuple):
    """One program's share."""

    tokens: int  # as many bytes side by side in a column
    columns: int
    warps: int


# 16-byte loads, several of them in flight, no spilled registers, and tokens for whole 128-byte lines in a column
TILES = {
    "quantise": Tile(64, 128, 8),
    "swiglu": Tile(128, 64, 8),
    "swiglu_backward": Tile(64, 64, 4),
    "turn": Tile(256, 128, 8),
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


def turned(row_NK: Tensor) -> Tensor:
    """Codes [K, N] of codes [N, K]."""
    n, width = row_NK.shape
    if n % WORD.value or width % WORD.value or not row_NK.numel():
        return row_NK.view(torch.uint8).T.contiguous().view(row_NK.dtype)
    column = torch.empty((width, n), device=row_NK.device, dtype=row_NK.dtype)
    grid, tile = _tiles("turn", n, width)
    _turn[grid](row_NK.view(torch.int32), column.view(torch.int32), n, WIDTH=width, **tile)
    return column


class Made:
    """An operand while a kernel makes it. Columns whose words would not be aligned are turned after it, by torch."""

    def __init__(self, n: int, width: int, scale: Scale, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        device, self.scale = scale.factor.device, scale
        self.row = torch.empty((n, width), device=device, dtype=dtype)
        turning = n and n % WORD.value == 0 and not scale.rows_alone
        self.column = torch.empty((width, n), device=device, dtype=dtype) if turning else None

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
        if self.column is None and not self.scale.rows_alone:
            self.column = turned(self.row)
        return Float8(self.row, self.column, self.scale.unscale)


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
def store_tile(quarters, out, group, place, n, width, inside, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four quarters [groups, columns] leave as codes, both ways round; they are to be finite or NaN.

    `place` are the columns in the operand, `inside` which of them exist.
    """
    a, b, c, d = quarters
    row, column, times = out
    a, b, c, d = a * times, b * times, c * times, d * times
    _store_row(a, row, group * WORD, place, n, width, inside)
    _store_row(b, row, group * WORD + 1, place, n, width, inside)
    _store_row(c, row, group * WORD + 2, place, n, width, inside)
    _store_row(d, row, group * WORD + 3, place, n, width, inside)
    if COLUMN:
        words = _words(a, b, c, d, row.dtype.element_ty)
        there = inside[:, None] & (group < n // WORD)[None, :]
        tl.store(column + place.to(tl.int64)[:, None] * (n // WORD) + group[None, :], tl.trans(words), mask=there)


@triton.jit
def _store_row(value, row, token, place, n, width, inside):  # type: ignore[no-untyped-def]
    """The cast rounds to nearest even, keeps NaN and cuts off at the largest."""
    there = (token < n)[:, None] & inside[None, :]
    tl.store(row + token.to(tl.int64)[:, None] * width + place[None, :], value.to(row.dtype.element_ty), mask=there)


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
def magnitude(quarters):  # type: ignore[no-untyped-def]
    """The largest of four; NaN where all were: the other operand of a maximum wins over NaN."""
    a, b, c, d = quarters
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def raise_amax(amax, magnitude):  # type: ignore[no-untyped-def]
    tl.atomic_max(amax, tl.maximum(tl.max(magnitude), 0.0), sem="relaxed")


@triton.jit
def place_of(width, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's words along the tokens, and its columns."""
    across = (width + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    return (program // across) * GROUPS + tl.arange(0, GROUPS), (program % across) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _turn(row, column, n, WIDTH: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of four columns each become words of four tokens each."""
    wide: tl.constexpr = WIDTH // WORD
    group, place = place_of(wide, GROUPS, COLUMNS // WORD)
    a, b, c, d = load_quarters(row, group, place, n, wide, place < wide)
    there = (place < wide)[:, None] & (group < n // WORD)[None, :]
    for byte in tl.static_range(WORD):
        at = column + (place * WORD + byte).to(tl.int64)[:, None] * (n // WORD) + group[None, :]
        tl.store(at, tl.trans(_picked(a, b, c, d, byte)), mask=there)


@triton.jit
def _picked(a, b, c, d, byte: tl.constexpr):  # type: ignore[no-untyped-def]
    """One byte of each."""
    shift: tl.constexpr = 8 * byte
    low = ((a >> shift) & 0xFF) | (((b >> shift) & 0xFF) << 8)
    high = ((c >> shift) & 0xFF) | (((d >> shift) & 0xFF) << 8)
    return low | (high << 16)


@triton.jit
def load_quarters(x, group, place, n, stride, inside):  # type: ignore[no-untyped-def]
    """Tokens 4i, 4i+1, 4i+2 and 4i+3 of a tile of x, whose rows are `stride` apart."""
    a = _load(x, group * WORD, place, n, stride, inside)
    b = _load(x, group * WORD + 1, place, n, stride, inside)
    c = _load(x, group * WORD + 2, place, n, stride, inside)
    d = _load(x, group * WORD + 3, place, n, stride, inside)
    return a, b, c, d


@triton.jit
def _load(x, token, place, n, stride, inside):  # type: ignore[no-untyped-def]
    there = (token < n)[:, None] & inside[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride + place[None, :], mask=there, other=0.0)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x, row, column, factor, amax, n,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, b, c, d = load_quarters(x, group, place, n, WIDTH, place < WIDTH)
    a, b = finite_or_nan(a.to(tl.float32)), finite_or_nan(b.to(tl.float32))
    c, d = finite_or_nan(c.to(tl.float32)), finite_or_nan(d.to(tl.float32))
    store_tile((a, b, c, d), (row, column, times), group, place, n, WIDTH, place < WIDTH, COLUMN)
    if AMAX:
        raise_amax(amax, magnitude((a, b, c, d)))


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """The square of a reciprocal root: two instructions, where a division takes five, and as exact to 2⁻²²."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _gated(gate, up):  # type: ignore[no-untyped-def]
    gate = gate.to(tl.float32)
    return finite_or_nan(gate * _sigmoid(gate) * up.to(tl.float32))


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    h, row, column, factor, amax, n,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, b, c, d = load_quarters(h, group, place, n, 2 * WIDTH, place < WIDTH)
    a_up, b_up, c_up, d_up = load_quarters(h + WIDTH, group, place, n, 2 * WIDTH, place < WIDTH)
    a, b, c, d = _gated(a, a_up), _gated(b, b_up), _gated(c, c_up), _gated(d, d_up)
    store_tile((a, b, c, d), (row, column, times), group, place, n, WIDTH, place < WIDTH, COLUMN)
    if AMAX:
        raise_amax(amax, magnitude((a, b, c, d)))


@triton.jit
def _gated_backward(grad, gate, up):  # type: ignore[no-untyped-def]
    """The gradients of gate and up."""
    gate = gate.to(tl.float32)
    sigmoid = _sigmoid(gate)
    along = grad.to(tl.float32) * sigmoid
    grad_gate = along * up.to(tl.float32) * (1.0 + gate * (1.0 - sigmoid))
    return finite_or_nan(grad_gate), finite_or_nan(along * gate)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    grad_s, h, row, column, factor, amax, n,
    WIDTH: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    exists = place < WIDTH
    a, b, c, d = load_quarters(h, group, place, n, 2 * WIDTH, exists)
    a_up, b_up, c_up, d_up = load_quarters(h + WIDTH, group, place, n, 2 * WIDTH, exists)
    a_grad, b_grad, c_grad, d_grad = load_quarters(grad_s, group, place, n, WIDTH, exists)
    a, a_up = _gated_backward(a_grad, a, a_up)
    b, b_up = _gated_backward(b_grad, b, b_up)
    c, c_up = _gated_backward(c_grad, c, c_up)
    d, d_up = _gated_backward(d_grad, d, d_up)
    store_tile((a, b, c, d), (row, column, times), group, place, n, 2 * WIDTH, exists, COLUMN)
    store_tile((a_up, b_up, c_up, d_up), (row, column, times), group, WIDTH + place, n, 2 * WIDTH, exists, COLUMN)
    if AMAX:
        raise_amax(amax, tl.maximum(magnitude((a, b, c, d)), magnitude((a_up, b_up, c_up, d_up))))


# ----------------------------------------------------------------------------------------------------
# Sums of a few rows each, side by side; then the weight against what it is rounded to, along rows or columns.


_ROWS, _COLUMNS, _TIMES = 128, 128, 2  # of a program that sums: so many rows at a time, so many times
_ALONG_INPUTS = (16, 256)  # outputs of a program, and inputs that it sums at a time
_ALONG_OUTPUTS = (128, 64)  # outputs that a program sums, all at once, and its inputs


def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    sums, sampled = _sampled_sums(x)
    outputs, inputs = exact_OI.shape
    found = torch.empty(outputs, device=exact_OI.device, dtype=torch.bfloat16)
    some, at_a_time = _ALONG_INPUTS
    _along_inputs[(triton.cdiv(outputs, some),)](
        exact_OI.contiguous(), weight.unscale, sums, x.unscale, found, outputs, sampled,
        INPUTS=inputs, PARTS=len(sums), SOME=some, LONG=at_a_time, num_warps=4,
    )  # fmt: skip
    return found


def mean_gradient_correction(grad: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    sums, sampled = _sampled_sums(grad)
    outputs, inputs = exact_OI.shape
    long, some = _ALONG_OUTPUTS
    parts = triton.cdiv(outputs, long)
    found = torch.empty((parts, inputs), device=exact_OI.device, dtype=torch.float32)
    _along_outputs[(triton.cdiv(inputs, some), parts)](
        exact_OI.contiguous(), weight.unscale, sums, grad.unscale, found, outputs, sampled,
        INPUTS=inputs, PARTS=len(sums), SOME=some, LONG=long, num_warps=4,
    )  # fmt: skip
    return found.sum(0).to(torch.bfloat16)  # no atomics: the same sum in the same order every time


def _sampled_sums(x: Float8) -> tuple[Tensor, int]:
    """Of some rows' codes, in parts; and how many rows they are of."""
    assert x.row is not None
    n, width = x.row.shape
    sampled = triton.cdiv(n, stride_of(n))
    parts = triton.cdiv(sampled, _ROWS * _TIMES)
    sums = torch.empty((parts, width), device=x.row.device, dtype=torch.float32)
    _sums[(triton.cdiv(width, _COLUMNS), parts)](
        x.row, sums, sampled, stride_of(n), WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, TIMES=_TIMES, num_warps=4
    )
    return sums, sampled


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    row, sums, sampled, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr
):
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for time in tl.range(0, TIMES):
        which = (tl.program_id(1) * TIMES + time) * ROWS + tl.arange(0, ROWS)
        inside = (which < sampled)[:, None] & (place < WIDTH)[None, :]
        at = (which * stride).to(tl.int64)[:, None] * WIDTH + place[None, :]
        total += tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(1) * WIDTH + place, tl.sum(total, 0), mask=place < WIDTH)


@triton.jit
def _lost(exact, at, inside, unscale):  # type: ignore[no-untyped-def]
    """What is rounded off: scales are powers of two, by which nothing is."""
    wide = tl.load(exact + at, mask=inside, other=0.0).to(tl.float32)
    return wide - (wide * (1.0 / unscale)).to(tl.float8e4nv).to(tl.float32) * unscale


@triton.jit
def _total(sums, place, width, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.load(sums + place, mask=place < width, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * width + place, mask=place < width, other=0.0)
    return total


@triton.jit
def _along_inputs(  # type: ignore[no-untyped-def]
    exact, unscale, sums, row_unscale, found, outputs, sampled,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, SOME: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    out = tl.program_id(0) * SOME + tl.arange(0, SOME)
    times = tl.load(unscale)
    total = tl.zeros([SOME, LONG], tl.float32)
    for start in tl.range(0, INPUTS, LONG):
        place = start + tl.arange(0, LONG)
        inside = (out < outputs)[:, None] & (place < INPUTS)[None, :]
        lost = _lost(exact, out.to(tl.int64)[:, None] * INPUTS + place[None, :], inside, times)
        total += lost * _total(sums, place, INPUTS, PARTS)[None, :]
    whole = tl.sum(total, 1) * (tl.load(row_unscale) / sampled)
    tl.store(found + out, whole.to(found.dtype.element_ty), mask=out < outputs)


@triton.jit
def _along_outputs(  # type: ignore[no-untyped-def]
    exact, unscale, sums, row_unscale, found, outputs, sampled,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, SOME: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * SOME + tl.arange(0, SOME)
    out = tl.program_id(1) * LONG + tl.arange(0, LONG)
    inside = (out < outputs)[:, None] & (place < INPUTS)[None, :]
    lost = _lost(exact, out.to(tl.int64)[:, None] * INPUTS + place[None, :], inside, tl.load(unscale))
    whole = tl.sum(lost * _total(sums, out, outputs, PARTS)[:, None], 0) * (tl.load(row_unscale) / sampled)
    tl.store(found + tl.program_id(1) * INPUTS + place, whole, mask=place < INPUTS)
