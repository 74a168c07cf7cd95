"""Squared ReLU (arXiv 2109.08668) and its gradient, one pass each, in half precision or straight to fp8.

Triton on a GPU, plain torch elsewhere. In half precision the gradient takes its input's place, which is not needed
after it.
"""

from __future__ import annotations

from torch import Tensor

from redline.kernels.float8 import Float8, Scale, reference_quantise


def relu2(h_NF: Tensor) -> Tensor:
    """relu(h)². Rounded once, from float32."""
    if h_NF.is_cuda:
        from redline.kernels.triton import relu2 as relu2_triton

        return relu2_triton.relu2(h_NF)
    return reference_relu2(h_NF)


def relu2_backward_(grad_s_NF: Tensor, h_NF: Tensor) -> Tensor:
    """Overwrites h with its gradient 2·relu(h)·grad, and returns it.

    Where h is negative this is 0·grad: a gradient that is not finite is seen there too, which autograd would hide.
    """
    if h_NF.is_cuda:
        from redline.kernels.triton import relu2 as relu2_triton

        return relu2_triton.relu2_backward_(grad_s_NF, h_NF)
    return reference_relu2_backward_(grad_s_NF, h_NF)


def relu2_8(h_NF: Tensor, scale: Scale) -> Float8:
    """As relu2, in fp8 both ways round."""
    if h_NF.is_cuda:
        from redline.kernels.triton import relu2 as relu2_triton

        return relu2_triton.relu2_8(h_NF, scale)
    return reference_relu2_8(h_NF, scale)


def relu2_backward8(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale) -> Float8:
    """As relu2_backward_, but h is left alone."""
    if h_NF.is_cuda:
        from redline.kernels.triton import relu2 as relu2_triton

        return relu2_triton.relu2_backward8(grad_s_NF, h_NF, scale)
    return reference_relu2_backward8(grad_s_NF, h_NF, scale)


def reference_relu2(h_NF: Tensor) -> Tensor:
    return h_NF.float().relu().square().to(h_NF.dtype)


def reference_relu2_backward_(grad_s_NF: Tensor, h_NF: Tensor) -> Tensor:
    return h_NF.copy_(h_NF.float().relu() * grad_s_NF.float() * 2.0)


def reference_relu2_8(h_NF: Tensor, scale: Scale) -> Float8:
    return reference_quantise(reference_relu2(h_NF.float()), scale)


def reference_relu2_backward8(grad_s_NF: Tensor, h_NF: Tensor, scale: Scale) -> Float8:
    return reference_quantise(reference_relu2_backward_(grad_s_NF, h_NF.float().clone()), scale)
