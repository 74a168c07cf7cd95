"""The kernels of the activations, SwiGLU and squared ReLU, in the compute precision and to fp8.

In the compute precision each value is read and written once. To fp8, the kernels are made of the parts in float8.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.triton.float8 import (
    OperandBuffer,
    Tile,
    finite_or_nan,
    grid_and_tile,
    load_quarters,
    magnitude,
    place_of,
    raise_amax,
    store_tile,
)

# Tiles of the fp8 kernels: 16-byte loads, several of them in flight, no spilled registers, and whole 128-byte lines in
# the transposed layout where registers allow it.
TILES = {
    "swiglu": Tile(128, 64, 8),
    "swiglu_backward": Tile(64, 64, 4),
    "relu2": Tile(128, 64, 8),  # of both directions
}

# ----------------------------------------------------------------------------------------------------
# SwiGLU in the compute precision.


_SWIGLU_VALUES, _SWIGLU_WARPS = 2048, 4  # of a tile: two 16-byte loads a thread from each half-precision operand


def swiglu(h_N2F: Tensor) -> Tensor:
    h = h_N2F.contiguous()
    n, width = h.shape[0], h.shape[1] // 2
    out = torch.empty((n, width), device=h.device, dtype=h.dtype)
    rows, columns = _swiglu_tile(width)
    grid = (triton.cdiv(n, rows) * triton.cdiv(width, columns),)
    _swiglu[grid](h, out, n, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=_SWIGLU_WARPS)
    return out


def swiglu_backward_(grad_s_NF: Tensor, h_N2F: Tensor) -> Tensor:
    assert h_N2F.is_contiguous(), "written in place"
    n, width = grad_s_NF.shape
    rows, columns = _swiglu_tile(width)
    grid = (triton.cdiv(n, rows) * triton.cdiv(width, columns),)
    _swiglu_backward[grid](
        grad_s_NF.contiguous(), h_N2F, n, WIDTH=width, ROWS=rows, COLUMNS=columns, num_warps=_SWIGLU_WARPS
    )
    return h_N2F


def _swiglu_tile(width: int) -> tuple[int, int]:
    """Return rows and columns of a tile: the widest power of two that divides the width, so that no lane is idle."""
    columns = min(width & -width, 1024)
    if columns < 128:  # too narrow for wide loads: take a wider tile, and mask the last one of a row
        columns = min(triton.next_power_of_2(width), 512)
    return max(1, _SWIGLU_VALUES // columns), columns


@triton.jit
def _place(n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return row and column numbers of this program's tile, and which of them exist."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = ((program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((program % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < n) & (column < WIDTH)


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    h, out, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _place(n, WIDTH, ROWS, COLUMNS)
    at = h + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * WIDTH + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    grad_s, h, n, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _place(n, WIDTH, ROWS, COLUMNS)
    at = h + row * (2 * WIDTH) + column
    grad = tl.load(grad_s + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(at, grad_gate.to(h.dtype.element_ty), mask=inside)
    tl.store(at + WIDTH, (grad * gate * sigmoid).to(h.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------
# SwiGLU to fp8.


def swiglu8(h_N2F: Tensor, scale: Scale) -> Float8:
    h = h_N2F.contiguous()
    n, width = h.shape[0], h.shape[1] // 2
    out = OperandBuffer(n, width, scale)
    grid, tile = grid_and_tile(TILES["swiglu"], n, width)
    _swiglu8[grid](h, *out.pointers, n, WIDTH=width, **out.flags, **tile)
    return out.operand()


def swiglu_backward8(grad_s_NF: Tensor, h_N2F: Tensor, scale: Scale) -> Float8:
    grad_s, h = grad_s_NF.contiguous(), h_N2F.contiguous()
    n, width = grad_s.shape
    out = OperandBuffer(n, 2 * width, scale)
    grid, tile = grid_and_tile(TILES["swiglu_backward"], n, width)
    _swiglu_backward8[grid](grad_s, h, *out.pointers, n, WIDTH=width, **out.flags, **tile)
    return out.operand()


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """Return the sigmoid as the square of a reciprocal root: two instructions, where a division takes five.

    The error is about 2⁻²², far less than the rounding to fp8.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _gated(gate, up):  # type: ignore[no-untyped-def]
    """Return silu(gate)·up."""
    gate = gate.to(tl.float32)
    return finite_or_nan(gate * _sigmoid(gate) * up.to(tl.float32))


@triton.jit
def _swiglu8(  # type: ignore[no-untyped-def]
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
    """Return the gradients of gate and up."""
    gate = gate.to(tl.float32)
    sigmoid = _sigmoid(gate)
    along = grad.to(tl.float32) * sigmoid
    grad_gate = along * up.to(tl.float32) * (1.0 + gate * (1.0 - sigmoid))
    return finite_or_nan(grad_gate), finite_or_nan(along * gate)


@triton.jit
def _swiglu_backward8(  # type: ignore[no-untyped-def]
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
# Squared ReLU, in the compute precision and to fp8.


_RELU2_VALUES, _RELU2_WARPS = 4096, 4  # of one program: four 16-byte loads a thread from each half-precision operand


def relu2(h_NF: Tensor) -> Tensor:
    h = h_NF.contiguous()
    out = torch.empty_like(h)
    _relu2[(triton.cdiv(h.numel(), _RELU2_VALUES),)](h, out, h.numel(), VALUES=_RELU2_VALUES, num_warps=_RELU2_WARPS)
    return out


def relu2_backward_(grad_s_NF: Tensor, h_NF: Tensor) -> Tensor:
    assert h_NF.is_contiguous(), "written in place"
    size = h_NF.numel()
    _relu2_backward[(triton.cdiv(size, _RELU2_VALUES),)](
        grad_s_NF.contiguous(), h_NF, size, VALUES=_RELU2_VALUES, num_warps=_RELU2_WARPS
    )
    return h_NF


def relu2_8(h_NF: Tensor, scale: Scale) -> Float8:
    h = h_NF.contiguous()
    return _relu2_operand(h, h, scale, back=False)


def relu2_backward8(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale) -> Float8:
    return _relu2_operand(grad_s_NF.contiguous(), h_NF.contiguous(), scale, back=True)


def _relu2_operand(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale, *, back: bool) -> Float8:
    n, width = h_NF.shape
    out = OperandBuffer(n, width, scale)
    grid, tile = grid_and_tile(TILES["relu2"], n, width)
    _relu2_8[grid](grad_s_NF, h_NF, *out.pointers, n, WIDTH=width, BACK=back, **out.flags, **tile)
    return out.operand()


@triton.jit
def _relu(x):  # type: ignore[no-untyped-def]
    """Return relu(x), keeping NaN, which a maximum with zero would turn into zero."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _relu2(h, out, size, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    positive = _relu(tl.load(h + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(out + at, (positive * positive).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _relu2_backward(grad_s, h, size, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    grad = tl.load(grad_s + at, mask=at < size, other=0.0).to(tl.float32)
    positive = _relu(tl.load(h + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(h + at, (positive * grad * 2.0).to(h.dtype.element_ty), mask=at < size)


@triton.jit
def _relu2_value(h):  # type: ignore[no-untyped-def]
    positive = _relu(h.to(tl.float32))
    return finite_or_nan(positive * positive)


@triton.jit
def _relu2_gradient(grad, h):  # type: ignore[no-untyped-def]
    return finite_or_nan(_relu(h.to(tl.float32)) * grad.to(tl.float32) * 2.0)


@triton.jit
def _relu2_8(  # type: ignore[no-untyped-def]
    grad_s, h, row, column, factor, amax, n,
    WIDTH: tl.constexpr, BACK: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make the operand of relu(h)², or with BACK that of the gradient. Without BACK grad_s is not read."""
    group, place = place_of(WIDTH, GROUPS, COLUMNS)
    times = tl.load(factor)
    a, b, c, d = load_quarters(h, group, place, n, WIDTH, place < WIDTH)
    if BACK:
        a_grad, b_grad, c_grad, d_grad = load_quarters(grad_s, group, place, n, WIDTH, place < WIDTH)
        a, b, c, d = (
            _relu2_gradient(a_grad, a),
            _relu2_gradient(b_grad, b),
            _relu2_gradient(c_grad, c),
            _relu2_gradient(d_grad, d),
        )
    else:
        a, b, c, d = _relu2_value(a), _relu2_value(b), _relu2_value(c), _relu2_value(d)
    store_tile((a, b, c, d), (row, column, times), group, place, n, WIDTH, place < WIDTH, COLUMN)
    if AMAX:
        raise_amax(amax, magnitude((a, b, c, d)))
