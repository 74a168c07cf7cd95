"""What the matmuls of a fused block multiply: each operand in bf16 or in fp8, made by the kernel that computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.float8 import (
    Float8,
    Scale,
    add_rms_norm8,
    input_gradient8,
    linear8,
    merge_rotated_gradients8,
    quantise,
    rms_norm_backward8,
    swiglu8,
    swiglu_backward8,
    weight_gradient8,
)
from redline.kernels.float8_mean import mean_correction
from redline.kernels.matmul import weight_gradient as plain_weight_gradient
from redline.kernels.relu2 import relu2, relu2_8, relu2_backward8, relu2_backward_
from redline.kernels.rms_norm import add_rms_norm, rms_norm_backward
from redline.kernels.rotary import merge_rotated_gradients
from redline.kernels.swiglu import swiglu, swiglu_backward_
from redline.models.float8 import How, Probe

Operand = Tensor | Float8


def stored(x: Tensor, dtype: torch.dtype, how: How) -> Operand:
    """A weight, or what no kernel of ours made."""
    return quantise(x, how) if isinstance(how, Scale) else _seen(x.to(dtype), how)


def normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, how: How) -> tuple[Tensor, Operand, Tensor]:
    """The sum, that normed, 1/rms."""
    if isinstance(how, Scale):
        return add_rms_norm8(x, delta, weight, eps, how)
    total, out, rstd = add_rms_norm(x, delta, weight, eps)
    return total, _seen(out, how), rstd


def normed_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, past: Tensor | None, how: How
) -> tuple[Tensor, Operand, Tensor]:
    """The gradient of the sum, the same as an operand, the weight's gradient."""
    if isinstance(how, Scale):
        return rms_norm_backward8(grad, x, rstd, weight, past, how)
    out, grad_weight = rms_norm_backward(grad, x, rstd, weight, past)
    return out, _seen(out, how), grad_weight


def activated(h: Tensor, mlp: str, how: How) -> Operand:
    if mlp == "relu2":
        return relu2_8(h, how) if isinstance(how, Scale) else _seen(relu2(h), how)
    return swiglu8(h, how) if isinstance(how, Scale) else _seen(swiglu(h), how)


def activated_backward(grad: Tensor, h: Tensor, mlp: str, how: How) -> Operand:
    """May overwrite h."""
    if mlp == "relu2":
        return relu2_backward8(grad, h, how) if isinstance(how, Scale) else _seen(relu2_backward_(grad, h), how)
    return swiglu_backward8(grad, h, how) if isinstance(how, Scale) else _seen(swiglu_backward_(grad, h), how)


def merged_backward(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, how: How) -> Operand:
    if isinstance(how, Scale):
        return merge_rotated_gradients8(q, k, v, cos, sin, how)
    return _seen(merge_rotated_gradients(q, k, v, cos, sin).flatten(0, 1), how)


def linear(x: Operand, weight: Operand, exact: Tensor) -> Tensor:
    """x·Wᵀ; `exact` is the weight as it was before it was rounded."""
    if isinstance(x, Float8) and isinstance(weight, Float8):
        return linear8(x, weight, mean_correction(x, weight, exact))
    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    return x @ weight.T


def input_gradient(grad: Operand, weight: Operand) -> Tensor:
    if isinstance(grad, Float8) and isinstance(weight, Float8):
        return input_gradient8(grad, weight)
    assert isinstance(grad, Tensor)
    assert isinstance(weight, Tensor)
    return grad @ weight


def weight_gradient(grad: Operand, x: Operand, parts: int = 1) -> Tensor:
    if isinstance(grad, Float8) and isinstance(x, Float8):
        return weight_gradient8(grad, x)
    assert isinstance(grad, Tensor)
    assert isinstance(x, Tensor)
    return plain_weight_gradient(grad, x, parts)


def pack(*operands: Operand) -> list[Tensor | None]:
    """For autograd to keep: of fp8 the columns alone, which is all that the backward multiplies."""
    flat: list[Tensor | None] = []
    for operand in operands:
        flat += (operand.column, operand.unscale) if isinstance(operand, Float8) else (operand, None)
    return flat


def unpack(flat: list[Tensor | None]) -> list[Operand]:
    operands: list[Operand] = []
    for tensor, unscale in zip(flat[::2], flat[1::2], strict=True):
        assert tensor is not None
        operands.append(tensor if unscale is None else Float8(None, tensor, unscale))
    return operands


def _seen(x: Tensor, how: How) -> Tensor:
    if isinstance(how, Probe):
        largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
        torch.maximum(how.amax, largest, out=how.amax)
    return x
