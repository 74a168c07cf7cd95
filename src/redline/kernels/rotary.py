"""Rotary positions (RoFormer, arXiv 2104.09864) on merged projections: Triton on a GPU, plain torch elsewhere.

Queries and keys are turned where the projection wrote them; the way back turns their gradients while it merges them
with the values'. So attention's layout costs no copy of its own. Pairs are (i, i + K/2), as in Llama checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_qkv_(qkv_BTW: Tensor, cos_TF: Tensor, sin_TF: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    """Turns the queries and keys of [B, T, (heads + 2·kv_heads)·K] in place; values stay."""
    if qkv_BTW.is_cuda:
        from redline.kernels.triton import rotary as rotary_triton

        return rotary_triton.rotate_qkv_(qkv_BTW, cos_TF, sin_TF, heads, kv_heads, head_dim)
    return reference_rotate_qkv_(qkv_BTW, cos_TF, sin_TF, heads, kv_heads, head_dim)


def merge_rotated_gradients(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor
) -> Tensor:
    """The gradient of the merged projection [B, T, W]: queries' and keys' turned back, values' as they are."""
    if grad_q_BHTK.is_cuda:
        from redline.kernels.triton import rotary as rotary_triton

        return rotary_triton.merge_rotated_gradients(grad_q_BHTK, grad_k_BHTK, grad_v_BHTK, cos_TF, sin_TF)
    return reference_merge_rotated_gradients(grad_q_BHTK, grad_k_BHTK, grad_v_BHTK, cos_TF, sin_TF)


def reference_rotate_qkv_(
    qkv_BTW: Tensor, cos_TF: Tensor, sin_TF: Tensor, heads: int, kv_heads: int, head_dim: int
) -> None:
    turned = qkv_BTW.unflatten(-1, (heads + 2 * kv_heads, head_dim))[:, :, : heads + kv_heads]
    turned.copy_(_turn(turned, cos_TF, sin_TF))


def reference_merge_rotated_gradients(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor
) -> Tensor:
    q, k, v = (grad.transpose(1, 2) for grad in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    back = -sin_TF  # the transpose of a rotation turns the other way
    return torch.cat((_turn(q, cos_TF, back), _turn(k, cos_TF, back), v), 2).flatten(2)


def _turn(x_BTHK: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    a, b = x_BTHK.float().chunk(2, -1)
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BTHK.dtype)
