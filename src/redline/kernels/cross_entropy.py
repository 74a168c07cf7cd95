"""The head and its loss together, in chunks: all logits at once would not fit, nor index in 32 bits.

The gradient is made in the same pass as the loss (as in Liger, arXiv 2410.10989), so the logits are computed once
and nothing of their size is kept. Softmax runs in float32 over logits of the compute precision.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from redline.kernels.float8 import (
    MULTIPLE,
    Float8,
    Scale,
    current_scale,
    input_gradient8,
    linear8,
    mean_correction,
    mean_gradient_correction,
    normed_factor,
    quantise,
    weight_gradient8,
)
from redline.kernels.matmul import weight_gradient
from redline.kernels.softmax_loss import IGNORE, softmax_loss, softmax_loss8
from redline.planning.memory import head_chunk

__all__ = ["IGNORE", "linear_cross_entropy", "reference"]

_FP16_SCALE = 1024.0  # logit gradients are at most 1; lifted out of fp16's subnormals until the end


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    fused: bool = False,
    weight_N: Tensor | None = None,
    classes: int | None = None,
) -> Tensor:
    """Σ −weight·log softmax(x·Wᵀ)[target] over targets that are not IGNORE, as a float32 scalar.

    Each row may have a weight of its own, and the softmax may be over the first `classes` columns alone.
    """
    chunk = head_chunk(weight_VD.shape[0], x_ND.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(x_ND, weight_VD, target_N, softcap, chunk, fused, weight_N, classes)
    return loss


def reference(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    weight_N: Tensor | None = None,
    classes: int | None = None,
) -> Tensor:
    """The same in plain torch, all at once."""
    logits = (x_ND @ weight_VD[:classes].to(x_ND.dtype).T).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if weight_N is None:
        return torch.nn.functional.cross_entropy(logits, target_N, ignore_index=IGNORE, reduction="sum")
    losses = torch.nn.functional.cross_entropy(logits, target_N, ignore_index=IGNORE, reduction="none")
    return (losses * weight_N).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        softcap: float | None,
        chunk: int,
        fused: bool,
        weight_N: Tensor | None,
        classes: int | None,
    ) -> Tensor:
        weight = weight_VD.to(x_ND.dtype)
        logits = torch.empty(min(chunk, len(x_ND)), len(weight), device=x_ND.device, dtype=x_ND.dtype)
        training, weight_too = any(ctx.needs_input_grad), ctx.needs_input_grad[1]
        scale = _FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        largest = None
        if weight_N is not None and x_ND.dtype == torch.float16:
            largest = torch.cat((weight_N, weight_N.new_ones(1))).amax()  # what is scaled stays at most 1
            weight_N = weight_N / largest
        grad_x = torch.empty_like(x_ND) if training else None
        grad_weight = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32) if weight_too else None
        losses = torch.empty(len(x_ND), device=x_ND.device, dtype=torch.float32)
        for start in range(0, len(x_ND), chunk):
            x, target = x_ND[start : start + chunk], target_N[start : start + chunk]
            z = torch.mm(x, weight.T, out=logits[: len(x)])
            losses[start : start + chunk], gradient = softmax_loss(
                z,
                target,
                softcap=softcap,
                scale=scale,
                with_gradient=training,
                fused=fused,
                weight_N=None if weight_N is None else weight_N[start : start + chunk],
                classes=classes,
            )
            if grad_x is not None and gradient is not None:
                torch.mm(gradient, weight, out=grad_x[start : start + chunk])
            if grad_weight is not None and gradient is not None:
                _add_weight_gradient(grad_weight, gradient, x, by_matmul=fused)
        if training:
            ctx.save_for_backward(grad_x, grad_weight)
            ctx.scale = scale if largest is None else scale / largest
            ctx.weight_dtype = weight_VD.dtype
        return losses.sum() if largest is None else losses.sum() * largest

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        factor = grad_loss / ctx.scale
        of_weight = None if grad_weight is None else scaled(grad_weight, factor, ctx.weight_dtype)
        return scaled(grad_x, factor, grad_x.dtype), of_weight, *(None,) * 6


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor·factor in one pass and in float32: a factor with a dimension is not rounded to the tensor's precision."""
    return torch.mul(tensor, factor.view(1, 1), out=torch.empty_like(tensor, dtype=dtype))


def _add_weight_gradient(total_VD: Tensor, gradient_NV: Tensor, x_ND: Tensor, *, by_matmul: bool) -> None:
    """total += gradientᵀ·x, by the matmul itself where it can: a pass over [V, D] in float32 less for each chunk."""
    if gradient_NV.dtype == torch.float32:
        torch.addmm(total_VD, gradient_NV.T, x_ND, out=total_VD)
    elif by_matmul and _adds_in_float32(total_VD.device, x_ND.dtype):
        torch.addmm(total_VD, gradient_NV.T, x_ND, out_dtype=torch.float32, out=total_VD)
    else:
        total_VD += weight_gradient(gradient_NV, x_ND)


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds products of half precision to a float32 sum; some want the sum in half precision too."""
    if device.type != "cuda":
        return False
    halves, total = torch.zeros(16, 16, device=device, dtype=dtype), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, halves, halves, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


# ----------------------------------------------------------------------------------------------------
# The head and its loss together, in chunks, with the head's three matmuls in fp8.
#
# As cross_entropy.linear_cross_entropy otherwise. Activations and gradients have scales that need no looking at: a
# normed row holds nothing beyond √D, a gradient of logits nothing beyond 1. The weight is looked at each time.


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
