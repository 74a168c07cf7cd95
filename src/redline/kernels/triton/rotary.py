"""The rotary kernels: a tile of tokens × heads × pairs per program; each value is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.triton.float8 import (
    WORD,
    OperandBuffer,
    Tile,
    finite_or_nan,
    magnitude,
    raise_amax,
    store_tile,
    tile_side,
)

_PAIRS = 2048  # of one program: with four warps, two 16-byte loads a thread from each half of the heads
_WARPS = 4


def rotate_qkv_(qkv_BTW: Tensor, cos_TF: Tensor, sin_TF: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    assert qkv_BTW.is_contiguous(), "written in place"
    B, T, W = qkv_BTW.shape
    tokens, block, half = _tile(heads + kv_heads, head_dim // 2)
    grid = (triton.cdiv(B * T, tokens), triton.cdiv(heads + kv_heads, block))
    _rotate[grid](
        qkv_BTW, qkv_BTW.stride(0), cos_TF.contiguous(), sin_TF.contiguous(), B * T, T, W, heads + kv_heads,
        F=head_dim // 2, TOKENS=tokens, HEADS=block, HALF=half, num_warps=_WARPS,
    )  # fmt: skip


def merge_rotated_gradients(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor
) -> Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    B, heads, T, K = q.shape
    kv_heads = k.shape[1]
    W = (heads + 2 * kv_heads) * K
    out = torch.empty((B, T, W), device=q.device, dtype=q.dtype)
    tokens, block, half = _tile(heads, K // 2)
    q_blocks, kv_blocks = triton.cdiv(heads, block), triton.cdiv(kv_heads, block)
    _merge[(triton.cdiv(B * T, tokens), q_blocks + 2 * kv_blocks)](
        q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], out, cos_TF.contiguous(), sin_TF.contiguous(),
        B * T, T, W, heads, kv_heads, q_blocks, kv_blocks,
        F=K // 2, TOKENS=tokens, HEADS=block, HALF=half, num_warps=_WARPS,
    )  # fmt: skip
    return out


def _tile(heads: int, pairs: int) -> tuple[int, int, int]:
    """Return tokens, heads and pairs (padded to a power of two) of one program's tile."""
    half = triton.next_power_of_2(pairs)
    block = min(triton.next_power_of_2(heads), max(1, _PAIRS // half))
    return max(1, _PAIRS // (block * half)), block, half


@triton.jit
def _rotate_tile(  # type: ignore[no-untyped-def]
    source, stride_b, stride_h, stride_t, out, W, cos, sin, direction,
    head_block, heads, tokens, T,
    F: tl.constexpr, ROTATE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Copy one tile from source [B, H, T, K], by its strides, to out [B·T, heads…], rotated in float32 if ROTATE.

    `direction` is 1.0 for the rotation and -1.0 for its inverse.
    """
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (head_block * HEADS + tl.arange(0, HEADS))[None, :, None]
    pair = tl.arange(0, HALF)[None, None, :]
    inside = (token < tokens) & (head < heads) & (pair < F)
    position, row = token % T, (token // T).to(tl.int64)
    at = source + row * stride_b + head.to(tl.int64) * stride_h + position.to(tl.int64) * stride_t + pair
    to = out + token.to(tl.int64) * W + head * (2 * F) + pair
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + F, mask=inside, other=0.0)
    if ROTATE:
        angle = tl.broadcast_to(position * F + pair, (TOKENS, HEADS, HALF))
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0) * direction
        a_wide, b_wide = a.to(tl.float32), b.to(tl.float32)
        a, b = a_wide * c - b_wide * s, b_wide * c + a_wide * s
    tl.store(to, a.to(out.dtype.element_ty), mask=inside)
    tl.store(to + F, b.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    qkv, stride_b, cos, sin, tokens, T, W, heads,
    F: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    _rotate_tile(qkv, stride_b, 2 * F, W, qkv, W, cos, sin, 1.0, block, heads, tokens, T, F, True, TOKENS, HEADS, HALF)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, out, cos, sin,
    tokens, T, W, heads, kv_heads, q_blocks, kv_blocks,
    F: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Merge the gradients. The second grid axis says whether a program serves queries, keys or values."""
    block = tl.program_id(1)
    keys, values = out + heads * (2 * F), out + (heads + kv_heads) * (2 * F)
    if block < q_blocks:
        _rotate_tile(q, q_b, q_h, q_t, out, W, cos, sin, -1.0, block, heads, tokens, T, F, True, TOKENS, HEADS, HALF)
    elif block < q_blocks + kv_blocks:
        block -= q_blocks
        _rotate_tile(
            k, k_b, k_h, k_t, keys, W, cos, sin, -1.0, block, kv_heads, tokens, T, F, True, TOKENS, HEADS, HALF
        )
    else:
        block -= q_blocks + kv_blocks
        _rotate_tile(
            v, v_b, v_h, v_t, values, W, cos, sin, -1.0, block, kv_heads, tokens, T, F, False, TOKENS, HEADS, HALF
        )


# ----------------------------------------------------------------------------------------------------
# The gradients of rotated queries, keys and values, merged into one fp8 operand.


TILE = Tile(64, 64, 4)  # its columns are pairs of one or several heads


def merge_rotated_gradients8(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor, scale: Scale
) -> Float8:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    B, heads, T, K = q.shape
    kv_heads = k.shape[1]
    W = (heads + 2 * kv_heads) * K
    out = OperandBuffer(B * T, W, scale)
    half = triton.next_power_of_2(K // 2)
    heads_per_program = max(1, TILE.columns // half)
    groups = tile_side(TILE.tokens, B * T) // WORD.value
    q_blocks, kv_blocks = triton.cdiv(heads, heads_per_program), triton.cdiv(kv_heads, heads_per_program)
    _merge_float8[(triton.cdiv(B * T, groups * WORD.value), q_blocks + 2 * kv_blocks)](
        q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], cos_TF.contiguous(), sin_TF.contiguous(),
        *out.pointers, B * T, T, W, heads, kv_heads, q_blocks, kv_blocks,
        F=K // 2, **out.flags, GROUPS=groups, HALF=half, HEADS=heads_per_program, num_warps=TILE.warps,
    )  # fmt: skip
    return out.operand()


@triton.jit
def _quarter(what, where, quarter, ROTATE: tl.constexpr, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load both halves of the heads of every fourth token, with their cosines and sines (1 and 0 without ROTATE)."""
    source, stride_b, stride_h, stride_t, cos, sin = what
    group, head, pair, exists, n, T = where
    token = group * WORD + quarter
    inside = (token < n)[:, None] & exists[None, :]
    position = token % T
    start = (token // T).to(tl.int64) * stride_b + position.to(tl.int64) * stride_t
    at = source + start[:, None] + (head.to(tl.int64) * stride_h + pair)[None, :]
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + F, mask=inside, other=0.0)
    c, s = 1.0, 0.0
    if ROTATE:
        angle = position[:, None] * F + pair[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
    return a, b, c, s


@triton.jit
def _rotated_back(a, b, c, s, ROTATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return both halves rotated by the negative angle."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    if ROTATE:
        a, b = a * c + b * s, b * c - a * s
    return finite_or_nan(a), finite_or_nan(b)


@triton.jit
def _rotate_back(  # type: ignore[no-untyped-def]
    source, stride_b, stride_h, stride_t, first_column, heads, block, cos, sin, row, column, factor, amax, n, T, W,
    ROTATE: tl.constexpr, F: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store a few heads of source [B, H, T, K] for a tile of tokens as fp8 codes, rotated back if ROTATE."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    head = block * HEADS + tl.arange(0, HEADS * HALF) // HALF
    pair = tl.arange(0, HEADS * HALF) % HALF
    exists = (head < heads) & (pair < F)
    place = first_column + head * (2 * F) + pair
    times = tl.load(factor)
    what = (source, stride_b, stride_h, stride_t, cos, sin)
    where = (group, head, pair, exists, n, T)
    a, a_next, a_cos, a_sin = _quarter(what, where, 0, ROTATE, F)
    b, b_next, b_cos, b_sin = _quarter(what, where, 1, ROTATE, F)
    c, c_next, c_cos, c_sin = _quarter(what, where, 2, ROTATE, F)
    d, d_next, d_cos, d_sin = _quarter(what, where, 3, ROTATE, F)
    a, a_next = _rotated_back(a, a_next, a_cos, a_sin, ROTATE)
    b, b_next = _rotated_back(b, b_next, b_cos, b_sin, ROTATE)
    c, c_next = _rotated_back(c, c_next, c_cos, c_sin, ROTATE)
    d, d_next = _rotated_back(d, d_next, d_cos, d_sin, ROTATE)
    first, second, out = (a, b, c, d), (a_next, b_next, c_next, d_next), (row, column, times)
    store_tile(first, out, group, place, n, W, exists, COLUMN)
    store_tile(second, out, group, F + place, n, W, exists, COLUMN)
    if AMAX:
        raise_amax(amax, tl.maximum(magnitude(first), magnitude(second)))


@triton.jit
def _merge_float8(  # type: ignore[no-untyped-def]
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, cos, sin, row, column, factor, amax,
    n, T, W, heads, kv_heads, q_blocks, kv_blocks,
    F: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the gradients. The second grid axis says whether a program serves queries, keys or values."""
    block = tl.program_id(1)
    keys = heads * (2 * F)
    values = keys + kv_heads * (2 * F)
    if block < q_blocks:
        _rotate_back(
            q, q_b, q_h, q_t, 0, heads, block, cos, sin, row, column, factor, amax, n, T, W,
            True, F, COLUMN, AMAX, GROUPS, HALF, HEADS,
        )  # fmt: skip
    elif block < q_blocks + kv_blocks:
        _rotate_back(
            k, k_b, k_h, k_t, keys, kv_heads, block - q_blocks, cos, sin, row, column, factor, amax, n, T, W,
            True, F, COLUMN, AMAX, GROUPS, HALF, HEADS,
        )  # fmt: skip
    else:
        block -= q_blocks + kv_blocks
        _rotate_back(
            v, v_b, v_h, v_t, values, kv_heads, block, cos, sin, row, column, factor, amax, n, T, W,
            False, F, COLUMN, AMAX, GROUPS, HALF, HEADS,
        )  # fmt: skip
