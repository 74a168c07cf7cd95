"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen base, which may be kept in NF4 (QLoRA, arXiv 2305.14314).

The backward is written out: it keeps the input and its product with A, and no gradient of the base is ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from redline.errors import UsageError, UserError
from redline.kernels.float8 import Float8, Scale, current_scale, input_gradient8, linear8, quantise, scale_for, turned
from redline.kernels.low_rank import Dropped, keep_probability, narrow, narrow_gradient, spread
from redline.kernels.matmul import weight_gradient
from redline.kernels.nf4 import dense_nf4, largest_magnitude, quantise_nf4

# ----------------------------------------------------------------------------------------------------
# A base weight that never learns, plain or in NF4, and what matmuls read of it: bf16, or fp8.


class FrozenMatrix(nn.Module):
    """A base weight [out, in], plain or in NF4, whose parts lie one below the other.

    In NF4 each part is a matrix of its own, for the mean of its scales is: merged with another it would not be
    bitsandbytes' any more. It is moved with its model but never cast, trained or saved.
    """

    def __init__(
        self,
        weight: Tensor,
        rows: Sequence[int] = (),
        *,
        quantise: bool = False,
        double: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Of a weight whose parts have so many rows each; kept in `dtype`, unless it is quantised."""
        super().__init__()
        self.shape = (weight.shape[0], weight.shape[1])
        self.rows = tuple(rows) or (weight.shape[0],)
        parts = weight.detach().split(self.rows) if quantise else ()
        self.quantised = [quantise_nf4(part, double=double) for part in parts]
        self.plain = None if quantise else weight.detach().to(dtype or weight.dtype)
        self._scale: Scale | None = None

    @property
    def device(self) -> torch.device:
        return self.quantised[0].codes.device if self.plain is None else self.plain.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, for reading: the stored one where it has that dtype, a new one otherwise."""
        if self.plain is not None:
            return self.plain.to(dtype)
        return dense_nf4(self.quantised, dtype)

    def rows8(self) -> Float8:
        """For x·Wᵀ."""
        if self.plain is not None:
            return quantise(self.plain, self.scale)
        return Float8(dense_nf4(self.quantised, torch.float8_e4m3fn, self.scale.factor), None, self.scale.unscale)

    def columns8(self) -> Float8:
        """For grad·W."""
        row = self.rows8().row
        assert row is not None
        return Float8(None, turned(row), self.scale.unscale)

    @property
    def scale(self) -> Scale:
        """In fp8; one for all parts, which one matmul reads. It stays: the weight does."""
        if self._scale is None:
            parts = [largest_magnitude(part) for part in self.quantised]
            found = scale_for(torch.stack(parts).amax()) if self.plain is None else current_scale(self.plain)
            self._scale = found._replace(rows_alone=True)
        return self._scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenMatrix:
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        self.plain = None if self.plain is None else self.plain.to(device)
        self.quantised = [part.to(device) for part in self.quantised]
        self._scale = None
        return self


# ----------------------------------------------------------------------------------------------------
# The product with a low-rank adapter beside it, and its gradients, written out.
#
# A quantised base is dequantised in the forward and again in the backward, each time into a matrix that is freed as
# soon as it has been multiplied. No buffer is shared between layers: the allocator hands the same memory to the next
# layer anyway, in stream order, and nothing has to be known about who still reads it when a checkpointed block runs
# again.


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
