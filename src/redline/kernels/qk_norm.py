"""RMSNorm of each query and key head (arXiv 2010.04245 has the idea), then rotary positions, on merged projections.

One pass each way: the forward norms and rotates the heads; the backward rotates their gradients back, takes them
through the norm, and merges them with those of the values. Pairs are (i, i + K/2), as in Llama checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.dispatch import op
from redline.kernels.rms_norm import add_rms_norm, rms_norm_backward
from redline.kernels.rotary import merge_rotated_gradients, rotate_qkv_


@op(triton="qk_norm:norm_rotate_qkv")
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
    """Return the normed and rotated queries and keys of [B, T, (heads + 2·kv_heads)·K], side by side [B, T, R], and
    each head's 1/rms in float32 [B, T, heads + kv_heads] for the gradient.

    qkv is not changed: attention reads the values from it. Normed heads are rounded to qkv's precision before they are
    rotated, as the plain layers do.
    """
    K = len(q_weight_K)
    normed, rstds = [], []
    for x, weight in zip(_heads(qkv_BTW, heads, kv_heads, K)[:2], (q_weight_K, k_weight_K), strict=True):
        _, out, rstd = add_rms_norm.reference(x.reshape(-1, K), None, weight, eps)
        normed.append(out.view(x.shape))
        rstds.append(rstd.view(x.shape[:-1]))
    rotated = torch.cat(normed, 2).flatten(2)
    rotate_qkv_.reference(rotated, cos_TF, sin_TF, heads + kv_heads, 0, K)
    return rotated, torch.cat(rstds, 2)


@op(triton="qk_norm:norm_rotate_backward")
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
    """Return the gradients of the merged projection [B, T, W] and, in float32, of both norm weights [K]."""
    heads, kv_heads, K = grad_q_BHTK.shape[1], grad_k_BHTK.shape[1], grad_q_BHTK.shape[3]
    q, k, v = (grad.float() for grad in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))  # rounded once, after the norm
    rotated_back = merge_rotated_gradients.reference(q, k, v, cos_TF, sin_TF)
    *grads, grad_values = _heads(rotated_back, heads, kv_heads, K)
    inputs, rstds = _heads(qkv_BTW, heads, kv_heads, K), rstd_BTH.split((heads, kv_heads), 2)
    merged, grad_weights = [], []
    for grad, x, rstd, weight in zip(grads, inputs, rstds, (q_weight_K, k_weight_K), strict=False):
        out, grad_weight = rms_norm_backward.reference(
            grad.reshape(-1, K), x.reshape(-1, K), rstd.reshape(-1), weight, None
        )
        merged.append(out.view(grad.shape))
        grad_weights.append(grad_weight)
    grad_qkv = torch.cat((*merged, grad_values.to(qkv_BTW.dtype)), 2).flatten(2)
    return grad_qkv, grad_weights[0], grad_weights[1]


def _heads(merged_BTW: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values as [B, T, H, K] views."""
    return merged_BTW.unflatten(-1, (heads + 2 * kv_heads, head_dim)).split((heads, kv_heads, kv_heads), 2)
