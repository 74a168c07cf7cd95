"""The product with a low-rank adapter beside it, and its gradients, written out.

A quantised base is dequantised in the forward and again in the backward, each time into a matrix that is freed as soon
as it has been multiplied. No buffer is shared between layers: the allocator hands the same memory to the next layer
anyway, in stream order, and nothing has to be known about who still reads it when a checkpointed block runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.float8 import Float8, input_gradient8, linear8
from redline.kernels.low_rank import Dropped, narrow, narrow_gradient, spread
from redline.kernels.matmul import weight_gradient
from redline.models.frozen import FrozenMatrix


class Adapted(NamedTuple):
    """A part that has an adapter: its rows of the output, its columns of x·Aᵀ."""

    rows: slice
    columns: slice


class LowRank(NamedTuple):
    """What the product needs besides tensors that have gradients."""

    base: FrozenMatrix
    bias: Tensor | None
    scale: float  # of the adapters, with what dropout leaves out made up for
    dropped: Dropped | None
    adapters: tuple[Adapted, ...]


def low_rank(x_NI: Tensor, how: LowRank, a_RI: Tensor | None, bs_OR: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The product, and x·Aᵀ for the backward."""
    dtype, outputs = x_NI.dtype, how.base.shape[0]
    # the adapters first, the base added to them: one rounding, and nothing a checkpoint kept is written over
    adapted = sum(adapter.rows.stop - adapter.rows.start for adapter in how.adapters)
    new = torch.empty if adapted == outputs else torch.zeros
    y_NO = new(x_NI.shape[0], outputs, dtype=dtype, device=x_NI.device)
    xa_NR = None
    if a_RI is not None:
        a = a_RI.to(dtype)
        xa_NR = x_NI @ a.T if how.dropped is None else narrow(x_NI, a, how.dropped)
        for adapter, b in zip(how.adapters, bs_OR, strict=True):
            torch.mm(xa_NR[:, adapter.columns], _scaled(b, how, dtype).T, out=y_NO[:, adapter.rows])
    if how.bias is not None:
        y_NO += how.bias
    return y_NO.addmm_(x_NI, how.base.dense(dtype).T), xa_NR


def low_rank_backward(
    grad_NO: Tensor,
    x_NI: Tensor | None,
    xa_NR: Tensor | None,
    how: LowRank,
    a_RI: Tensor | None,
    bs_OR: Sequence[Tensor],
    *,
    of_x: bool = True,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, unless it needs none, of A, and of each B."""
    dtype = grad_NO.dtype
    if a_RI is None or x_NI is None or xa_NR is None:
        return (grad_NO @ how.base.dense(dtype),)
    grad_x, grad_bs, a = None, [], a_RI.to(dtype)
    grad_xa = torch.empty_like(xa_NR)
    for adapter, b in zip(how.adapters, bs_OR, strict=True):
        grad = grad_NO[:, adapter.rows]
        torch.mm(grad, _scaled(b, how, dtype), out=grad_xa[:, adapter.columns])
        grad_bs.append(weight_gradient(grad, xa_NR[:, adapter.columns]).mul_(how.scale))
    if of_x:
        grad_x = grad_xa @ a if how.dropped is None else spread(grad_xa, a, how.dropped)
        grad_x.addmm_(grad_NO, how.base.dense(dtype))
    if how.dropped is None:
        return grad_x, weight_gradient(grad_xa, x_NI), *grad_bs
    return grad_x, narrow_gradient(grad_xa, x_NI, how.dropped), *grad_bs


def low_rank8(x: Float8, how: LowRank, a_RI: Tensor | None, bs_OR: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The same with the base's product in fp8; the adapters' have their own matrices in bf16."""
    assert x.row is not None
    y_NO = linear8(x, how.base.rows8())
    if how.bias is not None:
        y_NO += how.bias
    if a_RI is None:
        return y_NO, None
    xa_NR = narrow(x.row, a_RI.to(y_NO.dtype), how.dropped, x.unscale)
    for adapter, b in zip(how.adapters, bs_OR, strict=True):
        y_NO[:, adapter.rows].addmm_(xa_NR[:, adapter.columns], _scaled(b, how, y_NO.dtype).T)
    return y_NO, xa_NR


def low_rank_backward8(
    grad: Float8,
    x_NI: Tensor | None,
    unscale: Tensor | None,
    xa_NR: Tensor | None,
    how: LowRank,
    a_RI: Tensor | None,
    bs_OR: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """x in fp8, as it was stored for the forward."""
    assert grad.row is not None
    grad_x = input_gradient8(grad, how.base.columns8())
    if a_RI is None or x_NI is None or xa_NR is None:
        return (grad_x,)
    grad_bs, grad_xa = [], torch.empty_like(xa_NR)
    for adapter, b in zip(how.adapters, bs_OR, strict=True):
        part = grad.row[:, adapter.rows]
        grad_xa[:, adapter.columns] = narrow(part, _scaled(b, how, xa_NR.dtype).T, None, grad.unscale)
        grad_b = narrow_gradient(xa_NR[:, adapter.columns], part, None, grad.unscale)
        grad_bs.append(grad_b.mul_(how.scale).T.contiguous())
    grad_a = narrow_gradient(grad_xa, x_NI, how.dropped, unscale)
    return spread(grad_xa, a_RI.to(grad_xa.dtype), how.dropped, grad_x), grad_a, *grad_bs


def _scaled(b_OR: Tensor, how: LowRank, dtype: torch.dtype) -> Tensor:
    return (b_OR * how.scale).to(dtype)
