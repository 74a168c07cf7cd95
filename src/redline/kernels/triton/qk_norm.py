"""The kernels of normed and rotated queries and keys: some heads of some tokens per program; each value is read once.

Heads are numbered across all tokens, so that a tile of heads is full however many a token has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.dispatch import sm_count

# rotary pairs in one program's heads: enough 16-byte loads in flight, no spilled registers
_PAIRS = {"forward": 2048, "backward": 1024}
_WARPS = 4
# Programs of the backward stay on their multiprocessor and accumulate the weights' gradients per column; more do not
# fit its registers.
_PROGRAMS_PER_SM = 5


def norm_rotate_qkv(
    qkv_BTW: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    qkv, K = qkv_BTW.contiguous(), len(q_weight_K)
    B, T, _ = qkv.shape
    rotated = torch.empty((B, T, (heads + kv_heads) * K), device=qkv.device, dtype=qkv.dtype)
    rstd = torch.empty((B, T, heads + kv_heads), device=qkv.device, dtype=torch.float32)
    rows, half = _tile(K // 2, _PAIRS["forward"])
    q_groups, k_groups = _groups(B * T, heads, rows), _groups(B * T, kv_heads, rows)
    _forward[(q_groups + k_groups,)](
        qkv, q_weight_K.contiguous(), k_weight_K.contiguous(), cos_TF.contiguous(), sin_TF.contiguous(), rotated, rstd,
        B * T, T, q_groups, eps,
        HEADS=heads, KV_HEADS=kv_heads, F=K // 2, ROWS=rows, HALF=half, num_warps=_WARPS,
    )  # fmt: skip
    return rotated, rstd


def norm_rotate_backward(
    grad_q_BHTK: Tensor,
    grad_k_BHTK: Tensor,
    grad_v_BHTK: Tensor,
    qkv_BTW: Tensor,
    rstd_BTH: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    B, heads, T, K = q.shape
    kv_heads, qkv = k.shape[1], qkv_BTW.contiguous()
    rows, half = _tile(K // 2, _PAIRS["backward"])
    programs = min(_groups(B * T, heads, rows), sm_count(q.device) * _PROGRAMS_PER_SM)
    grad = torch.empty_like(qkv)
    partial = torch.empty((programs, 2, K), device=q.device, dtype=torch.float32)
    _backward[(programs,)](
        q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], qkv, rstd_BTH.contiguous(),
        q_weight_K.contiguous(), k_weight_K.contiguous(), cos_TF.contiguous(), sin_TF.contiguous(), grad, partial,
        B * T, T, programs,
        HEADS=heads, KV_HEADS=kv_heads, F=K // 2, ROWS=rows, HALF=half, num_warps=_WARPS,
    )  # fmt: skip
    q_weight, k_weight = partial.sum(0).unbind()  # no atomics: added in the same order every time
    return grad, q_weight, k_weight


def _tile(pairs: int, most: int) -> tuple[int, int]:
    """Return the heads of one program, and their pairs padded to a power of two."""
    half = triton.next_power_of_2(pairs)
    return max(1, most // half), half


def _groups(tokens: int, heads: int, rows: int) -> int:
    """Return how many groups of `rows` heads there are."""
    assert tokens * heads < 2**31 - rows, "heads are counted in 32 bits"
    return triton.cdiv(tokens * heads, rows)


@triton.jit
def _place(group, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return for each head of a group its token, its number within the token, and whether it exists."""
    row = group * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    return token, row - token * HEADS, row < tokens * HEADS


@triton.jit
def _offset(token, head, T, stride_b, stride_h, stride_t):  # type: ignore[no-untyped-def]
    """Return the offsets of the heads in a tensor [B, H, T, K], as a column."""
    batch, position = (token // T).to(tl.int64), (token % T).to(tl.int64)
    return (batch * stride_b + head.to(tl.int64) * stride_h + position * stride_t)[:, None]


@triton.jit
def _angles(cos, sin, position, pair, inside, F: tl.constexpr):  # type: ignore[no-untyped-def]
    at = (position * F)[:, None] + pair
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _gains(weight, pair, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the two halves of a norm's weight."""
    a = tl.load(weight + pair, mask=pair < F, other=0.0)
    b = tl.load(weight + F + pair, mask=pair < F, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    group, qkv, weight, cos, sin, out, rstd, tokens, T, eps,
    HEADS: tl.constexpr, W: tl.constexpr, NORMED: tl.constexpr,
    F: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one group of heads. qkv, out [B·T, NORMED heads] and rstd point at the first head of their kind
    (queries or keys).
    """
    token, head, exists = _place(group, tokens, HEADS, ROWS)
    pair = tl.arange(0, HALF)[None, :]
    inside = exists[:, None] & (pair < F)
    at = qkv + (token.to(tl.int64) * W + head * (2 * F))[:, None] + pair
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    c, s = _angles(cos, sin, token % T, pair, inside, F)
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * F) + eps)
    tl.store(rstd + token.to(tl.int64) * NORMED + head, scale, mask=exists)
    dtype = out.dtype.element_ty
    a_gain, b_gain = _gains(weight, pair, F)
    a = (a * scale[:, None] * a_gain).to(dtype).to(tl.float32)
    b = (b * scale[:, None] * b_gain).to(dtype).to(tl.float32)
    to = out + (token.to(tl.int64) * (NORMED * 2 * F) + head * (2 * F))[:, None] + pair
    tl.store(to, (a * c - b * s).to(dtype), mask=inside)
    tl.store(to + F, (b * c + a * s).to(dtype), mask=inside)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, cos, sin, out, rstd, tokens, T, q_groups, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm and rotate: each program serves queries or keys."""
    W: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * F
    NORMED: tl.constexpr = HEADS + KV_HEADS
    group = tl.program_id(0)
    if group < q_groups:
        _norm_and_rotate(group, qkv, q_weight, cos, sin, out, rstd, tokens, T, eps, HEADS, W, NORMED, F, ROWS, HALF)
    else:
        _norm_and_rotate(
            group - q_groups, qkv + HEADS * 2 * F, k_weight, cos, sin, out + HEADS * 2 * F, rstd + HEADS,
            tokens, T, eps, KV_HEADS, W, NORMED, F, ROWS, HALF,
        )  # fmt: skip


@triton.jit
def _rotate_and_norm_backward(  # type: ignore[no-untyped-def]
    grad, stride_b, stride_h, stride_t, qkv, rstd, weight, cos, sin, out, partial, tokens, T, programs,
    HEADS: tl.constexpr, W: tl.constexpr, NORMED: tl.constexpr,
    F: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute this program's share of the heads of one kind (queries or keys), and of the gradient of their weight."""
    pair = tl.arange(0, HALF)[None, :]
    a_gain, b_gain = _gains(weight, pair, F)
    a_total = tl.full((ROWS, HALF), 0.0, tl.float32)
    b_total = tl.full((ROWS, HALF), 0.0, tl.float32)
    for group in range(tl.program_id(0), (tokens * HEADS + ROWS - 1) // ROWS, programs):
        token, head, exists = _place(group, tokens, HEADS, ROWS)
        inside = exists[:, None] & (pair < F)
        source = grad + _offset(token, head, T, stride_b, stride_h, stride_t) + pair
        at = (token.to(tl.int64) * W + head * (2 * F))[:, None] + pair
        a_grad = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b_grad = tl.load(source + F, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + token.to(tl.int64) * NORMED + head, mask=exists, other=0.0)[:, None]
        a = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32) * scale
        b = tl.load(qkv + at + F, mask=inside, other=0.0).to(tl.float32) * scale
        c, s = _angles(cos, sin, token % T, pair, inside, F)
        # the transpose of a rotation is the rotation by the negative angle
        a_grad, b_grad = a_grad * c + b_grad * s, b_grad * c - a_grad * s
        a_total += a_grad * a
        b_total += b_grad * b
        a_grad, b_grad = a_grad * a_gain, b_grad * b_gain
        along = tl.sum(a_grad * a + b_grad * b, 1)[:, None] / (2 * F)
        tl.store(out + at, (scale * (a_grad - a * along)).to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + F, (scale * (b_grad - b * along)).to(out.dtype.element_ty), mask=inside)
    column = tl.arange(0, HALF)
    slot = partial + tl.program_id(0).to(tl.int64) * (4 * F) + column
    tl.store(slot, tl.sum(a_total, 0), mask=column < F)
    tl.store(slot + F, tl.sum(b_total, 0), mask=column < F)


@triton.jit
def _copy_values(  # type: ignore[no-untyped-def]
    grad, stride_b, stride_h, stride_t, out, tokens, T, programs,
    HEADS: tl.constexpr, W: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, HALF)[None, :]
    for group in range(tl.program_id(0), (tokens * HEADS + ROWS - 1) // ROWS, programs):
        token, head, exists = _place(group, tokens, HEADS, ROWS)
        inside = exists[:, None] & (pair < F)
        source = grad + _offset(token, head, T, stride_b, stride_h, stride_t) + pair
        to = out + (token.to(tl.int64) * W + head * (2 * F))[:, None] + pair
        a = tl.load(source, mask=inside, other=0.0)
        b = tl.load(source + F, mask=inside, other=0.0)
        tl.store(to, a.to(out.dtype.element_ty), mask=inside)
        tl.store(to + F, b.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    q, q_b, q_h, q_t, k, k_b, k_h, k_t, v, v_b, v_h, v_t, qkv, rstd, q_weight, k_weight, cos, sin, out, partial,
    tokens, T, programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Give each program a share of the queries, then of the keys, then of the values, so that all have equal work."""
    W: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * F
    NORMED: tl.constexpr = HEADS + KV_HEADS
    keys: tl.constexpr = HEADS * 2 * F
    _rotate_and_norm_backward(
        q, q_b, q_h, q_t, qkv, rstd, q_weight, cos, sin, out, partial, tokens, T, programs,
        HEADS, W, NORMED, F, ROWS, HALF,
    )  # fmt: skip
    _rotate_and_norm_backward(
        k, k_b, k_h, k_t, qkv + keys, rstd + HEADS, k_weight, cos, sin, out + keys, partial + 2 * F,
        tokens, T, programs, KV_HEADS, W, NORMED, F, ROWS, HALF,
    )  # fmt: skip
    _copy_values(v, v_b, v_h, v_t, out + NORMED * 2 * F, tokens, T, programs, KV_HEADS, W, F, ROWS, HALF)
