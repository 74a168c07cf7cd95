"""The NF4 kernel: each program reads the codes and scales of some blocks and writes their values, once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.nf4 import BLOCK, NESTED_BLOCK, NF4, levels

_BLOCKS, _WARPS = 64, 4  # quantisation blocks and warps of one program


def dequantise_into(matrix: NF4, out: Tensor, factor: Tensor | None = None) -> Tensor:
    n = out.numel()
    contiguous = out.is_contiguous()
    rows = out if contiguous or out.dim() == 2 else out.flatten(0, -2)
    assert contiguous or rows.stride(1) == 1, "the values of a row must be contiguous"
    # without double quantisation these three are not read, but a kernel needs a pointer for each parameter
    table, largest, mean = matrix.nested or (matrix.scales, matrix.scales, matrix.scales)
    _dequantise[(triton.cdiv(n, _BLOCKS * BLOCK),)](
        matrix.codes,
        matrix.scales,
        levels(out.device),
        table,
        largest,
        mean,
        out if factor is None else factor,
        out,
        n,
        matrix.codes.numel(),
        matrix.scales.numel(),
        out.shape[-1],
        out.shape[-1] if contiguous else rows.stride(0),
        DOUBLE=matrix.nested is not None,
        SCALED=factor is not None,
        CONTIGUOUS=contiguous,
        BLOCKS=_BLOCKS,
        BLOCK=BLOCK,
        NESTED_BLOCK=NESTED_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # bitsandbytes rounds the product of a scale before it adds the mean; an FMA would not
    )
    return out


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    codes,
    scales,
    levels,
    table,
    largest,
    mean,
    factor,
    out,
    n,
    bytes,
    blocks,
    width,
    stride,
    DOUBLE: tl.constexpr,
    SCALED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < blocks
    scale = tl.load(scales + block, mask=exists)
    if DOUBLE:
        byte = scale.to(tl.int32)
        above = tl.load(largest + block // NESTED_BLOCK, mask=exists)
        scale = tl.load(table + byte, mask=exists) * above + tl.load(mean)
    if SCALED:
        scale *= tl.load(factor)  # a power of two: no further rounding
    place = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    pair = tl.load(codes + place, mask=place < bytes, other=0).to(tl.int32)
    first = tl.load(levels + (pair >> 4)) * scale[:, None]
    second = tl.load(levels + (pair & 15)) * scale[:, None]
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    if not CONTIGUOUS:
        at = (at // width) * stride + at % width
    tl.store(out + at, tl.interleave(first, second).to(out.dtype.element_ty), mask=inside)
