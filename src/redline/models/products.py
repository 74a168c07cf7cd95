"""The four matmuls of a fused block: what each multiplies by, what it keeps for its backward, and what it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from redline.kernels.float8 import Float8
from redline.models.float8 import How
from redline.models.layers import Linear
from redline.models.lora import LoraLinear
from redline.models.low_rank import LowRank, low_rank, low_rank8, low_rank_backward, low_rank_backward8
from redline.models.operands import Operand, input_gradient, linear, pack, stored, unpack, weight_gradient

Kept = list[Tensor | None]


class Product(Protocol):
    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What has a gradient."""

    def forward(self, x: Operand, wide: torch.dtype) -> tuple[Tensor, Kept]:
        """x·Wᵀ, and what the backward needs."""

    def backward(self, grad: Operand, kept: Kept) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Gradients of x and of the parameters."""


@dataclass(frozen=True)
class Dense:
    """A weight that learns, in bf16 or fp8."""

    weight: Tensor
    how: How
    parts: int  # stored merged

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, x: Operand, wide: torch.dtype) -> tuple[Tensor, Kept]:
        weight = stored(self.weight, wide, self.how)
        return linear(x, weight, self.weight), pack(x, weight)

    def backward(self, grad: Operand, kept: Kept) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, weight = unpack(kept)
        of_weight = weight_gradient(grad, x, self.parts)
        return input_gradient(grad, weight), (of_weight,)


@dataclass(frozen=True)
class Adapted:
    """A frozen weight with adapters that learn."""

    how: LowRank
    a: Tensor | None
    bs: tuple[Tensor, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.a is None else (self.a, *self.bs)

    def forward(self, x: Operand, wide: torch.dtype) -> tuple[Tensor, Kept]:
        if isinstance(x, Float8):
            y, narrow = low_rank8(x, self.how, self.a, self.bs)
            return y, [narrow, *((None, None) if self.a is None else (x.row, x.unscale))]
        y, narrow = low_rank(x, self.how, self.a, self.bs)
        return y, [narrow, None if self.a is None else x]

    def backward(self, grad: Operand, kept: Kept) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        found: tuple[Tensor | None, ...]
        if isinstance(grad, Float8):
            narrow, x, unscale = kept
            found = low_rank_backward8(grad, x, unscale, narrow, self.how, self.a, self.bs)
        else:
            narrow, x = kept
            found = low_rank_backward(grad, x, narrow, self.how, self.a, self.bs)
        assert found[0] is not None
        return found[0], found[1:]


def product(module: nn.Module, how: How, parts: int = 1) -> Product:
    """Of a block's linear, once for each pass: dropout is drawn here."""
    if isinstance(module, LoraLinear):
        return Adapted(module.drawn(), module.lora_A, module.matrices_b())
    assert isinstance(module, Linear)
    return Dense(module.weight, how, parts)
