"""The rotary kernels: a tile of tokens × heads × pairs per program, each value read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """Tokens, heads and pairs (padded to a power of two) of one program."""
    half = triton.next_power_of_2(pairs)
    block = min(triton.next_power_of_2(heads), max(1, _PAIRS // half))
    return max(1, _PAIRS // (block * half)), block, half


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    source, stride_b, stride_h, stride_t, out, W, cos, sin, direction,
    head_block, heads, tokens, T,
    F: tl.constexpr, TURN: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One tile from source [B, H, T, K] by its strides to out [B·T, heads…], turned in float32."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (head_block * HEADS + tl.arange(0, HEADS))[None, :, None]
    pair = tl.arange(0, HALF)[None, None, :]
    inside = (token < tokens) & (head < heads) & (pair < F)
    position, row = token % T, (token // T).to(tl.int64)
    at = source + row * stride_b + head.to(tl.int64) * stride_h + position.to(tl.int64) * stride_t + pair
    to = out + token.to(tl.int64) * W + head * (2 * F) + pair
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + F, mask=inside, other=0.0)
    if TURN:
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
    _turn(qkv, stride_b, 2 * F, W, qkv, W, cos, sin, 1.0, block, heads, tokens, T, F, True, TOKENS, HEADS, HALF)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, out, cos, sin,
    tokens, T, W, heads, kv_heads, q_blocks, kv_blocks,
    F: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Each program serves queries, keys or values: which, the second grid axis says."""
    block = tl.program_id(1)
    keys, values = out + heads * (2 * F), out + (heads + kv_heads) * (2 * F)
    if block < q_blocks:
        _turn(q, q_b, q_h, q_t, out, W, cos, sin, -1.0, block, heads, tokens, T, F, True, TOKENS, HEADS, HALF)
    elif block < q_blocks + kv_blocks:
        block -= q_blocks
        _turn(k, k_b, k_h, k_t, keys, W, cos, sin, -1.0, block, kv_heads, tokens, T, F, True, TOKENS, HEADS, HALF)
    else:
        block -= q_blocks + kv_blocks
        _turn(v, v_b, v_h, v_t, values, W, cos, sin, -1.0, block, kv_heads, tokens, T, F, False, TOKENS, HEADS, HALF)
