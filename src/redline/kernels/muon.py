"""Muon's passes over gradients and weights, and the matrix products of its orthogonalisation.

Matrices of one shape are worked on as one batch [N, R, C]. Their gradients and weights stay where they are, each a
contiguous [R, C] tensor of its own or a part of a merged parameter; only what lies between them is laid out as the
batch. Every write is gated by a device flag: `bad` above zero leaves momentum and weights as they are, so that a step
with a gradient that is not finite is skipped without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from redline.kernels.dispatch import op, triton_serves


def by_triton(device: torch.device) -> bool:
    """Return whether Triton serves Muon's passes over gradients and weights on this device."""
    return triton_serves(device, "muon._nesterov", "muon._descend")


# ----------------------------------------------------------------------------------------------------
# Before and after the orthogonalisation.


@op(triton="muon:nesterov_", uses_triton=lambda _, momentum_NRC, *__: by_triton(momentum_NRC.device))
def nesterov_(
    gradients: Sequence[Tensor],
    momentum_NRC: Tensor,
    divisor: Tensor,
    bad: Tensor,
    beta: float,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Move the momentum towards gradient/divisor. Return Nesterov's sum [N, R, C] in `dtype`, and its squared norms."""
    if bad.device.type == "cpu":
        # The flag can be read at once, and updating in place takes half as many passes over the matrices.
        total = torch.stack(list(gradients))
        if not bad:
            total.div_(divisor)
            momentum_NRC.lerp_(total, 1.0 - beta)
            total.lerp_(momentum_NRC, beta)
        return total.to(dtype), torch.linalg.vector_norm(total, dim=(-2, -1)).square()
    gradient = torch.stack(list(gradients)) / divisor
    moved = momentum_NRC.lerp(gradient, 1.0 - beta)
    momentum_NRC.copy_(torch.where(bad > 0, momentum_NRC, moved))
    total = gradient.lerp(moved, beta)
    squares = total.square().sum((-2, -1))
    return total.to(dtype), squares


@op(triton="muon:descend_", uses_triton=lambda _, update_NRC, *__, **___: by_triton(update_NRC.device))
def descend_(
    weights: Sequence[Tensor],
    update_NRC: Tensor,
    scales_NR: Tensor | None,
    bad: Tensor,
    *,
    rate: float,
    decay: float,
    cautious: bool,
) -> None:
    """Set weight ← weight·(1 − decay) − rate·scale·update. With `cautious`, decay only where weight and update have
    the same sign.
    """
    if bad.device.type == "cpu":
        if bad:
            return
        step = update_NRC.float().mul_(rate if scales_NR is None else rate * scales_NR[..., None])
        for weight, moved in zip(weights, step.unbind(), strict=True):
            if cautious:
                weight.mul_(torch.where(weight * moved >= 0, 1.0 - decay, 1.0))
            elif decay:
                weight.mul_(1.0 - decay)
            weight.sub_(moved)
        return
    before, update = torch.stack(list(weights)), update_NRC.float()
    kept = torch.where(before * update >= 0, 1.0 - decay, 1.0) if cautious else 1.0 - decay
    update = update if scales_NR is None else scales_NR[..., None] * update
    after = torch.where(bad > 0, before, before * kept - rate * update)
    for weight, moved in zip(weights, after.unbind(), strict=True):
        weight.copy_(moved)


# ----------------------------------------------------------------------------------------------------
# Products with a symmetric result, of which Triton computes half of the tiles: X·Xᵀ or Xᵀ·X, and the square of a
# symmetric matrix, each plus a multiple of the identity. The Newton-Schulz polynomials are made of these.


def _in_bf16_on_a_gpu(x: Tensor, **_: Any) -> bool:
    # float32 goes to torch, which follows the user's setting for the precision of float32 matmuls
    return x.dtype == torch.bfloat16 and triton_serves(x.device, "muon._times_transposed")


@op(triton="muon:gram", uses_triton=_in_bf16_on_a_gpu)
def gram(x_NRC: Tensor, *, tall: bool, diagonal: float) -> Tensor:
    """Return X·Xᵀ + diagonal·I [N, R, R] of each matrix, or with `tall` Xᵀ·X + diagonal·I [N, C, C]."""
    product = x_NRC.mT @ x_NRC if tall else x_NRC @ x_NRC.mT
    product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product


@op(triton="muon:square", uses_triton=_in_bf16_on_a_gpu)
def square(g_NKK: Tensor, *, factor: float, diagonal: float) -> Tensor:
    """Return factor·G² + diagonal·I of each symmetric matrix."""
    product = torch.empty_like(g_NKK).baddbmm_(g_NKK, g_NKK, beta=0, alpha=factor)
    product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product
