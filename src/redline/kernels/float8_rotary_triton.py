"""The gradients of rotated queries, keys and values, merged into one fp8 operand."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.float8_triton import WORD, Made, Tile, finite_or_nan, fitting, raise_amax, store_column, store_row

TILE = Tile(128, 32, 4)  # columns: pairs of one or several heads


def merge_rotated_gradients8(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor, scale: Scale
) -> Float8:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    B, heads, T, K = q.shape
    kv_heads = k.shape[1]
    W = (heads + 2 * kv_heads) * K
    out = Made(B * T, W, scale)
    half = triton.next_power_of_2(K // 2)
    each = max(1, TILE.columns // half)  # heads of a program
    groups = fitting(TILE.tokens, B * T) // WORD.value
    q_blocks, kv_blocks = triton.cdiv(heads, each), triton.cdiv(kv_heads, each)
    _merge[(triton.cdiv(B * T, groups * WORD.value), q_blocks + 2 * kv_blocks)](
        q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], cos_TF.contiguous(), sin_TF.contiguous(),
        *out.pointers, B * T, T, W, heads, kv_heads, q_blocks, kv_blocks,
        F=K // 2, **out.flags, GROUPS=groups, HALF=half, HEADS=each, num_warps=TILE.warps,
    )  # fmt: skip
    return out.operand()


@triton.jit
def _quarter(what, where, row, times, quarter, TURN: tl.constexpr, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of the heads, turned back in float32, as they were rounded; and their magnitude."""
    source, stride_b, stride_h, stride_t, cos, sin = what
    group, head, pair, place, exists, n, T, W = where
    token = group * WORD + quarter
    inside = (token < n)[:, None] & exists[None, :]
    position = token % T
    start = (token // T).to(tl.int64) * stride_b + position.to(tl.int64) * stride_t
    at = source + start[:, None] + (head.to(tl.int64) * stride_h + pair)[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        angle = position[:, None] * F + pair[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        a, b = a * c + b * s, b * c - a * s
    a, b = finite_or_nan(a), finite_or_nan(b)
    size = tl.maximum(tl.abs(a), tl.abs(b))
    a = store_row(a, times, row, token, place, n, W, exists)
    b = store_row(b, times, row, token, F + place, n, W, exists)
    return a, b, size


@triton.jit
def _turn_back(  # type: ignore[no-untyped-def]
    source, stride_b, stride_h, stride_t, first_column, heads, block, cos, sin, row, column, factor, amax, n, T, W,
    TURN: tl.constexpr, F: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A few heads of source [B, H, T, K] for a tile of tokens."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    head = block * HEADS + tl.arange(0, HEADS * HALF) // HALF
    pair = tl.arange(0, HEADS * HALF) % HALF
    exists = (head < heads) & (pair < F)
    place = first_column + head * (2 * F) + pair
    times = tl.load(factor)
    what = (source, stride_b, stride_h, stride_t, cos, sin)
    where = (group, head, pair, place, exists, n, T, W)
    a, a_next, a_size = _quarter(what, where, row, times, 0, TURN, F)
    b, b_next, b_size = _quarter(what, where, row, times, 1, TURN, F)
    c, c_next, c_size = _quarter(what, where, row, times, 2, TURN, F)
    d, d_next, d_size = _quarter(what, where, row, times, 3, TURN, F)
    if COLUMN:
        store_column(a, b, c, d, row, column, group, place, n, exists)
        store_column(a_next, b_next, c_next, d_next, row, column, group, F + place, n, exists)
    if AMAX:
        raise_amax(amax, a_size, b_size, c_size, d_size)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, cos, sin, row, column, factor, amax,
    n, T, W, heads, kv_heads, q_blocks, kv_blocks,
    F: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Each program serves queries, keys or values: which, the second grid axis says."""
    block = tl.program_id(1)
    keys = heads * (2 * F)
    values = keys + kv_heads * (2 * F)
    if block < q_blocks:
        _turn_back(
            q, q_b, q_h, q_t, 0, heads, block, cos, sin, row, column, factor, amax, n, T, W,
            True, F, COLUMN, AMAX, GROUPS, HALF, HEADS,
        )  # fmt: skip
    elif block < q_blocks + kv_blocks:
        _turn_back(
            k, k_b, k_h, k_t, keys, kv_heads, block - q_blocks, cos, sin, row, column, factor, amax, n, T, W,
            True, F, COLUMN, AMAX, GROUPS, HALF, HEADS,
        )  # fmt: skip
    else:
        block -= q_blocks + kv_blocks
        _turn_back(
            v, v_b, v_h, v_t, values, kv_heads, block, cos, sin, row, column, factor, amax, n, T, W,
            False, F, COLUMN, AMAX, GROUPS, HALF, HEADS,
        )  # fmt: skip
