"""SwiGLU (arXiv 2002.05202) and its gradient, one pass each: Triton on a GPU, plain torch elsewhere.

Gate and up lie side by side in one row, as the merged projection writes them. The gradient takes their place: they
are not needed after it, and a second buffer of that size would be the largest of the block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(h_N2F: Tensor) -> Tensor:
    """silu(gate)·up [N, F]; gate is the first half of the columns. Rounded once, from float32."""
    if h_N2F.is_cuda:
        from redline.kernels.triton import swiglu as swiglu_triton

        return swiglu_triton.swiglu(h_N2F)
    return reference_swiglu(h_N2F)


def swiglu_backward_(grad_s_NF: Tensor, h_N2F: Tensor) -> Tensor:
    """Overwrites h with its gradient, and returns it."""
    if h_N2F.is_cuda:
        from redline.kernels.triton import swiglu as swiglu_triton

        return swiglu_triton.swiglu_backward_(grad_s_NF, h_N2F)
    return reference_swiglu_backward_(grad_s_NF, h_N2F)


def reference_swiglu(h_N2F: Tensor) -> Tensor:
    gate, up = h_N2F.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h_N2F.dtype)


def reference_swiglu_backward_(grad_s_NF: Tensor, h_N2F: Tensor) -> Tensor:
    grad, (gate, up) = grad_s_NF.float(), h_N2F.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return h_N2F.copy_(torch.cat((grad_gate, grad * gate * sigmoid), -1))
