"""Muon's kernels: a run of one matrix's values per program, each read and written once.

Gradients and weights are found through a table of their addresses, so that one launch serves a whole batch of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_RUN, _WARPS = 2048, 4  # four 16-byte loads a thread from each float32 operand


def nesterov_(
    gradients: Sequence[Tensor], momentum_NRC: Tensor, divisor: Tensor, bad: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    count, size = momentum_NRC.shape[0], momentum_NRC[0].numel()
    gradients = [gradient.contiguous() for gradient in gradients]
    table, aligned = _addresses(gradients)
    total = torch.empty_like(momentum_NRC, dtype=torch.bfloat16)
    runs = triton.cdiv(size, _RUN)
    squares = torch.empty((count, runs), device=momentum_NRC.device)  # summed in one order, whichever program is first
    _nesterov[(runs, count)](
        table, momentum_NRC, total, squares, divisor, bad, beta, size, ALIGNED=aligned, RUN=_RUN, num_warps=_WARPS
    )
    return total, squares.sum(-1)


def descend_(
    weights: Sequence[Tensor],
    update_NRC: Tensor,
    scales_NR: Tensor | None,
    bad: Tensor,
    *,
    rate: float,
    decay: float,
    cautious: bool,
) -> None:
    assert all(weight.is_contiguous() for weight in weights), "written in place"
    count, size = update_NRC.shape[0], update_NRC[0].numel()
    table, aligned = _addresses(weights)
    _descend[(triton.cdiv(size, _RUN), count)](
        table,
        update_NRC,
        update_NRC if scales_NR is None else scales_NR,
        bad,
        rate,
        decay,
        size,
        COLUMNS=update_NRC.shape[2],
        SCALED=scales_NR is not None,
        CAUTIOUS=cautious,
        ALIGNED=aligned,
        RUN=_RUN,
        num_warps=_WARPS,
    )


def _addresses(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Where they are, as the device reads it, and whether all may be read 16 bytes at a time."""
    device, numbers = tensors[0].device, [tensor.data_ptr() for tensor in tensors]
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), all(number % 16 == 0 for number in numbers)


@triton.jit
def _matrix(table, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program's matrix."""
    matrix = tl.load(table + tl.program_id(1)).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        matrix = tl.multiple_of(matrix, 16)
    return matrix


@triton.jit
def _written(bad, size):  # type: ignore[no-untyped-def]
    """How many of a matrix's values may change."""
    return tl.where(tl.load(bad) > 0.0, 0, size)


@triton.jit
def _nesterov(  # type: ignore[no-untyped-def]
    table, momentum, total, squares, divisor, bad, beta, size, ALIGNED: tl.constexpr, RUN: tl.constexpr
):
    program, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = program * RUN + tl.arange(0, RUN)
    inside = at < size
    gradient = tl.load(_matrix(table, ALIGNED) + at, mask=inside, other=0.0) * (1.0 / tl.load(divisor))
    before = tl.load(momentum + member * size + at, mask=inside, other=0.0)
    moved = before + (1.0 - beta) * (gradient - before)
    tl.store(momentum + member * size + at, moved, mask=at < _written(bad, size))
    ahead = gradient + beta * (moved - gradient)
    tl.store(total + member * size + at, ahead.to(total.dtype.element_ty), mask=inside)
    tl.store(squares + member * tl.num_programs(0) + program, tl.sum(ahead * ahead))


@triton.jit
def _descend(  # type: ignore[no-untyped-def]
    table,
    update,
    scales,
    bad,
    rate,
    decay,
    size,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUN: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * RUN + tl.arange(0, RUN)
    inside = at < size
    weight = _matrix(table, ALIGNED) + at
    change = tl.load(update + member * size + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(weight, mask=inside, other=0.0)
    kept = before * (1.0 - decay)
    if CAUTIOUS:
        kept = tl.where(before * change >= 0.0, kept, before)
    if SCALED:
        change *= tl.load(scales + member * (size // COLUMNS) + at // COLUMNS, mask=inside, other=0.0)
    tl.store(weight, kept - rate * change, mask=at < _written(bad, size))
