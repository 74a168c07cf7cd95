"""Symmetric products of a batch of matrices: half of their tiles are enough. Triton on a GPU, torch elsewhere.

X·Xᵀ or Xᵀ·X, and the square of a symmetric matrix, each plus a multiple of the identity: what a polynomial of Gram
matrices is made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.muon import by_triton


def _by_triton(x: Tensor) -> bool:
    """float32 keeps the precision of torch's matmuls."""
    return x.dtype == torch.bfloat16 and by_triton(x.device)


def gram(x_NRC: Tensor, *, tall: bool, diagonal: float) -> Tensor:
    """X·Xᵀ + diagonal·I of each matrix [N, R, R]; of a tall one Xᵀ·X [N, C, C]."""
    if _by_triton(x_NRC):
        from redline.kernels import symmetric_triton

        return symmetric_triton.gram(x_NRC, tall=tall, diagonal=diagonal)
    return reference_gram(x_NRC, tall=tall, diagonal=diagonal)


def square(g_NKK: Tensor, *, factor: float, diagonal: float) -> Tensor:
    """factor·G² + diagonal·I of each symmetric matrix."""
    if _by_triton(g_NKK):
        from redline.kernels import symmetric_triton

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
