"""NF4 (QLoRA, arXiv 2305.14314), exactly as bitsandbytes 0.50 has it: Triton on a GPU, plain torch elsewhere.

Each block of 64 values is divided by its largest magnitude and each quotient replaced by the nearest of sixteen levels;
doubly quantised, the blocks' magnitudes less their mean are kept in eight bits, 256 to a scale.

bitsandbytes rounds differently on a CPU and on a GPU; each is followed on its own device. On a GPU a block of zeros
takes code 0, which is minus its scale; a float32 weight (not one in bf16 or float16) that lies within a rounding of a
threshold can take the next code: one of 17 million did. On a CPU a last block that is not full is divided instead of
multiplied by a reciprocal, zeros stay zeros, and the eight-bit codes are read from a table of 65,536 quotients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.errors import UserError
from redline.planning.shapes import NESTED_BLOCK
from redline.planning.shapes import NF4_BLOCK as BLOCK

# fmt: off
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_CHUNK = 1 << 22  # values quantised or dequantised at a time: temporaries are four and more bytes each
_SMALLEST = 1e-38


@dataclass(frozen=True)
class NF4:
    """One matrix. A byte holds two values, the first in its high half."""

    codes: Tensor  # uint8 [⌈n/2⌉]
    scales: Tensor  # of each block: float32, or uint8 when doubly quantised
    nested: tuple[Tensor, Tensor, Tensor] | None  # what a byte stands for [256], largest of 256 scales, mean of all
    shape: tuple[int, ...]

    def to(self, device: torch.device) -> NF4:
        nested = None
        if self.nested is not None:
            nested = dynamic_levels(device), self.nested[1].to(device), self.nested[2].to(device)
        return NF4(self.codes.to(device), self.scales.to(device), nested, self.shape)


def quantise_nf4(weight: Tensor, *, double: bool = True) -> NF4:
    """Values that are not finite are refused: no code stands for them."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"NF4 is made of float32, bfloat16 or float16, not of {str(weight.dtype)[6:]}.")
    flat = weight.detach().reshape(-1)
    codes = torch.empty((flat.numel() + 1) // 2, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        values = flat[start : start + _CHUNK].float()
        packed, largest = _quantise_blocks(values)
        codes[start // 2 : start // 2 + packed.numel()] = packed
        scales[start // BLOCK : start // BLOCK + largest.numel()] = largest
    if not bool(scales.isfinite().all()):
        raise UserError(
            "A weight holds values that are not finite, for which NF4 has no code.",
            fix="Use another copy of the model, or method: lora.",
        )
    shape = tuple(weight.shape)
    if not double:
        return NF4(codes, scales, None, shape)
    mean = scales.mean()
    small, largest = _quantise_scales(scales - mean)
    return NF4(codes, small, (dynamic_levels(scales.device), largest, mean), shape)


def dequantise_nf4(matrix: NF4, dtype: torch.dtype, out: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """In `out`, if given: of that dtype and the matrix' shape; rows may lie apart, their values may not.

    A factor is a power of two.
    """
    if out is None:
        out = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device)
    assert (out.shape, out.dtype) == (matrix.shape, dtype)
    if matrix.codes.is_cuda:
        from redline.kernels.triton import nf4 as nf4_triton

        return nf4_triton.dequantise_nf4(matrix, out, factor)
    return reference_dequantise_nf4(matrix, out, factor)


def dense_nf4(parts: Sequence[NF4], dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """Matrices of one width, one below the other."""
    if torch.compiler.is_compiling():
        assert factor is None, "fp8 is for blocks that are not compiled"
        nested = [part.nested or (part.scales[:0],) * 3 for part in parts]
        tables, largest, means = (list(each) for each in zip(*nested, strict=True))
        codes, scales = [part.codes for part in parts], [part.scales for part in parts]
        heights, width = [part.shape[0] for part in parts], parts[0].shape[1]
        double = parts[0].nested is not None
        return _opaque_dense(codes, scales, tables, largest, means, heights, width, double, dtype)
    heights = [part.shape[0] for part in parts]
    out = torch.empty(sum(heights), parts[0].shape[1], dtype=dtype, device=parts[0].codes.device)
    for part, rows in zip(parts, out.split(heights), strict=True):
        dequantise_nf4(part, dtype, rows, factor)
    return out


@torch.library.custom_op("redline::dense_nf4", mutates_args=())
def _opaque_dense(
    codes: list[Tensor],
    scales: list[Tensor],
    tables: list[Tensor],
    largest: list[Tensor],
    means: list[Tensor],
    heights: list[int],
    width: int,
    double: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The same for a compiler, which need not know what is in it."""
    nested = zip(tables, largest, means, strict=True) if double else [None] * len(codes)
    each = zip(codes, scales, nested, heights, strict=True)
    return dense_nf4([NF4(code, scale, more, (rows, width)) for code, scale, more, rows in each], dtype)


@_opaque_dense.register_fake
def _(
    codes: list[Tensor],
    scales: list[Tensor],
    tables: list[Tensor],
    largest: list[Tensor],
    means: list[Tensor],
    heights: list[int],
    width: int,
    double: bool,
    dtype: torch.dtype,
) -> Tensor:
    return codes[0].new_empty((sum(heights), width), dtype=dtype)


def reference_dequantise_nf4(matrix: NF4, out: Tensor, factor: Tensor | None = None) -> Tensor:
    scales, n = block_scales(matrix), out.numel()
    scales = scales if factor is None else scales * factor
    flat = out.view(-1) if out.is_contiguous() else torch.empty(n, dtype=out.dtype, device=out.device)
    for start in range(0, n, _CHUNK):
        end = min(start + _CHUNK, n)
        pairs = torch.gather(_pairs(out.device), 0, matrix.codes[start // 2 : (end + 1) // 2].long())
        values = _blocks(pairs.view(torch.float32), BLOCK)
        values *= scales[start // BLOCK : -(-end // BLOCK), None]  # in float32, rounded once
        flat[start:end] = values.view(-1)[: end - start]
    return out if out.is_contiguous() else out.copy_(flat.view(out.shape))


def largest_magnitude(matrix: NF4) -> Tensor:
    """No value is larger: a level is at most one."""
    return block_scales(matrix).abs().amax()


def block_scales(matrix: NF4) -> Tensor:
    """Of each block, in float32. Two roundings, as bitsandbytes has them: product, then sum."""
    if matrix.nested is None:
        return matrix.scales
    table, largest, mean = matrix.nested
    return table[matrix.scales.int()] * largest.repeat_interleave(NESTED_BLOCK)[: matrix.scales.numel()] + mean


@cache
def levels(device: torch.device) -> Tensor:
    return torch.tensor(_LEVELS, dtype=torch.float32, device=device)


@cache
def dynamic_levels(device: torch.device) -> Tensor:
    """What a byte stands for: seven decades, each finer than the one below it (arXiv 1511.04561), zero and one."""
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        positive.append(10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2))
    each = torch.cat(positive)
    return torch.cat((each, -each, torch.tensor([0.0, 1.0], device="cpu"))).sort().values.to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Of each byte its two values, as one word of 64 bits: one look-up for both."""
    byte = torch.arange(256, device=device)
    return torch.stack((levels(device)[byte >> 4], levels(device)[byte & 15]), 1).view(torch.int64).view(-1)


def _halfway(table: Tensor) -> Tensor:
    return (table[:-1] + table[1:]) / 2


def _blocks(flat: Tensor, size: int) -> Tensor:
    """The last one filled up with zeros."""
    missing = -flat.numel() % size
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, size)


def _quantise_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes, and the largest magnitude of each block. What lies on a threshold takes the lower code."""
    n, on_gpu = values.numel(), values.is_cuda
    blocks = _blocks(values, BLOCK)
    largest = blocks.abs().amax(1)
    quotients = blocks * (1.0 / (largest if on_gpu else largest.clamp(min=_SMALLEST)))[:, None]
    quotients.nan_to_num_(nan=-1.0)  # 0/0 on a GPU
    if n % BLOCK and not on_gpu:
        largest[-1].clamp_(min=_SMALLEST)
        quotients[-1] = blocks[-1] / largest[-1]
    codes = torch.bucketize(quotients, _halfway(levels(values.device)), out_int32=True).to(torch.uint8)
    pairs = codes.view(-1, 2)
    return ((pairs[:, 0] << 4) | pairs[:, 1])[: (n + 1) // 2], largest


def _quantise_scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes, and the largest magnitude of 256 values each. 0/0 takes the lowest code."""
    blocks = _blocks(values, NESTED_BLOCK)
    largest = blocks.abs().amax(1)
    quotients = (blocks * (1.0 / largest)[:, None]).clamp_(-1, 1).nan_to_num_(nan=-1.0)
    codes = nearest_code(quotients) if values.is_cuda else _code_by_table(quotients)
    return codes.to(torch.uint8).view(-1)[: values.numel()].clone(), largest


def nearest_code(quotients: Tensor) -> Tensor:
    """The nearest of the 256 levels; of two as near that with the even number, where bitsandbytes' search ends."""
    between = _halfway(dynamic_levels(quotients.device))
    codes = torch.bucketize(quotients, between, out_int32=True)
    tied = between[codes.clamp(max=between.numel() - 1)] == quotients
    return codes + (tied & (codes % 2 == 1)).int()


def _code_by_table(quotients: Tensor) -> Tensor:
    """By the nearest of 65,536 even steps from -1 to 1; a fused multiply and add: float64 holds it exactly."""
    place = (((quotients + 1) * 0.5).double() * 65535 + 0.5).float()
    return _stepped_codes()[place.int()]


@cache
def _stepped_codes() -> Tensor:
    steps = 2 * torch.arange(65536, dtype=torch.float32, device="cpu") / 65535 - 1
    return torch.bucketize(steps, _halfway(dynamic_levels(steps.device))).to(torch.uint8)
