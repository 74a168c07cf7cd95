"""The weight gradient in float32, and the dtype of each compute precision."""

from __future__ import annotations

import torch
from torch import Tensor

# by the recipe key train.precision; in fp8 only the matmuls run in eight bits, everything else in bf16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}


def weight_gradient(gradient_NO: Tensor, input_NI: Tensor, parts: int = 1) -> Tensor:
    """Return gradientᵀ·input [O, I] in float32.

    A sum over so many tokens overflows fp16, and bf16 would round it. A wide output can be computed in `parts`: two
    fill the card better than one, by 5 to 9 % on an H200 at 5376×1024.
    """
    if gradient_NO.is_cuda and gradient_NO.dtype != torch.float32:
        total = torch.empty(gradient_NO.shape[1], input_NI.shape[1], device=input_NI.device, dtype=torch.float32)
        for part, out in zip(gradient_NO.chunk(parts, 1), total.chunk(parts), strict=True):
            torch.mm(part.T, input_NI, out_dtype=torch.float32, out=out)
        return total
    product = gradient_NO.T @ input_NI  # torch has no out_dtype on a CPU
    return product.float() if product.dtype in (torch.bfloat16, torch.float16) else product
