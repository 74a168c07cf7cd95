"""The kernels that add a weighted skip connection, and its gradients: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.dispatch import sm_count

_VALUES, _WARPS = 4096, 8  # values of one program at a time, and its warps
# The programs of the backward stay on their multiprocessor and accumulate the weight's gradient; so many on each.
_PROGRAMS_PER_SM = 8


def add_skip(x: Tensor, delta: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    x, delta, state = x.contiguous(), delta.contiguous(), state.contiguous()
    out = torch.empty_like(x)
    _forward[(triton.cdiv(x.numel(), _VALUES),)](
        x, delta, state, weight, out, x.numel(), BLOCK=_VALUES, num_warps=_WARPS
    )
    return out


def add_skip_backward(grad: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad, state = grad.contiguous(), state.contiguous()
    grad_state, n = torch.empty_like(state), grad.numel()
    programs = min(triton.cdiv(n, _VALUES), _PROGRAMS_PER_SM * sm_count(grad.device))
    partial = torch.empty(programs, device=grad.device, dtype=torch.float32)
    _backward[(programs,)](grad, state, weight, grad_state, partial, n, programs, BLOCK=_VALUES, num_warps=_WARPS)
    return grad_state, partial.sum()  # no atomics: the same sum in the same order every time


@triton.jit
def _forward(x, delta, state, weight, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    first = tl.load(x + at, mask=inside).to(tl.float32)
    second = tl.load(delta + at, mask=inside).to(tl.float32)
    earlier = tl.load(state + at, mask=inside).to(tl.float32)
    value = first + second + tl.load(weight).to(tl.float32) * earlier
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, state, weight, grad_state, partial, n, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(weight).to(tl.float32)
    along = tl.full((BLOCK,), 0.0, tl.float32)
    for group in range(tl.program_id(0), (n + BLOCK - 1) // BLOCK, programs):
        at = tl.cast(group, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        outer = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        along += outer * tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_state + at, (factor * outer).to(grad_state.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0), tl.sum(along))
