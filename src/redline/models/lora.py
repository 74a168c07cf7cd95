"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen base, which may be kept in NF4 (QLoRA, arXiv 2305.14314).

The backward is written out: it keeps the input and its product with A, and no gradient of the base is ever computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from redline.errors import UsageError, UserError
from redline.kernels.low_rank import Dropped, keep_probability
from redline.models.frozen import FrozenMatrix
from redline.models.low_rank import Adapted, LowRank, low_rank, low_rank_backward


class LoraLinear(nn.Module):
    """x·Wᵀ + scale·dropout(x)·Aᵀ·Bᵀ, with an adapter for any of the parts merged in W.

    A and B are float32 masters, computed in the input's precision. The parts' A lie one below the other, so that one
    matmul, and one draw of dropout, serves them all.
    """

    bias: Tensor | None

    def __init__(
        self,
        base: FrozenMatrix,
        parts: Mapping[str, int],
        adapted: Collection[str],
        r: int,
        alpha: float,
        dropout: float,
        bias: Tensor | None = None,
        rslora: bool = False,
    ) -> None:
        super().__init__()
        unknown = [name for name in adapted if name not in parts]
        if unknown:
            raise UsageError(f"There is no {', '.join(unknown)} to adapt here.", fix=f"There are: {', '.join(parts)}.")
        if r < 1 or not 0 <= dropout < 1:
            raise UsageError(f"LoRA takes a rank of 1 or more and a dropout in [0, 1), not {r} and {dropout}.")
        outputs, inputs = base.shape
        assert sum(parts.values()) == outputs
        self.base, self.r, self.dropout, self.product = base, r, dropout, _product
        self.scale = alpha / (r**0.5 if rslora else r)
        self.splits = tuple(parts.values())
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.adapters: dict[str, Adapted] = {}
        above = 0
        for name, rows in parts.items():
            if name in adapted:
                first = len(self.adapters) * r
                self.adapters[name] = Adapted(slice(above, above + rows), slice(first, first + r))
            above += rows
        rank, device = len(self.adapters) * r, base.device
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=device)) if rank else None
        self.lora_B = nn.ParameterDict()
        for name in self.adapters:
            self.lora_B[name] = nn.Parameter(torch.empty(parts[name], r, device=device))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """As PEFT does: A uniform in ±1/√in, B zero. Drawn on the CPU: a seed gives the same model on every device."""
        for name in self.adapters:
            a, b = self._matrices(name)
            drawn = torch.empty(a.shape, device="cpu")
            a.copy_(nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator))
            b.zero_()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self.product(self, rows)
        return out.view(*x.shape[:-1], out.shape[1])

    def before_compiling(self) -> None:
        """Where something learns, each pass has a seed of its own, and a compiler would make a graph for each; and in
        NF4 the backward reads the matrix again."""
        if self.lora_A is not None or self.base.plain is None:
            self.product = torch.compiler.disable(_product)  # not before: it takes a second to import

    def matrices_b(self) -> tuple[Tensor, ...]:
        """Those of the adapted parts, in their order."""
        return tuple(self.lora_B[name] for name in self.adapters)

    def drawn(self) -> LowRank:
        """How one pass multiplies: with a dropout of its own."""
        p, dropped = self.dropout if self.training else 0.0, None
        if p and self.lora_A is not None:
            # from the CPU's generator, which a checkpointed block restores: no mask is kept, and no device waited for
            dropped = Dropped(p, int(torch.randint(2**62, (), device="cpu")))
        return LowRank(self.base, self.bias, self.scale / keep_probability(p), dropped, tuple(self.adapters.values()))

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The base, dequantised, with the adapters added, in float32."""
        merged = self.base.dense(torch.float32).clone()
        for name, adapter in self.adapters.items():
            a, b = self._matrices(name)
            merged[adapter.rows].addmm_(b, a, alpha=self.scale)
        return merged

    def adapter_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Copies, under PEFT's names; `prefix` is what the parts' modules lie in: `base_model.model.….self_attn`."""
        return {name: matrix.clone() for name, matrix in self._named(prefix).items()}

    @torch.no_grad()
    def load_adapter_tensors(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """From what `adapter_tensors` or PEFT wrote; other names in there are not looked at."""
        for name, mine in self._named(prefix).items():
            if name not in tensors or tensors[name].shape != mine.shape:
                there = f"of shape {list(tensors[name].shape)}" if name in tensors else "missing"
                raise UserError(
                    f"{name} is {there}; this model's is {list(mine.shape)}.",
                    fix="Load the adapter with the lora.r and lora.target_modules that it was trained with.",
                )
            mine.copy_(tensors[name])

    def _named(self, prefix: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self.adapters:
            a, b = self._matrices(part)
            found |= {_peft(prefix, part, "A"): a.detach(), _peft(prefix, part, "B"): b.detach()}
        return found

    def _matrices(self, name: str) -> tuple[Tensor, Tensor]:
        assert self.lora_A is not None
        return self.lora_A[self.adapters[name].columns], self.lora_B[name]


def _peft(prefix: str, part: str, which: str) -> str:
    module = {"out": "o"}.get(part, part)  # the others are called here as they are in a Llama
    return f"{prefix}.{module}_proj.lora_{which}.weight"


def _product(linear: LoraLinear, x_NI: Tensor) -> Tensor:
    if linear.lora_A is None and linear.base.plain is not None:  # nothing is kept that is not there already
        bias = None if linear.bias is None else linear.bias.to(x_NI.dtype)
        return F.linear(x_NI, linear.base.dense(x_NI.dtype), bias)
    product: Tensor = _LowRank.apply(x_NI, linear.drawn(), linear.lora_A, *linear.matrices_b())
    return product


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, how: LowRank, a_RI: Tensor | None, *bs_OR: Tensor) -> Tensor:
        y_NO, xa_NR = low_rank(x_NI, how, a_RI, bs_OR)
        ctx.save_for_backward(x_NI if a_RI is not None else None, xa_NR, a_RI, *bs_OR)
        ctx.how = how
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        x_NI, xa_NR, a_RI, *bs_OR = ctx.saved_tensors
        of_x = ctx.needs_input_grad[0]
        grad_x, *grads = low_rank_backward(grad_NO, x_NI, xa_NR, ctx.how, a_RI, bs_OR, of_x=of_x)
        return grad_x, None, *(grads or [None])
