"""Sums of a few rows each, side by side; then the weight against what it is rounded to, along rows or columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8
from redline.kernels.float8_mean import stride_of

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
