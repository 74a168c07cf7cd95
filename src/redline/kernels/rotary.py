"""Rotary position embeddings (RoFormer, arXiv 2104.09864) on merged query-key-value projections.

Queries and keys are rotated in place, where the projection wrote them. The backward rotates their gradients back while
it merges them with those of the values, so attention's [B, H, T, K] layout costs no copy of its own. Pairs are
(i, i + K/2), as in Llama checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.dispatch import op
from redline.kernels.float8 import Float8, Scale, quantise


@op(triton="rotary:rotate_qkv_")
def rotate_qkv_(qkv_BTW: Tensor, cos_TF: Tensor, sin_TF: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    """Rotate the queries and keys of [B, T, (heads + 2·kv_heads)·K] in place; the values stay as they are."""
    queries_and_keys = qkv_BTW.unflatten(-1, (heads + 2 * kv_heads, head_dim))[:, :, : heads + kv_heads]
    queries_and_keys.copy_(_rotate(queries_and_keys, cos_TF, sin_TF))


@op(triton="rotary:merge_rotated_gradients")
def merge_rotated_gradients(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor
) -> Tensor:
    """Return the gradient of the merged projection [B, T, W]: q and k rotated back, v copied."""
    q, k, v = (grad.transpose(1, 2) for grad in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    negative_sin = -sin_TF  # the transpose of a rotation is the rotation by the negative angle
    return torch.cat((_rotate(q, cos_TF, negative_sin), _rotate(k, cos_TF, negative_sin), v), 2).flatten(2)


@op(triton="rotary:merge_rotated_gradients8")
def merge_rotated_gradients8(
    grad_q_BHTK: Tensor, grad_k_BHTK: Tensor, grad_v_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor, scale: Scale
) -> Float8:
    """Return the gradient of the merged projection [B·T, W] in fp8, rounded once from float32."""
    q, k, v = (grad.float() for grad in (grad_q_BHTK, grad_k_BHTK, grad_v_BHTK))
    return quantise.reference(merge_rotated_gradients.reference(q, k, v, cos_TF, sin_TF).flatten(0, 1), scale)


def _rotate(x_BTHK: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    a, b = x_BTHK.float().chunk(2, -1)
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BTHK.dtype)
