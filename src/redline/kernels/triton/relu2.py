"""The squared ReLU's kernels: in half precision a run of values per program, in fp8 a tile as in float8_triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.triton.float8 import (
    WORD,
    Made,
    Tile,
    finite_or_nan,
    fitting,
    load_quarters,
    magnitude,
    place_of,
    raise_amax,
    store_tile,
)

_RUN, _WARPS = 4096, 4  # four 16-byte loads a thread from each half-precision operand
TILE = Tile(128, 64, 8)  # of both fp8 kernels: whole 128-byte lines in a column, no spilled registers


def relu2(h_NF: Tensor) -> Tensor:
    h = h_NF.contiguous()
    out = torch.empty_like(h)
    _forward[(triton.cdiv(h.numel(), _RUN),)](h, out, h.numel(), RUN=_RUN, num_warps=_WARPS)
    return out


def relu2_backward_(grad_s_NF: Tensor, h_NF: Tensor) -> Tensor:
    assert h_NF.is_contiguous(), "written in place"
    size = h_NF.numel()
    _backward[(triton.cdiv(size, _RUN),)](grad_s_NF.contiguous(), h_NF, size, RUN=_RUN, num_warps=_WARPS)
    return h_NF


def relu2_8(h_NF: Tensor, scale: Scale) -> Float8:
    h = h_NF.contiguous()
    return _made(h, h, scale, back=False)


def relu2_backward8(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale) -> Float8:
    return _made(grad_s_NF.contiguous(), h_NF.contiguous(), scale, back=True)


def _made(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale, *, back: bool) -> Float8:
    n, width = h_NF.shape
    out = Made(n, width, scale)
    tokens, columns = fitting(TILE.tokens, n), fitting(TILE.columns, width)
    _to_float8[(triton.cdiv(n, tokens) * triton.cdiv(width, columns),)](
        grad_s_NF, h_NF, *out.pointers, n,
        WIDTH=width, BACK=back, **out.flags, GROUPS=tokens // WORD.value, COLUMNS=columns, num_warps=TILE.warps,
    )  # fmt: skip
    return out.operand()


@triton.jit
def _relu(x):  # type: ignore[no-untyped-def]
    """NaN stays, which a maximum would make zero."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _forward(h, out, size, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    positive = _relu(tl.load(h + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(out + at, (positive * positive).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _backward(grad_s, h, size, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    grad = tl.load(grad_s + at, mask=at < size, other=0.0).to(tl.float32)
    positive = _relu(tl.load(h + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(h + at, (positive * grad * 2.0).to(h.dtype.element_ty), mask=at < size)


@triton.jit
def _square(h):  # type: ignore[no-untyped-def]
    positive = _relu(h.to(tl.float32))
    return finite_or_nan(positive * positive)


@triton.jit
def _gradient(grad, h):  # type: ignore[no-untyped-def]
    return finite_or_nan(_relu(h.to(tl.float32)) * grad.to(tl.float32) * 2.0)


@triton.jit
def _to_float8(  # type: ignore[no-untyped-def]
    grad_s, h, row, column, factor, amax, n,
    WIDTH: tl.constexpr, BACK: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient, or without BACK the square; grad_s is then not touched."""
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, b, c, d = load_quarters(h, group, place, n, WIDTH, place < WIDTH)
    if BACK:
        a_grad, b_grad, c_grad, d_grad = load_quarters(grad_s, group, place, n, WIDTH, place < WIDTH)
        a, b, c, d = _gradient(a_grad, a), _gradient(b_grad, b), _gradient(c_grad, c), _gradient(d_grad, d)
    else:
        a, b, c, d = _square(a), _square(b), _square(c), _square(d)
    store_tile((a, b, c, d), (row, column, times), group, place, n, WIDTH, place < WIDTH, COLUMN)
    if AMAX:
        raise_amax(amax, magnitude((a, b, c, d)))
