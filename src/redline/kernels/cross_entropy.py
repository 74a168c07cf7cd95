"""Cross-entropy: the softmax loss of given logits with its gradient, and the head's matmul and its loss in one.

The head and its loss run in chunks of tokens: the logits of all tokens at once would not fit into memory, nor index in
32 bits. The gradient is made in the same pass as the loss (as in Liger, arXiv 2410.10989), so the logits are computed
once and nothing of their size is kept. Softmax runs in float32 over logits of the compute precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.dispatch import op, triton_serves
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
from redline.planning.memory import head_chunk

IGNORE = -100  # a target with this value adds nothing to the loss

# ----------------------------------------------------------------------------------------------------
# The loss of given logits and its gradient, which takes the logits' place.


def _compiled(logits_NV: Tensor, *_: Any, **__: Any) -> bool:
    return triton_serves(logits_NV.device, "cross_entropy._softmax_loss")


@op(triton="cross_entropy:softmax_loss", uses_triton=_compiled)
def in_place_softmax_loss(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    with_gradient: bool = True,
    weight_N: Tensor | None = None,
    classes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do what softmax_loss does, with the gradient in the place of the logits.

    On a CPU the passes run over a few rows at a time, which stay in its cache: five times as fast as whole passes.
    """
    rows = _CPU_ROWS if logits_NV.device.type == "cpu" else len(logits_NV)
    losses = torch.empty(len(logits_NV), device=logits_NV.device, dtype=torch.float32)
    for start in range(0, len(logits_NV), max(1, rows)):
        part = slice(start, start + rows)
        weight = None if weight_N is None else weight_N[part]
        losses[part], gradient = _rows_loss(
            logits_NV[part, :classes], target_N[part], softcap, scale, weight, with_gradient=with_gradient
        )
        if gradient is not None:
            logits_NV[part, :classes] = gradient
    if not with_gradient:
        return losses, None
    if classes is not None:
        logits_NV[:, classes:] = 0.0
    return losses, logits_NV


_CPU_ROWS = 128  # 2 MiB of float32 logits at a vocabulary of 4096


def _rows_loss(
    logits_NV: Tensor,
    target_N: Tensor,
    softcap: float | None,
    scale: float,
    weight_N: Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of some rows and their gradient, in float32. The logits are left as they are."""
    slope = None
    z = logits_NV
    if softcap:
        z = (z.float() / softcap).tanh_()
        slope = 1.0 - z.square() if with_gradient else None
        z *= softcap
    ignored = target_N == IGNORE
    index = target_N.masked_fill(ignored, 0)[:, None]
    z = z.float()
    # The loss from the softmax, because on a CPU log_softmax in float32 takes ten times as long as softmax. The largest
    # probability is exp(0)/Σ, so that −log of it is what the largest logit lacks to the log-sum-exp. The probability of
    # the target itself may underflow.
    gradient = torch.softmax(z, 1)
    below_largest = z.amax(1, keepdim=True) - z.gather(1, index)
    losses = (below_largest - gradient.amax(1, keepdim=True).log())[:, 0].masked_fill_(ignored, 0.0)
    if weight_N is not None:
        weight_N = weight_N.masked_fill(ignored, 0.0)
        losses *= weight_N
    if not with_gradient:
        return losses, None
    gradient.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=z.dtype))
    if slope is not None:
        gradient *= slope
    # select, do not multiply: a NaN row that counts must stay NaN, one that is ignored must become zero
    if ignored.is_cuda or ignored.any():  # a GPU should not wait for the answer
        gradient[ignored] = 0.0
    if scale != 1.0:
        gradient *= scale
    if weight_N is not None:
        gradient *= weight_N[:, None]
    return losses, gradient


def softmax_loss(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    with_gradient: bool = True,
    fused: bool = False,
    weight_N: Tensor | None = None,
    classes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses [N] in float32, and their gradient (softmax − onehot)·scale in the logits' dtype.

    The logits must not be read afterwards: their storage may hold the gradient. Rows whose target is IGNORE have loss
    and gradient zero, even if their logits are NaN. Arithmetic is in float32. `weight` (float32) multiplies each row's
    loss and gradient. With `classes`, the softmax is over the first `classes` columns; the others, which only pad the
    vocabulary, get gradient zero whatever they hold, NaN included. `fused` allows the Triton kernel.
    """
    assert weight_N is None or (weight_N.dtype == torch.float32 and weight_N.is_contiguous()), "one float32 a row"
    in_triton = fused and in_place_softmax_loss.uses_triton(logits_NV)
    if not in_triton and with_gradient and "functional" in _COMPILED:
        losses, gradient = _COMPILED["functional"](logits_NV, target_N, softcap, scale, weight_N, classes)
        return losses, gradient
    return (in_place_softmax_loss.triton if in_triton else in_place_softmax_loss.reference)(
        logits_NV,
        target_N,
        softcap=softcap,
        scale=scale,
        with_gradient=with_gradient,
        weight_N=weight_N,
        classes=classes,
    )


_COMPILED: dict[str, Callable[..., Any]] = {}


def compile_loss() -> None:
    """Let torch.compile make one pass of the loss, instead of a dozen over the largest tensor of the step."""
    _COMPILED["functional"] = torch.compile(_functional_softmax_loss, dynamic=False)


def _functional_softmax_loss(
    logits: Tensor,
    target: Tensor,
    softcap: float | None,
    scale: float,
    weight: Tensor | None = None,
    classes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient without writing in place, which is the form that the compiler fuses best."""
    z = logits[:, :classes].float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = target != IGNORE
    lse = z.logsumexp(1)
    target_logit = z.gather(1, target.clamp_min(0)[:, None])[:, 0]
    columns = torch.arange(z.shape[1], device=z.device)
    gradient = torch.exp(z - lse[:, None]) - (columns[None, :] == target[:, None]).float()
    if softcap:
        gradient = gradient * (1.0 - (z / softcap).square())
    losses, gradient = lse - target_logit, gradient * scale
    if weight is not None:
        losses, gradient = losses * weight, gradient * weight[:, None]
    # select, do not multiply: 0·NaN is NaN, and an ignored row must not spoil the sum
    gradient = torch.where(valid[:, None], gradient, 0.0).to(logits.dtype)
    if classes is not None:
        gradient = F.pad(gradient, (0, logits.shape[1] - z.shape[1]))
    return torch.where(valid, losses, 0.0), gradient


# ----------------------------------------------------------------------------------------------------
# The same loss with its gradient as an fp8 operand.
#
# The gradient is in e5m2: most of it is probabilities far below 1, which e4m3 would round to zero. e5m2 keeps three
# significant bits, and the probability of a token is much the same in many rows: rounded to nearest, all of those rows
# would be wrong in the same direction. So the values are dithered: rounded up or down by a threshold that is spread
# evenly along rows and columns.


CUT_BITS = 21  # mantissa bits of a float32 that e5m2 does not have
# 1/g and 1/g² of 2³², where g³ = g + 1 (the plastic number): a low-discrepancy sequence in two dimensions
ROW_STEP, COLUMN_STEP = 0xC13FA9A9, 0x91E10DA5


@op(triton="cross_entropy:softmax_loss8")
def softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    """Return the losses [N] in float32, and softmax − onehot in e5m2, in both layouts."""
    losses, gradient = in_place_softmax_loss.reference(logits_NV.float(), target_N, softcap=softcap)
    assert gradient is not None
    finite = losses.isfinite()[:, None]
    codes = torch.where(finite, _dithered(gradient * scale.factor), float("nan")).to(torch.float8_e5m2)
    return losses, Float8(codes, codes.T.contiguous(), scale.unscale)


def _dithered(value_NV: Tensor) -> Tensor:
    """Cut values to e5m2's three significant bits; round away from zero when the cut part exceeds the threshold."""
    rows, columns = (torch.arange(size, device=value_NV.device) for size in value_NV.shape)
    threshold = ((rows * ROW_STEP)[:, None] + (columns * COLUMN_STEP)[None, :] & 0xFFFF_FFFF) >> (32 - CUT_BITS)
    bits = value_NV.float().contiguous().view(torch.int32) + threshold.to(torch.int32)
    return (bits >> CUT_BITS << CUT_BITS).view(torch.float32)


# ----------------------------------------------------------------------------------------------------
# The head and its loss together.


# Logit gradients are at most 1. In fp16 they are multiplied by this until the end, out of the subnormals.
_FP16_SCALE = 1024.0


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
    """Return Σ −weight·log softmax(x·Wᵀ)[target] over the targets that are not IGNORE, as a float32 scalar.

    Each row may have a weight of its own, and the softmax may be over the first `classes` columns only.
    """
    chunk = head_chunk(weight_VD.shape[0], x_ND.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(x_ND, weight_VD, target_N, softcap, chunk, fused, weight_N, classes)
    return loss


def reference_linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    weight_N: Tensor | None = None,
    classes: int | None = None,
) -> Tensor:
    """Return the same by torch's own operators and autograd, with all logits at once. For tests."""
    logits = (x_ND @ weight_VD[:classes].to(x_ND.dtype).T).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if weight_N is None:
        return F.cross_entropy(logits, target_N, ignore_index=IGNORE, reduction="sum")
    losses = F.cross_entropy(logits, target_N, ignore_index=IGNORE, reduction="none")
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
            # divide by the largest weight: times _FP16_SCALE, gradients above 1 could overflow fp16
            largest = torch.cat((weight_N, weight_N.new_ones(1))).amax()
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
    """Return tensor·factor in `dtype`, computed in one pass and in float32.

    The factor is given two dimensions because torch would round a scalar to the tensor's precision first.
    """
    return torch.mul(tensor, factor.view(1, 1), out=torch.empty_like(tensor, dtype=dtype))


def _add_weight_gradient(total_VD: Tensor, gradient_NV: Tensor, x_ND: Tensor, *, by_matmul: bool) -> None:
    """Compute total += gradientᵀ·x. Where cuBLAS can, it adds: that saves a pass over [V, D] in float32 per chunk."""
    if gradient_NV.dtype == torch.float32:
        torch.addmm(total_VD, gradient_NV.T, x_ND, out=total_VD)
    elif by_matmul and _adds_in_float32(total_VD.device, x_ND.dtype):
        torch.addmm(total_VD, gradient_NV.T, x_ND, out_dtype=torch.float32, out=total_VD)
    else:
        total_VD += weight_gradient(gradient_NV, x_ND)


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's addmm adds half-precision products to a float32 sum; some releases refuse the mix."""
    if device.type != "cuda":
        return False
    halves, total = torch.zeros(16, 16, device=device, dtype=dtype), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, halves, halves, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


# ----------------------------------------------------------------------------------------------------
# The same with the head's three matmuls in fp8.
#
# The scales of activations and gradients are constants: a normed row holds no value beyond √D times the norm's weight,
# a gradient of logits none beyond 1. The weight's scale is measured each time.


_GRADIENT_FACTOR = 2.0**14  # with it e5m2 represents gradients from 1 down to 2⁻³⁰


def linear_cross_entropy8(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, softcap: float | None = None) -> Tensor:
    """Return Σ −log softmax(x·Wᵀ)[target] over the targets that are not IGNORE, as a float32 scalar."""
    chunk = chunk_tokens(weight_VD.shape[0], x_ND.shape[0])
    loss: Tensor = _LinearCrossEntropy8.apply(x_ND, weight_VD, target_N, softcap, chunk)
    return loss


def chunk_tokens(vocab: int, tokens: int) -> int:
    """Return how many tokens a chunk of the fp8 head has: a multiple of 16, as fp8 matmuls demand."""
    return max(MULTIPLE, head_chunk(vocab, tokens) // MULTIPLE * MULTIPLE)


class _LinearCrossEntropy8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, softcap: float | None, chunk: int
    ) -> Tensor:
        x_scale = _constant_scale(normed_factor(x_ND.shape[1]), x_ND)
        gradient_scale = _constant_scale(_GRADIENT_FACTOR, x_ND)
        x8, w8 = quantise(x_ND, x_scale), quantise(weight_VD, current_scale(weight_VD))
        assert x8.row is not None
        assert x8.column is not None
        bias = mean_correction(x8, w8, weight_VD)
        losses = torch.empty(len(x_ND), device=x_ND.device, dtype=torch.float32)
        grad_x = torch.empty_like(x_ND)
        grad_weight = torch.zeros(weight_VD.shape, device=x_ND.device, dtype=torch.float32)
        for start in range(0, len(x_ND), chunk):
            part = slice(start, start + chunk)
            x = Float8(x8.row[part], x8.column[:, part], x8.unscale)
            losses[part], g8 = softmax_loss8(linear8(x, w8, bias), target_N[part], gradient_scale, softcap=softcap)
            corrected = input_gradient8(g8, w8, mean_gradient_correction(g8, w8, weight_VD))
            # the correction adds the mean to every row, ignored ones too
            grad_x[part] = corrected.masked_fill_((target_N[part] == IGNORE)[:, None], 0.0)
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


def _constant_scale(value: float, like: Tensor) -> Scale:
    factor = torch.full((), value, device=like.device)
    return Scale(factor, factor.reciprocal(), None)
