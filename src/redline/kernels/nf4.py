"""NF4 quantisation (QLoRA, arXiv 2305.14314), bit for bit as in bitsandbytes 0.50.

Each block of 64 values is divided by its largest magnitude, and each quotient is replaced by the nearest of sixteen
levels. With double quantisation, the blocks' magnitudes minus their mean are stored in eight bits, 256 to a scale.

bitsandbytes rounds differently on a CPU and on a GPU, and this module follows it on each. On a GPU a block of zeros
gets code 0, which stands for minus its scale, and a float32 weight (not a bf16 or float16 one) within a rounding error
of a threshold can get the neighbouring code: one of 17 million did. On a CPU an incomplete last block is divided
instead of multiplied by a reciprocal, zeros stay zero, and the eight-bit codes come from a table of 65,536 quotients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.errors import UserError
from redline.kernels.dispatch import op, triton_serves
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
_CHUNK = 1 << 22  # values quantised or dequantised at a time, to bound the temporaries: four bytes and more per value
_SMALLEST = 1e-38  # on a CPU bitsandbytes divides by no less


@dataclass(frozen=True)
class NF4:
    """One quantised matrix. A byte of codes holds two values, the first in its high half."""

    codes: Tensor  # uint8 [⌈n/2⌉]
    scales: Tensor  # one per block: float32, or uint8 when doubly quantised
    # when doubly quantised: the value of each byte [256], the largest of each 256 scales, the mean of all scales
    nested: tuple[Tensor, Tensor, Tensor] | None
    shape: tuple[int, ...]

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    def to(self, device: torch.device) -> NF4:
        nested = None
        if self.nested is not None:
            nested = dynamic_levels(device), self.nested[1].to(device), self.nested[2].to(device)
        return NF4(self.codes.to(device), self.scales.to(device), nested, self.shape)


def quantise_nf4(weight: Tensor, *, double: bool = True) -> NF4:
    """Quantise a weight, with `double` its scales too. Refuse NaN and infinity: no code stands for them."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"NF4 cannot quantise a weight of dtype {str(weight.dtype)[6:]}.",
            fix="Use weights in float32, bfloat16 or float16.",
        )
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
            "A weight holds values that are not finite (NaN or infinity), and NF4 has no code for them.",
            fix="Use another copy of the model, or method: lora.",
        )
    shape = tuple(weight.shape)
    if not double:
        return NF4(codes, scales, None, shape)
    mean = scales.mean()
    small, largest = _quantise_scales(scales - mean)
    return NF4(codes, small, (dynamic_levels(scales.device), largest, mean), shape)


def dequantise_nf4(matrix: NF4, dtype: torch.dtype, out: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """Return the matrix in `dtype`, times `factor` (a power of two).

    `out`, if given, is filled and returned. It has that dtype and the matrix' shape. Its rows may be strided; the
    values of a row must be contiguous.
    """
    if out is None:
        out = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device)
    assert (out.shape, out.dtype) == (matrix.shape, dtype)
    return dequantise_into(matrix, out, factor)


def _compiled(_: NF4, out: Tensor, factor: Tensor | None = None) -> bool:
    on_fp8 = " on fp8" if out.dtype == torch.float8_e4m3fn else ""
    return triton_serves(out.device, "nf4._dequantise" + on_fp8)


@op(triton="nf4:dequantise_into", uses_triton=_compiled)
def dequantise_into(matrix: NF4, out: Tensor, factor: Tensor | None = None) -> Tensor:
    """Write the values of the matrix, times `factor`, to `out`, and return it."""
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


def dense_nf4(parts: Sequence[NF4], dtype: torch.dtype, factor: Tensor | None = None) -> Tensor:
    """Return matrices of the same width, dequantised and stacked along the rows."""
    if torch.compiler.is_compiling():
        assert factor is None, "only fused blocks, which are not compiled, read NF4 in fp8"
        # a custom op takes lists of tensors, but no lists of dataclasses
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
    """Do what dense_nf4 does, as one node of a compiled graph: the compiler does not look inside."""
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


def largest_magnitude(matrix: NF4) -> Tensor:
    """Return an upper bound of the magnitudes: the largest scale, since no level is beyond ±1."""
    return block_scales(matrix).abs().amax()


def block_scales(matrix: NF4) -> Tensor:
    """Return the scale of each block in float32. Product and sum are rounded one by one, as in bitsandbytes."""
    if matrix.nested is None:
        return matrix.scales
    table, largest, mean = matrix.nested
    return table[matrix.scales.int()] * largest.repeat_interleave(NESTED_BLOCK)[: matrix.scales.numel()] + mean


@cache
def levels(device: torch.device) -> Tensor:
    """Return the sixteen levels of NF4."""
    return torch.tensor(_LEVELS, dtype=torch.float32, device=device)


@cache
def dynamic_levels(device: torch.device) -> Tensor:
    """Return the value of each of the 256 codes of a scale: seven decades of both signs, each decade with twice as many
    values as the one below it (dynamic tree quantisation, arXiv 1511.04561), zero and one.
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        positive.append(10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2))
    each = torch.cat(positive)
    return torch.cat((each, -each, torch.tensor([0.0, 1.0], device="cpu"))).sort().values.to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte as one 64-bit word, so that one lookup reads both."""
    byte = torch.arange(256, device=device)
    return torch.stack((levels(device)[byte >> 4], levels(device)[byte & 15]), 1).view(torch.int64).view(-1)


def _midpoints(table: Tensor) -> Tensor:
    return (table[:-1] + table[1:]) / 2


def _blocks(flat: Tensor, size: int) -> Tensor:
    """Return the values as rows of `size`; the last one is padded with zeros."""
    missing = -flat.numel() % size
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, size)


def _quantise_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed codes, and the largest magnitude of each block. A value on a threshold gets the lower code."""
    n, on_gpu = values.numel(), values.is_cuda
    blocks = _blocks(values, BLOCK)
    largest = blocks.abs().amax(1)
    quotients = blocks * (1.0 / (largest if on_gpu else largest.clamp(min=_SMALLEST)))[:, None]
    quotients.nan_to_num_(nan=-1.0)  # 0·(1/0) in a block of zeros on a GPU
    if n % BLOCK and not on_gpu:
        largest[-1].clamp_(min=_SMALLEST)
        quotients[-1] = blocks[-1] / largest[-1]
    codes = torch.bucketize(quotients, _midpoints(levels(values.device)), out_int32=True).to(torch.uint8)
    pairs = codes.view(-1, 2)
    return ((pairs[:, 0] << 4) | pairs[:, 1])[: (n + 1) // 2], largest


def _quantise_scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight-bit codes, and the largest magnitude of each 256 values. 0·(1/0) gets the lowest code."""
    blocks = _blocks(values, NESTED_BLOCK)
    largest = blocks.abs().amax(1)
    quotients = (blocks * (1.0 / largest)[:, None]).clamp_(-1, 1).nan_to_num_(nan=-1.0)
    codes = _code_by_table(quotients) if values.device.type == "cpu" else nearest_code(quotients)
    return codes.to(torch.uint8).view(-1)[: values.numel()].clone(), largest


def nearest_code(quotients: Tensor) -> Tensor:
    """Return the code of the nearest of the 256 values; on a tie the even code, as bitsandbytes' search does."""
    midpoints = _midpoints(dynamic_levels(quotients.device))
    codes = torch.bucketize(quotients, midpoints, out_int32=True)
    tied = midpoints[codes.clamp(max=midpoints.numel() - 1)] == quotients
    return codes + (tied & (codes % 2 == 1)).int()


def _code_by_table(quotients: Tensor) -> Tensor:
    """Return codes by a table over 65,536 even steps from -1 to 1.

    bitsandbytes computes the step with a fused multiply-add, which float64 reproduces exactly.
    """
    step = (((quotients + 1) * 0.5).double() * 65535 + 0.5).float()
    return _codes_of_steps()[step.int()]


@cache
def _codes_of_steps() -> Tensor:
    steps = 2 * torch.arange(65536, dtype=torch.float32, device="cpu") / 65535 - 1
    return torch.bucketize(steps, _midpoints(dynamic_levels(steps.device))).to(torch.uint8)
