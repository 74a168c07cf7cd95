"""The head and its loss together, in chunks, with the head's three matmuls in fp8.

As cross_entropy.linear_cross_entropy otherwise. Activations and gradients have scales that need no looking at: a
normed row holds nothing beyond √D, a gradient of logits nothing beyond 1. The weight is looked at each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.kernels.cross_entropy import scaled
from redline.kernels.float8 import (
    MULTIPLE,
    Float8,
    Scale,
    current_scale,
    input_gradient8,
    linear8,
    normed_factor,
    quantise,
    weight_gradient8,
)
from redline.kernels.float8_mean import mean_correction, mean_gradient_correction
from redline.kernels.softmax_loss import IGNORE
from redline.kernels.softmax_loss8 import softmax_loss8
from redline.plan.memory import head_chunk

_GRADIENT = 2.0**14  # e5m2 then holds 1 down to 2⁻³⁰


def linear_cross_entropy8(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, softcap: float | None = None) -> Tensor:
    """Σ −log softmax(x·Wᵀ)[target] over targets that are not IGNORE, as a float32 scalar."""
    chunk = chunk_tokens(weight_VD.shape[0], x_ND.shape[0])
    loss: Tensor = _LinearCrossEntropy8.apply(x_ND, weight_VD, target_N, softcap, chunk)
    return loss


def chunk_tokens(vocab: int, tokens: int) -> int:
    return max(MULTIPLE, head_chunk(vocab, tokens) // MULTIPLE * MULTIPLE)


class _LinearCrossEntropy8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float | None, chunk: int
    ) -> Tensor:
        normed, gradient = (_fixed(value, x_ND) for value in (normed_factor(x_ND.shape[1]), _GRADIENT))
        x8, w8 = quantise(x_ND, normed), quantise(weight_VD, current_scale(weight_VD))
        assert x8.row is not None
        assert x8.column is not None
        bias = mean_correction(x8, w8, weight_VD)
        losses = torch.empty(len(x_ND), device=x_ND.device, dtype=torch.float32)
        grad_x = torch.empty_like(x_ND)
        grad_weight = torch.zeros(weight_VD.shape, device=x_ND.device, dtype=torch.float32)
        for start in range(0, len(x_ND), chunk):
            part = slice(start, start + chunk)
            x = Float8(x8.row[part], x8.column[:, part], x8.unscale)
            losses[part], g8 = softmax_loss8(linear8(x, w8, bias), target_N[part], gradient, softcap=softcap)
            mended = input_gradient8(g8, w8, mean_gradient_correction(g8, w8, weight_VD))
            grad_x[part] = mended.masked_fill_((target_N[part] == IGNORE)[:, None], 0.0)
            grad_weight += weight_gradient8(g8, x)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return (
            scaled(grad_x, grad_loss, grad_x.dtype),
            scaled(grad_weight, grad_loss, ctx.weight_dtype),
            None,
            None,
            None,
        )


def _fixed(factor: float, like: Tensor) -> Scale:
    times = torch.full((), factor, device=like.device)
    return Scale(times, times.reciprocal(), None)
