"""Cross-entropy of given logits and its gradient, which takes the logits' place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.float8 import Float8, Scale

IGNORE = -100


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
    """Float32 losses [N], and (softmax − onehot)·scale in the logits' dtype.

    The logits are given away: their storage may be the gradient's. Rows whose target is IGNORE lose nothing and have
    gradient zero, whatever they hold; arithmetic is in float32. A row's loss and gradient are multiplied by its
    `weight` (float32). Columns from `classes` on are no classes: whatever they hold, NaN too, they have no share and
    gradient zero.
    """
    assert weight_N is None or (weight_N.dtype == torch.float32 and weight_N.is_contiguous()), "one float32 a row"
    if fused and logits_NV.is_cuda and _has_triton(logits_NV.device):
        from redline.kernels.triton.softmax_loss import softmax_loss as in_triton

        return in_triton(
            logits_NV,
            target_N,
            softcap=softcap,
            scale=scale,
            with_gradient=with_gradient,
            weight_N=weight_N,
            classes=classes,
        )
    if with_gradient and "functional" in _COMPILED:
        losses, gradient = _COMPILED["functional"](logits_NV, target_N, softcap, scale, weight_N, classes)
        return losses, gradient
    return reference(
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
    """One fused pass by torch.compile, instead of a dozen over the largest tensor of the step."""
    _COMPILED["functional"] = torch.compile(_functional, dynamic=False)


def _functional(
    logits: Tensor,
    target: Tensor,
    softcap: float | None,
    scale: float,
    weight: Tensor | None = None,
    classes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same without writing in place: what the compiler fuses best."""
    z = logits[:, :classes].float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    valid = target != IGNORE
    lse = z.logsumexp(1)
    picked = z.gather(1, target.clamp_min(0)[:, None])[:, 0]
    columns = torch.arange(z.shape[1], device=z.device)
    gradient = torch.exp(z - lse[:, None]) - (columns[None, :] == target[:, None]).float()
    if softcap:
        gradient = gradient * (1.0 - (z / softcap).square())
    # a NaN row must stay a NaN row: select, do not multiply
    losses, gradient = lse - picked, gradient * scale
    if weight is not None:
        losses, gradient = losses * weight, gradient * weight[:, None]
    gradient = torch.where(valid[:, None], gradient, 0.0).to(logits.dtype)
    if classes is not None:
        gradient = F.pad(gradient, (0, logits.shape[1] - z.shape[1]))
    return torch.where(valid, losses, 0.0), gradient


@cache
def _has_triton(device: torch.device) -> bool:
    """Triton compiles for Volta and newer."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)


def reference(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    with_gradient: bool = True,
    weight_N: Tensor | None = None,
    classes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain torch, in place where it can be: every avoided pass over the logits counts."""
    z = logits_NV[:, :classes].float()
    slope = None
    if softcap:
        z = (z / softcap).tanh_()
        slope = 1.0 - z.square() if with_gradient else None
        z *= softcap
    ignored = target_N == IGNORE
    index = target_N.masked_fill(ignored, 0)[:, None]
    z = torch.log_softmax(z, 1)
    losses = -z.gather(1, index)[:, 0].masked_fill(ignored, 0.0)
    if weight_N is not None:
        weight_N = weight_N.masked_fill(ignored, 0.0)
        losses *= weight_N
    if not with_gradient:
        return losses, None
    gradient = z.exp_().scatter_add_(1, index, torch.full_like(index, -1.0, dtype=z.dtype))
    if slope is not None:
        gradient *= slope
    gradient[ignored] = 0.0  # a NaN row that counts must stay one: select, do not multiply
    if scale != 1.0:
        gradient *= scale
    if weight_N is not None:
        gradient *= weight_N[:, None]
    if gradient.shape == logits_NV.shape:
        return losses, gradient.to(logits_NV.dtype)
    logits_NV[:, :classes] = gradient
    logits_NV[:, classes:] = 0.0
    return losses, logits_NV


# ----------------------------------------------------------------------------------------------------
# Cross-entropy of given logits and its gradient as an fp8 operand: Triton on a GPU, plain torch elsewhere.
#
# The gradient is in e5m2: most of it is probabilities far below 1, which e4m3 would round to nothing. It keeps three
# bits of each, and a token's probability is much the same in many rows: rounded to nearest, all would be wrong the
# same way. So they are dithered: up or down, by a threshold that runs evenly along rows and columns.


CUT = 21  # bits of a float32 that e5m2 does not have
ALONG_ROWS, ALONG_COLUMNS = 0xC13FA9A9, 0x91E10DA5  # 1/g and 1/g² of 2³², g³ = g + 1: even in both directions


def softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    """Float32 losses [N], and softmax − onehot in e5m2, both ways round; as softmax_loss.softmax_loss otherwise."""
    if logits_NV.is_cuda:
        from redline.kernels.triton import softmax_loss as softmax_loss8_triton

        return softmax_loss8_triton.softmax_loss8(logits_NV, target_N, scale, softcap=softcap)
    return reference_softmax_loss8(logits_NV, target_N, scale, softcap=softcap)


def reference_softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    losses, gradient = reference(logits_NV.float(), target_N, softcap=softcap)
    assert gradient is not None
    whole = losses.isfinite()[:, None]
    codes = torch.where(whole, dithered(gradient * scale.factor), float("nan")).to(torch.float8_e5m2)
    return losses, Float8(codes, codes.T.contiguous(), scale.unscale)


def dithered(value_NV: Tensor) -> Tensor:
    """To e5m2's three bits: away from zero when what is cut off, of one step, is above a threshold."""
    rows, columns = (torch.arange(size, device=value_NV.device) for size in value_NV.shape)
    threshold = ((rows * ALONG_ROWS)[:, None] + (columns * ALONG_COLUMNS)[None, :] & 0xFFFF_FFFF) >> (32 - CUT)
    bits = value_NV.float().contiguous().view(torch.int32) + threshold.to(torch.int32)
    return (bits >> CUT << CUT).view(torch.float32)
