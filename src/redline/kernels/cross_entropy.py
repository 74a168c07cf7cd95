"""The head and its loss together, in chunks: all logits at once would not fit, nor index in 32 bits.

The gradient is made in the same pass as the loss (as in Liger, arXiv 2410.10989), so the logits are computed once
and nothing of their size is kept. Softmax runs in float32 over logits of the compute precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redline.plan.memory import head_chunk

IGNORE = -100
_FP16_SCALE = 1024.0  # logit gradients are at most 1; lifted out of fp16's subnormals until the end


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, softcap: float | None = None) -> Tensor:
    """Σ −log softmax(x·Wᵀ)[target] over targets that are not IGNORE, as a float32 scalar."""
    chunk = head_chunk(weight_VD.shape[0], x_ND.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(x_ND, weight_VD, target_N, softcap, chunk)
    return loss


def reference(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, softcap: float | None = None) -> Tensor:
    """The same in plain torch, all at once."""
    logits = (x_ND @ weight_VD.to(x_ND.dtype).T).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(logits, target_N, ignore_index=IGNORE, reduction="sum")


def _loss_only(logits: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    z = logits.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = target != IGNORE
    picked = z.gather(1, target.clamp_min(0)[:, None])[:, 0]
    return torch.where(valid, z.logsumexp(1) - picked, 0.0).sum()


def _loss_and_gradient(logits: Tensor, target: Tensor, softcap: float | None, scale: float) -> tuple[Tensor, Tensor]:
    """Sum of losses, and d loss / d logits in the logits' precision. Written to be fused by the compiler."""
    z = logits.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = target != IGNORE
    lse = z.logsumexp(1)
    picked = z.gather(1, target.clamp_min(0)[:, None])[:, 0]
    loss = torch.where(valid, lse - picked, 0.0).sum()
    columns = torch.arange(z.shape[1], device=z.device)
    gradient = torch.exp(z - lse[:, None]) - (columns[None, :] == target[:, None]).float()
    if softcap:
        gradient = gradient * (1.0 - (z / softcap).square())
    # a NaN row must stay a NaN row: select, do not multiply
    gradient = torch.where(valid[:, None], gradient, 0.0) * scale
    return loss, gradient.to(logits.dtype)


def _loss_and_gradient_eager(
    logits: Tensor, target: Tensor, softcap: float | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same in place: uncompiled, every avoided pass over the logits counts."""
    z = logits.float()
    slope = None
    if softcap:
        z = (z / softcap).tanh_()
        slope = 1.0 - z.square()
        z *= softcap
    ignored = target == IGNORE
    index = target.masked_fill(ignored, 0)[:, None]
    z = torch.log_softmax(z, 1)
    loss = -z.gather(1, index)[:, 0].masked_fill(ignored, 0.0).sum()
    gradient = z.exp_().scatter_add_(1, index, torch.full_like(index, -1.0, dtype=z.dtype))
    if slope is not None:
        gradient *= slope
    gradient[ignored] = 0.0
    if scale != 1.0:
        gradient *= scale
    return loss, gradient.to(logits.dtype)


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Gradientᵀ·x in float32: over ten thousand tokens the sum leaves fp16's range, and bf16 would round it."""
    if gradient.is_cuda and gradient.dtype != torch.float32:
        return torch.mm(gradient.T, x, out_dtype=torch.float32)
    return gradient.T @ x


_COMPILED: dict[str, Callable[..., Any]] = {}


def compile_kernels() -> None:
    """One fused pass instead of a dozen over the largest tensor of the step."""
    _COMPILED["loss_and_gradient"] = torch.compile(_loss_and_gradient, dynamic=False)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float | None, chunk: int
    ) -> Tensor:
        weight = weight_VD.to(x_ND.dtype)
        loss = torch.zeros((), device=x_ND.device, dtype=torch.float32)
        if not any(ctx.needs_input_grad):
            for x, target in zip(x_ND.split(chunk), target_N.split(chunk), strict=True):
                loss = loss + _loss_only(x @ weight.T, target, softcap)
            return loss

        scale = _FP16_SCALE if x_ND.dtype == torch.float16 else 1.0
        fused = _COMPILED.get("loss_and_gradient", _loss_and_gradient_eager)
        grad_x = torch.empty_like(x_ND)
        grad_weight = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32)
        for i, (x, target) in enumerate(zip(x_ND.split(chunk), target_N.split(chunk), strict=True)):
            part, gradient = fused(x @ weight.T, target, softcap, scale)
            loss = loss + part
            torch.mm(gradient, weight, out=grad_x[i * chunk : i * chunk + len(x)])
            grad_weight += _weight_gradient(gradient, x)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.scale, ctx.weight_dtype = scale, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        factor = grad_loss / ctx.scale
        # in float32, so that a loss-scaled factor is not rounded to the gradient's precision first
        grad_x = (grad_x.float() * factor).to(grad_x.dtype) if grad_x.dtype != torch.float32 else grad_x * factor
        return grad_x, (grad_weight * factor).to(ctx.weight_dtype), None, None, None
