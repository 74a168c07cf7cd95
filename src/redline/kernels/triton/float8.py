"""The parts of every kernel that makes an fp8 operand, and the kernels that quantise, transpose and correct operands.

Each value is computed once and stored in both layouts from registers. A program has a tile of tokens × columns, in four
interleaved quarters: tokens 4i, 4i+1, 4i+2 and 4i+3. Codes are stored as rows directly. For the transposed layout the
codes of four neighbouring tokens are packed into a 32-bit word, and the words are transposed through shared memory. All
of a tile is loaded before any of it is stored: the compiler moves no load over a store, so interleaving them would make
four waits out of one.

No converted pair of codes is used twice. ptxas 12.8 (of Triton 3.6) joins two pairs into a word for each row's store,
and a second use of the first pair then reads an undefined register. So the words are made of conversions of their own.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale, sample_stride


class Tile(NamedTuple):
    """The part of the operand that one program makes."""

    tokens: int  # also the number of neighbouring bytes in the transposed layout
    columns: int
    warps: int


# Chosen so that loads have 16 bytes and several are in flight, no registers spill, and the transposed layout is written
# in whole 128-byte lines where registers allow it.
TILES = {
    "quantise": Tile(64, 128, 8),
    "transpose": Tile(256, 128, 8),
}
WORD = tl.constexpr(4)  # tokens whose codes are packed into one 32-bit word
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter has no inline assembly


def quantise(x_NK: Tensor, scale: Scale) -> Float8:
    x = x_NK.contiguous()
    n, width = x.shape
    out = OperandBuffer(n, width, scale)
    grid, tile = grid_and_tile(TILES["quantise"], n, width)
    _quantise[grid](x, *out.pointers, n, WIDTH=width, **out.flags, **tile)
    return out.operand()


def transpose(row_NK: Tensor) -> Tensor:
    # the kernel moves words of four codes; where their addresses would not be aligned, torch does it
    n, width = row_NK.shape
    if n % WORD.value or width % WORD.value or not row_NK.numel():
        return row_NK.view(torch.uint8).T.contiguous().view(row_NK.dtype)
    column = torch.empty((width, n), device=row_NK.device, dtype=row_NK.dtype)
    grid, tile = grid_and_tile(TILES["transpose"], n, width)
    _transpose[grid](row_NK.view(torch.int32), column.view(torch.int32), n, WIDTH=width, **tile)
    return column


class OperandBuffer:
    """The memory of an operand that a kernel is to make.

    If the number of tokens is no multiple of four, words of the transposed layout would not be aligned: the kernel then
    writes rows only, and torch transposes them afterwards.
    """

    def __init__(self, n: int, width: int, scale: Scale, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        device, self.scale = scale.factor.device, scale
        self.row = torch.empty((n, width), device=device, dtype=dtype)
        transposes = n and n % WORD.value == 0 and not scale.rows_alone
        self.column = torch.empty((width, n), device=device, dtype=dtype) if transposes else None

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row layout, transposed layout as words, factor, amax.

        A kernel needs a pointer for each parameter: where the flags say that one is not used, any tensor will do.
        """
        factor, amax = self.scale.factor, self.scale.amax
        words = factor if self.column is None else self.column.view(torch.int32)
        return self.row, words, factor, factor if amax is None else amax

    @property
    def flags(self) -> dict[str, Any]:
        return {"COLUMN": self.column is not None, "AMAX": self.scale.amax is not None}

    def operand(self) -> Float8:
        """Return the operand, after the kernel was launched."""
        if self.column is None and not self.scale.rows_alone:
            self.column = transpose(self.row)
        return Float8(self.row, self.column, self.scale.unscale)


def tile_side(size: int, available: int) -> int:
    """Return the side of a tile: `size`, but no more than the tensor needs and no less than a word."""
    return max(WORD.value, min(size, triton.next_power_of_2(max(1, available))))


def grid_and_tile(tile: Tile, n: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the launch grid and the tile's keyword arguments for a tensor [n, width]."""
    tokens, columns = tile_side(tile.tokens, n), tile_side(tile.columns, width)
    grid = (triton.cdiv(n, tokens) * triton.cdiv(width, columns),)
    return grid, {"GROUPS": tokens // WORD.value, "COLUMNS": columns, "num_warps": tile.warps}


@triton.jit
def finite_or_nan(value):  # type: ignore[no-untyped-def]
    """Return the value, or NaN in place of infinity, which the cast to e4m3 would turn into 448.

    inf·0 is NaN: one multiply-add instead of a comparison and a selection.
    """
    return value * 0.0 + value


@triton.jit
def store_tile(quarters, out, group, place, n, width, inside, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply four quarters [groups, columns] by the factor and store their codes in both layouts.

    Values must be finite or NaN. `place` are the columns in the operand; `inside` says which of them exist.
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
        exists = inside[:, None] & (group < n // WORD)[None, :]
        tl.store(column + place.to(tl.int64)[:, None] * (n // WORD) + group[None, :], tl.trans(words), mask=exists)


@triton.jit
def _store_row(value, row, token, place, n, width, inside):  # type: ignore[no-untyped-def]
    """Store codes. The GPU's cast rounds to nearest even, keeps NaN, and saturates at the largest value."""
    exists = (token < n)[:, None] & inside[None, :]
    tl.store(row + token.to(tl.int64)[:, None] * width + place[None, :], value.to(row.dtype.element_ty), mask=exists)


@triton.jit
def _words(a, b, c, d, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack the codes of four values into a word, by conversions of their own (see the module docstring)."""
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
    """Return the elementwise largest magnitude of four; NaN only where all four are, since a maximum ignores NaN."""
    a, b, c, d = quarters
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def raise_amax(amax, magnitude):  # type: ignore[no-untyped-def]
    """Raise *amax to the largest magnitude. A maximum does not depend on the order of the programs."""
    tl.atomic_max(amax, tl.maximum(tl.max(magnitude), 0.0), sem="relaxed")


@triton.jit
def place_of(width, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of this program's words along the tokens, and of its columns."""
    across = (width + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    return (program // across) * GROUPS + tl.arange(0, GROUPS), (program % across) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _transpose(row, column, n, WIDTH: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Transpose: turn words of four columns into words of four tokens."""
    wide: tl.constexpr = WIDTH // WORD
    group, place = place_of(wide, GROUPS, COLUMNS // WORD)
    a, b, c, d = load_quarters(row, group, place, n, wide, place < wide)
    exists = (place < wide)[:, None] & (group < n // WORD)[None, :]
    for byte in tl.static_range(WORD):
        at = column + (place * WORD + byte).to(tl.int64)[:, None] * (n // WORD) + group[None, :]
        tl.store(at, tl.trans(_byte_of_each(a, b, c, d, byte)), mask=exists)


@triton.jit
def _byte_of_each(a, b, c, d, byte: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a word of one byte of each of four words."""
    shift: tl.constexpr = 8 * byte
    low = ((a >> shift) & 0xFF) | (((b >> shift) & 0xFF) << 8)
    high = ((c >> shift) & 0xFF) | (((d >> shift) & 0xFF) << 8)
    return low | (high << 16)


@triton.jit
def load_quarters(x, group, place, n, stride, inside):  # type: ignore[no-untyped-def]
    """Load tokens 4i, 4i+1, 4i+2 and 4i+3 of a tile of x, whose rows are `stride` apart."""
    a = _load(x, group * WORD, place, n, stride, inside)
    b = _load(x, group * WORD + 1, place, n, stride, inside)
    c = _load(x, group * WORD + 2, place, n, stride, inside)
    d = _load(x, group * WORD + 3, place, n, stride, inside)
    return a, b, c, d


@triton.jit
def _load(x, token, place, n, stride, inside):  # type: ignore[no-untyped-def]
    exists = (token < n)[:, None] & inside[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride + place[None, :], mask=exists, other=0.0)


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


# ----------------------------------------------------------------------------------------------------
# The corrections for the rounding of a weight, in two kernels: sums of sampled rows, in parts; then their product with
# the rounding errors W − W₈, summed along the inputs or along the outputs.


_ROWS, _COLUMNS, _ROUNDS = 128, 128, 2  # a program of _sums adds up _ROWS sampled rows at a time, _ROUNDS times
_ALONG_INPUTS = (16, 256)  # outputs of a program, and how many inputs it sums at a time
_ALONG_OUTPUTS = (128, 64)  # outputs that a program sums, all at once, and the inputs that it serves


def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    sums, sampled = _sampled_sums(x)
    outputs, inputs = exact_OI.shape
    out = torch.empty(outputs, device=exact_OI.device, dtype=torch.bfloat16)
    output_block, input_block = _ALONG_INPUTS
    _along_inputs[(triton.cdiv(outputs, output_block),)](
        exact_OI.contiguous(), weight.unscale, sums, x.unscale, out, outputs, sampled,
        INPUTS=inputs, PARTS=len(sums), OUTPUT_BLOCK=output_block, INPUT_BLOCK=input_block, num_warps=4,
    )  # fmt: skip
    return out


def mean_gradient_correction(grad: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    sums, sampled = _sampled_sums(grad)
    outputs, inputs = exact_OI.shape
    output_block, input_block = _ALONG_OUTPUTS
    parts = triton.cdiv(outputs, output_block)
    out = torch.empty((parts, inputs), device=exact_OI.device, dtype=torch.float32)
    _along_outputs[(triton.cdiv(inputs, input_block), parts)](
        exact_OI.contiguous(), weight.unscale, sums, grad.unscale, out, outputs, sampled,
        INPUTS=inputs, PARTS=len(sums), INPUT_BLOCK=input_block, OUTPUT_BLOCK=output_block, num_warps=4,
    )  # fmt: skip
    return out.sum(0).to(torch.bfloat16)  # no atomics: added in the same order every time


def _sampled_sums(x: Float8) -> tuple[Tensor, int]:
    """Return the sums of sampled rows' codes in parts [parts, K], and the number of sampled rows."""
    assert x.row is not None
    n, width = x.row.shape
    sampled = triton.cdiv(n, sample_stride(n))
    parts = triton.cdiv(sampled, _ROWS * _ROUNDS)
    sums = torch.empty((parts, width), device=x.row.device, dtype=torch.float32)
    _sums[(triton.cdiv(width, _COLUMNS), parts)](
        x.row, sums, sampled, sample_stride(n), WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, ROUNDS=_ROUNDS, num_warps=4
    )
    return sums, sampled


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    row, sums, sampled, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr
):
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for round in tl.range(0, ROUNDS):
        which = (tl.program_id(1) * ROUNDS + round) * ROWS + tl.arange(0, ROWS)
        inside = (which < sampled)[:, None] & (place < WIDTH)[None, :]
        at = (which * stride).to(tl.int64)[:, None] * WIDTH + place[None, :]
        total += tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(1) * WIDTH + place, tl.sum(total, 0), mask=place < WIDTH)


@triton.jit
def _rounding_error(exact, at, inside, unscale):  # type: ignore[no-untyped-def]
    """Return W − W₈. Scales are powers of two, so that scaling itself rounds nothing."""
    wide = tl.load(exact + at, mask=inside, other=0.0).to(tl.float32)
    return wide - (wide * (1.0 / unscale)).to(tl.float8e4nv).to(tl.float32) * unscale


@triton.jit
def _total(sums, place, width, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the parts of the sampled sums."""
    total = tl.load(sums + place, mask=place < width, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * width + place, mask=place < width, other=0.0)
    return total


@triton.jit
def _along_inputs(  # type: ignore[no-untyped-def]
    exact, unscale, sums, row_unscale, out, outputs, sampled,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    times = tl.load(unscale)
    total = tl.zeros([OUTPUT_BLOCK, INPUT_BLOCK], tl.float32)
    for start in tl.range(0, INPUTS, INPUT_BLOCK):
        place = start + tl.arange(0, INPUT_BLOCK)
        inside = (output < outputs)[:, None] & (place < INPUTS)[None, :]
        error = _rounding_error(exact, output.to(tl.int64)[:, None] * INPUTS + place[None, :], inside, times)
        total += error * _total(sums, place, INPUTS, PARTS)[None, :]
    product = tl.sum(total, 1) * (tl.load(row_unscale) / sampled)
    tl.store(out + output, product.to(out.dtype.element_ty), mask=output < outputs)


@triton.jit
def _along_outputs(  # type: ignore[no-untyped-def]
    exact, unscale, sums, row_unscale, out, outputs, sampled,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, INPUT_BLOCK: tl.constexpr, OUTPUT_BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * INPUT_BLOCK + tl.arange(0, INPUT_BLOCK)
    output = tl.program_id(1) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    inside = (output < outputs)[:, None] & (place < INPUTS)[None, :]
    error = _rounding_error(exact, output.to(tl.int64)[:, None] * INPUTS + place[None, :], inside, tl.load(unscale))
    product = tl.sum(error * _total(sums, output, outputs, PARTS)[:, None], 0) * (tl.load(row_unscale) / sampled)
    tl.store(out + tl.program_id(1) * INPUTS + place, product, mask=place < INPUTS)
