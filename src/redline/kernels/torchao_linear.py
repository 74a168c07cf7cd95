"""Linear layers in fp8 by torchao, for the blocks that torch.compile fuses: dynamic scales, one per tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from redline.errors import install_hint

Float8Linear = Callable[[Tensor, Tensor], Tensor]


def missing() -> str:
    """Why torchao cannot serve; empty when it can."""
    return "" if find_spec("torchao") is not None else f"torchao is not installed ({install_hint('fp8')})"


def float8_linear() -> Float8Linear:
    """x·Wᵀ whose three matmuls run in fp8, for a weight of any precision."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Module
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    with torch.device("meta"):
        like = nn.Linear(16, 16, bias=False)
    config = Float8LinearConfig()
    how = Module.from_float(like, config).linear_mm_config

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), how, config)
        return out

    return linear
