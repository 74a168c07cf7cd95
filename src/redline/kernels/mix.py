"""An earlier state of the stream, weighted and added to it: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor


def mix(x: Tensor, delta: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """x + delta + weight·state, rounded once; the weight is one number on the device."""
    if x.is_cuda:
        from redline.kernels.triton import mix as mix_triton

        return mix_triton.mix(x, delta, state, weight)
    return reference_mix(x, delta, state, weight)


def mix_backward(grad: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the state and, in float32, of the weight; those of x and delta are `grad` itself."""
    if grad.is_cuda:
        from redline.kernels.triton import mix as mix_triton

        return mix_triton.mix_backward(grad, state, weight)
    return reference_mix_backward(grad, state, weight)


def reference_mix(x: Tensor, delta: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    return (x.float() + delta.float() + weight * state.float()).to(x.dtype)


def reference_mix_backward(grad: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = grad.float()
    return (weight * wide).to(grad.dtype), torch.sum(wide * state.float())
