"""Matmuls of the backward."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_gradient(gradient_NO: Tensor, input_NI: Tensor) -> Tensor:
    """gradientᵀ·input in float32: over so many tokens a sum leaves fp16's range, and bf16 would round it."""
    if gradient_NO.is_cuda and gradient_NO.dtype != torch.float32:
        return torch.mm(gradient_NO.T, input_NI, out_dtype=torch.float32)
    product = gradient_NO.T @ input_NI
    return product.float() if product.dtype in (torch.bfloat16, torch.float16) else product
