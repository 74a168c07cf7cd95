"""Activations of the feed-forward layers and their gradients, one pass over memory each: SwiGLU and squared ReLU.

Each has four operations: forward and backward in the compute precision, and the same two straight to fp8. The backward
in the compute precision overwrites its input, which is not needed after it: a second buffer of that size would be the
largest of the block.

To add an activation: list it in planning/shapes.py (which needs no torch), write it here in plain torch, and add it to
ACTIVATIONS. A Triton version is optional; without one, an operation is the plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.dispatch import op
from redline.kernels.float8 import Float8, Scale, quantise


@dataclass(frozen=True)
class Activation:
    """The functions of one activation. h is [N, F], or [N, 2F] with gate and up side by side for a gated one."""

    plain: Callable[[Tensor], Tensor]  # by torch's own operators, for autograd and torch.compile
    forward: Callable[[Tensor], Tensor]  # h → s [N, F]
    backward_: Callable[[Tensor, Tensor], Tensor]  # grad_s, h → grad_h, in the place of h
    forward8: Callable[[Tensor, Scale], Float8]
    backward8: Callable[[Tensor, Tensor, Scale], Float8]  # leaves h as it is


# ----------------------------------------------------------------------------------------------------
# SwiGLU (arXiv 2002.05202). Gate and up are the two halves of a row, as the merged projection writes them.


def plain_swiglu(h: Tensor) -> Tensor:
    """Return silu(gate)·up in the precision of h, by operators that autograd and torch.compile know."""
    if h.device.type == "cpu" and not torch.compiler.is_compiling():
        out: Tensor = _SwiGLU.apply(h)
        return out
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """The same operators, with a backward that writes both halves of the gradient where they belong.

    On a CPU autograd's concatenation of the halves takes a sixth of the operation's time.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(h, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        h, activated = ctx.saved_tensors
        (gate, up), g_h = h.chunk(2, -1), torch.empty_like(h)
        g_gate, g_up = g_h.chunk(2, -1)
        torch.mul(grad, activated, out=g_up)
        torch.mul(grad, up, out=g_gate)
        torch.ops.aten.silu_backward.grad_input(g_gate, gate, grad_input=g_gate)
        return g_h


@op(triton="activations:swiglu")
def swiglu(h_N2F: Tensor) -> Tensor:
    """Return silu(gate)·up [N, F], computed in float32 and rounded once; gate is the first half of the columns."""
    gate, up = h_N2F.float().chunk(2, -1)
    return (F.silu(gate) * up).to(h_N2F.dtype)


@op(triton="activations:swiglu_backward_")
def swiglu_backward_(grad_s_NF: Tensor, h_N2F: Tensor) -> Tensor:
    """Overwrite h with its gradient, and return it."""
    grad, (gate, up) = grad_s_NF.float(), h_N2F.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return h_N2F.copy_(torch.cat((grad_gate, grad * gate * sigmoid), -1))


@op(triton="activations:swiglu8")
def swiglu8(h_N2F: Tensor, scale: Scale) -> Float8:
    """Return silu(gate)·up [N, F] in fp8, rounded once from float32."""
    return quantise.reference(swiglu.reference(h_N2F.float()), scale)


@op(triton="activations:swiglu_backward8")
def swiglu_backward8(grad_s_NF: Tensor, h_N2F: Tensor, scale: Scale) -> Float8:
    """Return the gradient of h [N, 2F] in fp8; h is not changed."""
    return quantise.reference(swiglu_backward_.reference(grad_s_NF.float(), h_N2F.float().clone()), scale)


# ----------------------------------------------------------------------------------------------------
# Squared ReLU (Primer, arXiv 2109.08668).


def plain_relu2(h: Tensor) -> Tensor:
    """Return relu(h)² in the precision of h, by operators that autograd and torch.compile know."""
    return F.relu(h).square()


@op(triton="activations:relu2")
def relu2(h_NF: Tensor) -> Tensor:
    """Return relu(h)², computed in float32 and rounded once."""
    return h_NF.float().relu().square().to(h_NF.dtype)


@op(triton="activations:relu2_backward_")
def relu2_backward_(grad_s_NF: Tensor, h_NF: Tensor) -> Tensor:
    """Overwrite h with its gradient 2·relu(h)·grad, and return it.

    Where h is negative this is 0·grad, so a gradient of NaN or infinity stays visible there. Autograd's select would
    hide it from the check that skips a bad update.
    """
    return h_NF.copy_(h_NF.float().relu() * grad_s_NF.float() * 2.0)


@op(triton="activations:relu2_8")
def relu2_8(h_NF: Tensor, scale: Scale) -> Float8:
    """Return relu(h)² in fp8, rounded once from float32."""
    return quantise.reference(relu2.reference(h_NF.float()), scale)


@op(triton="activations:relu2_backward8")
def relu2_backward8(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale) -> Float8:
    """Return the gradient of h in fp8; h is not changed."""
    return quantise.reference(relu2_backward_.reference(grad_s_NF, h_NF.float().clone()), scale)


ACTIVATIONS = {
    "swiglu": Activation(plain_swiglu, swiglu, swiglu_backward_, swiglu8, swiglu_backward8),
    "relu2": Activation(plain_relu2, relu2, relu2_backward_, relu2_8, relu2_backward8),
}
