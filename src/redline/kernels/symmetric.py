"""Symmetric products of a batch of matrices: half of their tiles are enough. Triton on a GPU, torch elsewhere.

X·Xᵀ or Xᵀ·X, and the square of a symmetric matrix, each plus a multiple of the identity: what a polynomial of Gram
matrices is made of.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _by_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Cards before Ampere have no bf16 units; float32 keeps the precision of torch's matmuls."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and bool(find_spec("triton"))


def gram(x_NRC: Tensor, *, tall: bool, diagonal: float) -> Tensor:
    """X·Xᵀ + diagonal·I of each matrix [N, R, R]; of a tall one Xᵀ·X [N, C, C]."""
    if _by_triton(x_NRC.device, x_NRC.dtype):
        from redline.kernels import symmetric_triton

        return symmetric_triton.gram(x_NRC, tall=tall, diagonal=diagonal)
    return reference_gram(x_NRC, tall=tall, diagonal=diagonal)


def square(g_NKK: Tensor, *, factor: float, diagonal: float) -> Tensor:
    """factor·G² + diagonal·I of each symmetric matrix."""
    if _by_triton(g_NKK.device, g_NKK.dtype):
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
