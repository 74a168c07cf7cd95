"""The decoder's blocks with their backward written out: few kernels, each value read and written once.

The stream between blocks is a pair (residual, delta) whose sum is what a plain block would pass on; the sum is made
together with the norm that follows. Attention keeps its own autograd graph, so every back-end works here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.kernels.matmul import weight_gradient
from redline.kernels.rms_norm import add_rms_norm, rms_norm_backward
from redline.kernels.rotary import merge_rotated_gradients, rotate_qkv_
from redline.kernels.swiglu import swiglu, swiglu_backward_
from redline.models.layers import Block, RMSNorm
from redline.plan.shapes import DecoderShape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


def run_blocks(
    blocks: list[Block], norm: RMSNorm, x_BTD: Tensor, cos: Tensor, sin: Tensor, attend: Attend, shape: DecoderShape
) -> Tensor:
    """Hidden states after the final norm."""
    heads = _Heads(shape.heads, shape.kv_heads, shape.head_dim)
    residual, delta = x_BTD, None
    for block in blocks:
        residual, delta = _FusedBlock.apply(
            residual,
            delta,
            (cos, sin, attend, heads, block.attention_norm.eps),
            block.attention_norm.weight,
            block.attention.qkv.weight,
            block.attention.out.weight,
            block.mlp_norm.weight,
            block.mlp.up.weight,
            block.mlp.down.weight,
        )
    hidden: Tensor = _FusedNorm.apply(residual, delta, norm.weight, norm.eps)
    return hidden


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual_BTD: Tensor,
        delta_BTD: Tensor | None,
        how: tuple[Tensor, Tensor, Attend, _Heads, float],
        attention_norm: Tensor,
        qkv_weight: Tensor,
        out_weight: Tensor,
        mlp_norm: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        cos, sin, attend, heads, eps = how
        B, T, D = residual_BTD.shape
        wide = residual_BTD.dtype
        w_qkv, w_out, w_up, w_down = (w.to(wide) for w in (qkv_weight, out_weight, up_weight, down_weight))

        x1, n1, r1 = add_rms_norm(_rows(residual_BTD), _rows(delta_BTD), attention_norm, eps)
        qkv = (n1 @ w_qkv.T).view(B, T, -1)
        rotate_qkv_(qkv, cos, sin, *heads)
        q, k, v = _split(qkv, heads)
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            q, k, v = (x.detach().requires_grad_(torch.is_grad_enabled()) for x in (q, k, v))
            attended = attend(q, k, v)
        o = attended.detach().transpose(1, 2).reshape(B * T, -1)
        x2, n2, r2 = add_rms_norm(x1, o @ w_out.T, mlp_norm, eps)
        h = n2 @ w_up.T
        s = swiglu(h)
        y = s @ w_down.T

        weights = (attention_norm, mlp_norm, w_qkv, w_out, w_up, w_down)
        ctx.save_for_backward(x1, n1, r1, o, x2, n2, r2, h, s, cos, sin, *weights)
        ctx.attention = (q, k, v, attended)
        ctx.first = delta_BTD is None
        return x2.view(B, T, D), y.view(B, T, D)

    @staticmethod
    def backward(ctx: Any, grad_x2: Tensor, grad_y: Tensor) -> Any:
        x1, n1, r1, o, x2, n2, r2, h, s, cos, sin, *weights = ctx.saved_tensors
        attention_norm, mlp_norm, w_qkv, w_out, w_up, w_down = weights
        q, k, v, attended = ctx.attention
        del ctx.attention  # its graph goes with this pass
        B, H, T, K = q.shape
        g_x2, g_y = _rows(grad_x2), _rows(grad_y)

        g_down = weight_gradient(g_y, s)
        g_h = swiglu_backward_(g_y @ w_down, h)
        g_up = weight_gradient(g_h, n2)
        g_x, g_mlp_norm = rms_norm_backward(g_h @ w_up, x2, r2, mlp_norm, g_x2)

        g_out = weight_gradient(g_x, o)
        g_o = (g_x @ w_out).view(B, T, H, K).transpose(1, 2)
        g_q, g_k, g_v = torch.autograd.grad(attended, (q, k, v), g_o)
        g_qkv = merge_rotated_gradients(g_q, g_k, g_v, cos, sin).view(B * T, -1)
        g_w_qkv = weight_gradient(g_qkv, n1)
        g_x, g_attention_norm = rms_norm_backward(g_qkv @ w_qkv, x1, r1, attention_norm, g_x)

        g_stream = g_x.view_as(grad_x2)
        g_delta = None if ctx.first else g_stream
        return g_stream, g_delta, None, g_attention_norm, g_w_qkv, g_out, g_mlp_norm, g_up, g_down


class _FusedNorm(torch.autograd.Function):
    """The last sum and norm."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, normed, rstd = add_rms_norm(_rows(residual), _rows(delta), weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        return normed.view_as(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        g_x, g_weight = rms_norm_backward(_rows(grad), x, rstd, weight, None)
        g_stream = g_x.view_as(grad)
        return g_stream, g_stream, g_weight, None


def _rows(x: Any) -> Any:
    return None if x is None else x.reshape(-1, x.shape[-1])


def _split(qkv_BTW: Tensor, heads: _Heads) -> tuple[Tensor, ...]:
    """Queries, keys and values as [B, H, T, K] views."""
    B, T, _ = qkv_BTW.shape
    each = qkv_BTW.view(B, T, heads.heads + 2 * heads.kv_heads, heads.head_dim)
    return tuple(x.transpose(1, 2) for x in each.split((heads.heads, heads.kv_heads, heads.kv_heads), 2))
