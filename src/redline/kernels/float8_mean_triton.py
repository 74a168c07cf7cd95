"""Two kernels: sums of a few rows each, side by side; then the weight against its codes, a few rows a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8
from redline.kernels.float8_mean import stride_of

_ROWS, _COLUMNS = 128, 128  # of a program that sums
_OUTPUTS, _INPUTS = 16, 256  # of a program that compares, at a time


def mean_correction(x: Float8, weight: Float8, exact_OI: Tensor) -> Tensor:
    assert x.row is not None
    assert weight.row is not None
    n, width = x.row.shape
    stride = stride_of(n)
    sampled = triton.cdiv(n, stride)
    parts = triton.cdiv(sampled, _ROWS)
    sums = torch.empty((parts, width), device=x.row.device, dtype=torch.float32)
    _sums[(triton.cdiv(width, _COLUMNS), parts)](
        x.row, sums, sampled, stride, WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
    )
    outputs = len(exact_OI)
    found = torch.empty(outputs, device=x.row.device, dtype=torch.bfloat16)
    _lost[(triton.cdiv(outputs, _OUTPUTS),)](
        exact_OI.contiguous(), weight.row, weight.unscale, sums, x.unscale, found, outputs, sampled,
        WIDTH=width, PARTS=parts, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    row, sums, sampled, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (which < sampled)[:, None] & (place < WIDTH)[None, :]
    at = (which * stride).to(tl.int64)[:, None] * WIDTH + place[None, :]
    codes = tl.load(row + at, mask=inside, other=0.0)
    total = tl.sum(codes.to(tl.float32), 0)
    tl.store(sums + tl.program_id(1) * WIDTH + place, total, mask=place < WIDTH)


@triton.jit
def _lost(  # type: ignore[no-untyped-def]
    exact, row, unscale, sums, x_unscale, found, outputs, sampled,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    times = tl.load(unscale)
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, WIDTH, INPUTS):
        place = start + tl.arange(0, INPUTS)
        inside = (out < outputs)[:, None] & (place < WIDTH)[None, :]
        at = out.to(tl.int64)[:, None] * WIDTH + place[None, :]
        wide = tl.load(exact + at, mask=inside, other=0.0).to(tl.float32)
        rounded = tl.load(row + at, mask=inside, other=0.0).to(tl.float32) * times
        mean = tl.zeros([INPUTS], tl.float32)
        for part in tl.static_range(PARTS):
            mean += tl.load(sums + part * WIDTH + place, mask=place < WIDTH, other=0.0)
        total += (wide - rounded) * mean[None, :]
    whole = tl.sum(total, 1) * (tl.load(x_unscale) / sampled)
    tl.store(found + out, whole.to(found.dtype.element_ty), mask=out < outputs)
