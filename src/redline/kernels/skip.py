"""Long skip connections: an earlier state of the residual stream, weighted and added to it, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.dispatch import op


@op(triton="skip:add_skip")
def add_skip(x: Tensor, delta: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """Return x + delta + weight·state, rounded once; `weight` is a scalar on the device."""
    return (x.float() + delta.float() + weight * state.float()).to(x.dtype)


@op(triton="skip:add_skip_backward")
def add_skip_backward(grad: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `state` and, in float32, of `weight`. Those of x and delta are `grad` itself."""
    grad_float = grad.float()
    return (weight * grad_float).to(grad.dtype), torch.sum(grad_float * state.float())
