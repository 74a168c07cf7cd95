"""Muon's passes over gradients and weights, before and after orthogonalisation: Triton on a GPU, torch elsewhere.

Matrices of one shape are worked on as one batch [N, R, C]. Their gradients and weights stay where they are, each a
contiguous [R, C] of its own or a part of a merged parameter; only what lies between is laid out as the batch. Every
write is gated: `bad` above zero leaves momentum and weights as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def by_triton(device: torch.device) -> bool:
    """Cards before Ampere have no bf16 units, and Triton does not compile for all of them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and bool(find_spec("triton"))


def nesterov_(
    gradients: Sequence[Tensor], momentum_NRC: Tensor, divisor: Tensor, bad: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Moves the momentum towards gradient/divisor; Nesterov's sum [N, R, C] (bf16 on a GPU), its squared norms [N]."""
    if by_triton(momentum_NRC.device):
        from redline.kernels.triton import muon as muon_triton

        return muon_triton.nesterov_(gradients, momentum_NRC, divisor, bad, beta)
    total, squares = reference_nesterov_(gradients, momentum_NRC, divisor, bad, beta)
    return (total.bfloat16() if total.is_cuda else total), squares


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
    """weight ← weight·(1 − decay) − rate·scale·update; a cautious one decays only where both have one sign."""
    if by_triton(update_NRC.device):
        from redline.kernels.triton import muon as muon_triton

        muon_triton.descend_(weights, update_NRC, scales_NR, bad, rate=rate, decay=decay, cautious=cautious)
        return
    reference_descend_(weights, update_NRC, scales_NR, bad, rate=rate, decay=decay, cautious=cautious)


def reference_nesterov_(
    gradients: Sequence[Tensor], momentum_NRC: Tensor, divisor: Tensor, bad: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    gradient = torch.stack(list(gradients)) / divisor
    moved = momentum_NRC.lerp(gradient, 1.0 - beta)
    momentum_NRC.copy_(torch.where(bad > 0, momentum_NRC, moved))
    total = gradient.lerp(moved, beta)
    return total, total.square().sum((-2, -1))


def reference_descend_(
    weights: Sequence[Tensor],
    update_NRC: Tensor,
    scales_NR: Tensor | None,
    bad: Tensor,
    *,
    rate: float,
    decay: float,
    cautious: bool,
) -> None:
    before, update = torch.stack(list(weights)), update_NRC.float()
    kept = torch.where(before * update >= 0, 1.0 - decay, 1.0) if cautious else 1.0 - decay
    update = update if scales_NR is None else scales_NR[..., None] * update
    after = torch.where(bad > 0, before, before * kept - rate * update)
    for weight, moved in zip(weights, after.unbind(), strict=True):
        weight.copy_(moved)


# ----------------------------------------------------------------------------------------------------
# Symmetric products of a batch of matrices: half of their tiles are enough. Triton on a GPU, torch elsewhere.
#
# X·Xᵀ or Xᵀ·X, and the square of a symmetric matrix, each plus a multiple of the identity: what a polynomial of Gram
# matrices is made of.


def _by_triton(x: Tensor) -> bool:
    """float32 keeps the precision of torch's matmuls."""
    return x.dtype == torch.bfloat16 and by_triton(x.device)


def gram(x_NRC: Tensor, *, tall: bool, diagonal: float) -> Tensor:
    """X·Xᵀ + diagonal·I of each matrix [N, R, R]; of a tall one Xᵀ·X [N, C, C]."""
    if _by_triton(x_NRC):
        from redline.kernels.triton import muon as symmetric_triton

        return symmetric_triton.gram(x_NRC, tall=tall, diagonal=diagonal)
    return reference_gram(x_NRC, tall=tall, diagonal=diagonal)


def square(g_NKK: Tensor, *, factor: float, diagonal: float) -> Tensor:
    """factor·G² + diagonal·I of each symmetric matrix."""
    if _by_triton(g_NKK):
        from redline.kernels.triton import muon as symmetric_triton

        return symmetric_triton.square(g_NKK, factor=factor, diagonal=diagonal)
    return reference_square(g_NKK, factor=factor, diagonal=diagonal)


def reference_gram(x_NRC: Tensor, *, tall: bool, diagonal: float) -> Tensor:
    product = x_NRC.mT @ x_NRC if tall else x_NRC @ x_NRC.mT
    product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product


def reference_square(g_NKK: Tensor, *, factor: float, diagonal: float) -> Tensor:
    product = torch.empty_like(g_NKK).baddbmm_(g_NKK, g_NKK, beta=0, alpha=factor)
    product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product
