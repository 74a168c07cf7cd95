"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen base, which may be stored in NF4 (QLoRA, arXiv 2305.14314).

The backward is written by hand: it saves the input and its product with A, and never computes a gradient of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from redline.errors import UsageError, UserError
from redline.kernels.float8 import (
    Float8,
    Scale,
    current_scale,
    input_gradient8,
    linear8,
    quantise,
    scale_for,
    transpose,
)
from redline.kernels.low_rank import (
    Dropout,
    keep_probability,
    project_down,
    project_down_input_gradient,
    project_down_weight_gradient,
)
from redline.kernels.matmul import weight_gradient
from redline.kernels.nf4 import NF4, dense_nf4, largest_magnitude, quantise_nf4

# ----------------------------------------------------------------------------------------------------
# A frozen base weight, plain or in NF4, and the operands that matmuls read of it, in bf16 or fp8.


class FrozenMatrix(nn.Module):
    """A base weight [out, in], plain or in NF4, which merges several matrices along its rows.

    In NF4 each of them is quantised by itself. The mean of its scales is part of the format: merged with another, it
    would no longer be what bitsandbytes makes of it. The weight moves to other devices with its model, but is never
    cast, trained or saved.
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
        """Take a weight whose merged matrices have `rows` rows each; store it in `dtype` unless it is quantised."""
        super().__init__()
        self.shape = (weight.shape[0], weight.shape[1])
        self.rows = tuple(rows) or (weight.shape[0],)
        parts = weight.detach().split(self.rows) if quantise else ()
        self._quantised = [quantise_nf4(part, double=double) for part in parts]
        self._sharded = False
        self.plain: Tensor | None = None if quantise else weight.detach().to(dtype or weight.dtype)
        self._scale: Scale | None = None

    @property
    def quantised(self) -> list[NF4]:
        """The merged matrices in NF4; empty if the weight is stored plain."""
        if not self._sharded:
            return self._quantised
        parts = zip(self._quantised, self.codes, self.scales, strict=True)
        return [
            replace(part, codes=codes.detach(), scales=scales.detach().view(part.scales.dtype))
            for part, codes, scales in parts
        ]

    def as_parameters(self) -> None:
        """Store the weight in frozen parameters, which FSDP shards: the codes and scales of each matrix, or the plain
        one. What is a few bytes per matrix stays as it is.

        Scales are stored as bytes: their number is not that of the weight's rows, and FSDP must not cast them.
        """
        if self._sharded:
            return
        self._sharded = True
        if self.plain is not None:
            self.plain = nn.Parameter(self.plain, requires_grad=False)
        kept = [(part.codes, part.scales.view(torch.uint8)) for part in self._quantised]
        self.codes = nn.ParameterList(nn.Parameter(codes, requires_grad=False) for codes, _ in kept)
        self.scales = nn.ParameterList(nn.Parameter(scales, requires_grad=False) for _, scales in kept)
        nothing = [
            replace(part, codes=part.codes[:0].clone(), scales=part.scales[:0].clone()) for part in self._quantised
        ]
        self._quantised = nothing

    @property
    def device(self) -> torch.device:
        return self.quantised[0].codes.device if self.plain is None else self.plain.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the whole matrix, to be read only: the stored one if it has that dtype, else a new one."""
        if self.plain is not None:
            return self.plain.to(dtype)
        return dense_nf4(self.quantised, dtype)

    def unpack(self, dtype: torch.dtype) -> None:
        """Store the matrix dense: for generation, which would otherwise dequantise all of it for every token."""
        self.plain, self._quantised, self._scale = self.dense(dtype), [], None

    def rows8(self) -> Float8:
        """Return the fp8 operand of x·Wᵀ."""
        if self.plain is not None:
            return quantise(self.plain, self.scale)
        return Float8(dense_nf4(self.quantised, torch.float8_e4m3fn, self.scale.factor), None, self.scale.unscale)

    def columns8(self) -> Float8:
        """Return the fp8 operand of grad·W."""
        row = self.rows8().row
        assert row is not None
        return Float8(None, transpose(row), self.scale.unscale)

    @property
    def scale(self) -> Scale:
        """The fp8 scale of all parts together, since one matmul reads them. Computed once: the weight never changes."""
        if self._scale is None:
            parts = [largest_magnitude(part) for part in self.quantised]
            scale = scale_for(torch.stack(parts).amax()) if self.plain is None else current_scale(self.plain)
            self._scale = scale._replace(rows_alone=True)
        return self._scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenMatrix:
        # The tensors here are no parameters, so nn.Module.to() would miss them. Ask `fn` for the device only: its
        # change of dtype must not touch quantised codes.
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        self._scale = None
        if self._sharded:
            super()._apply(lambda tensor: tensor.to(device), recurse)
            return self
        self.plain = None if self.plain is None else self.plain.to(device)
        self._quantised = [part.to(device) for part in self._quantised]
        return self


# ----------------------------------------------------------------------------------------------------
# The matmul with low-rank adapters, and its gradients, written by hand.
#
# A quantised base is dequantised in the forward and again in the backward, each time into a matrix that is freed as
# soon as it has been multiplied. Layers share no buffer: the allocator reuses the memory for the next layer anyway, in
# stream order, and a shared one could still be read when a checkpointed block runs again.


class AdapterSlices(NamedTuple):
    """Where one adapted matrix lies: its rows of the output, its columns of x·Aᵀ."""

    rows: slice
    columns: slice


class LowRankSpec(NamedTuple):
    """What one pass of the matmul needs besides tensors that get a gradient."""

    base: FrozenMatrix
    bias: Tensor | None
    scale: float  # of the adapters, divided by the share of inputs that dropout keeps
    dropout: Dropout | None
    adapters: tuple[AdapterSlices, ...]


def low_rank(
    x_NI: Tensor, spec: LowRankSpec, a_RI: Tensor | None, bs_OR: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return x·Wᵀ with its adapters, and x·Aᵀ for the backward."""
    dtype, outputs = x_NI.dtype, spec.base.shape[0]
    # The adapters' products first, then the base's matmul adds itself to them: one rounding, and no tensor that
    # gradient checkpointing saved is overwritten.
    adapted = sum(adapter.rows.stop - adapter.rows.start for adapter in spec.adapters)
    new = torch.empty if adapted == outputs else torch.zeros
    y_NO = new(x_NI.shape[0], outputs, dtype=dtype, device=x_NI.device)
    xa_NR = None
    if a_RI is not None:
        a = a_RI.to(dtype)
        xa_NR = x_NI @ a.T if spec.dropout is None else project_down(x_NI, a, spec.dropout)
        for adapter, b in zip(spec.adapters, bs_OR, strict=True):
            torch.mm(xa_NR[:, adapter.columns], _scaled(b, spec, dtype).T, out=y_NO[:, adapter.rows])
    if spec.bias is not None:
        y_NO += spec.bias
    return y_NO.addmm_(x_NI, spec.base.dense(dtype).T), xa_NR


def low_rank_backward(
    grad_NO: Tensor,
    x_NI: Tensor | None,
    xa_NR: Tensor | None,
    spec: LowRankSpec,
    a_RI: Tensor | None,
    bs_OR: Sequence[Tensor],
    *,
    needs_grad_x: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x (None if it needs none), of A, and of each B."""
    dtype = grad_NO.dtype
    if a_RI is None or x_NI is None or xa_NR is None:
        return (grad_NO @ spec.base.dense(dtype),)
    grad_x, grad_bs, a = None, [], a_RI.to(dtype)
    grad_xa = torch.empty_like(xa_NR)
    for adapter, b in zip(spec.adapters, bs_OR, strict=True):
        grad = grad_NO[:, adapter.rows]
        torch.mm(grad, _scaled(b, spec, dtype), out=grad_xa[:, adapter.columns])
        grad_bs.append(weight_gradient(grad, xa_NR[:, adapter.columns]).mul_(spec.scale))
    if needs_grad_x:
        if spec.dropout is None:
            grad_x = grad_xa @ a
        else:
            grad_x = project_down_input_gradient(grad_xa, a, spec.dropout)
        grad_x.addmm_(grad_NO, spec.base.dense(dtype))
    if spec.dropout is None:
        return grad_x, weight_gradient(grad_xa, x_NI), *grad_bs
    return grad_x, project_down_weight_gradient(grad_xa, x_NI, spec.dropout), *grad_bs


def low_rank8(
    x: Float8, spec: LowRankSpec, a_RI: Tensor | None, bs_OR: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Do what low_rank does, with the base's matmul in fp8. The adapters' matmuls read x in fp8 and A, B in bf16."""
    assert x.row is not None
    y_NO = linear8(x, spec.base.rows8())
    if spec.bias is not None:
        y_NO += spec.bias
    if a_RI is None:
        return y_NO, None
    xa_NR = project_down(x.row, a_RI.to(y_NO.dtype), spec.dropout, x.unscale)
    for adapter, b in zip(spec.adapters, bs_OR, strict=True):
        y_NO[:, adapter.rows].addmm_(xa_NR[:, adapter.columns], _scaled(b, spec, y_NO.dtype).T)
    return y_NO, xa_NR


def low_rank_backward8(
    grad: Float8,
    x_NI: Tensor | None,
    unscale: Tensor | None,
    xa_NR: Tensor | None,
    spec: LowRankSpec,
    a_RI: Tensor | None,
    bs_OR: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return the gradients of x, A and each B. x is in fp8, as the forward stored it, with its `unscale`."""
    assert grad.row is not None
    grad_x = input_gradient8(grad, spec.base.columns8())
    if a_RI is None or x_NI is None or xa_NR is None:
        return (grad_x,)
    grad_bs, grad_xa = [], torch.empty_like(xa_NR)
    for adapter, b in zip(spec.adapters, bs_OR, strict=True):
        part = grad.row[:, adapter.rows]
        grad_xa[:, adapter.columns] = project_down(part, _scaled(b, spec, xa_NR.dtype).T, None, grad.unscale)
        grad_b = project_down_weight_gradient(xa_NR[:, adapter.columns], part, None, grad.unscale)
        grad_bs.append(grad_b.mul_(spec.scale).T.contiguous())
    grad_a = project_down_weight_gradient(grad_xa, x_NI, spec.dropout, unscale)
    grad_x = project_down_input_gradient(grad_xa, a_RI.to(grad_xa.dtype), spec.dropout, grad_x)
    return grad_x, grad_a, *grad_bs


def _scaled(b_OR: Tensor, spec: LowRankSpec, dtype: torch.dtype) -> Tensor:
    return (b_OR * spec.scale).to(dtype)


class LoraLinear(nn.Module):
    """x·Wᵀ + scale·dropout(x)·Aᵀ·Bᵀ, with an adapter for any of the matrices that are merged in W.

    A and B are float32 master weights; the product is computed in the input's precision. The A matrices are stacked
    along the rows, so that one matmul and one dropout mask serve all of them.
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
            what = f"This layer has no {', '.join(unknown)} to adapt."
            raise UsageError(what, fix=f"Choose among {', '.join(parts)}.")
        if r < 1 or not 0 <= dropout < 1:
            what = f"lora.r={r} and lora.dropout={dropout} are out of range."
            raise UsageError(what, fix="Use a rank of 1 or more, and a dropout in [0, 1).")
        outputs, inputs = base.shape
        assert sum(parts.values()) == outputs
        self.base, self.r, self.dropout, self.run = base, r, dropout, _adapted_linear
        self.scale = alpha / (r**0.5 if rslora else r)
        self.splits = tuple(parts.values())
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.adapters: dict[str, AdapterSlices] = {}
        above = 0
        for name, rows in parts.items():
            if name in adapted:
                first = len(self.adapters) * r
                self.adapters[name] = AdapterSlices(slice(above, above + rows), slice(first, first + r))
            above += rows
        rank, device = len(self.adapters) * r, base.device
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=device)) if rank else None
        self.lora_B = nn.ParameterDict()
        for name in self.adapters:
            self.lora_B[name] = nn.Parameter(torch.empty(parts[name], r, device=device))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise as PEFT does: A uniform in ±1/√in, B zero.

        Random numbers are drawn on the CPU, so that a seed gives the same model on every device.
        """
        for name in self.adapters:
            a, b = self._matrices(name)
            drawn = torch.empty(a.shape, device="cpu")
            a.copy_(nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator))
            b.zero_()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self.run(self, rows)
        return out.view(*x.shape[:-1], out.shape[1])

    def before_compiling(self) -> None:
        """Exclude this layer from compiled graphs if it must be.

        With adapters, the dropout seed differs in each pass, and the compiler would make a graph for each of them. In
        NF4, the backward dequantises the matrix again.
        """
        if self.lora_A is not None or self.base.plain is None:
            # only here, not at import: torch.compiler.disable takes a second to import its parts
            self.run = torch.compiler.disable(_adapted_linear)

    def matrices_b(self) -> tuple[Tensor, ...]:
        """Return the B matrices of the adapted parts, in their order."""
        return tuple(self.lora_B[name] for name in self.adapters)

    def low_rank_spec(self) -> LowRankSpec:
        """Return what one pass needs, with a new dropout seed."""
        p, dropout = self.dropout if self.training else 0.0, None
        if p and self.lora_A is not None:
            # The seed comes from the CPU's generator, which gradient checkpointing restores before it runs a block
            # again. So no mask is stored, and the host does not wait for the device.
            dropout = Dropout(p, int(torch.randint(2**62, (), device="cpu")))
        scale = self.scale / keep_probability(p)
        return LowRankSpec(self.base, self.bias, scale, dropout, tuple(self.adapters.values()))

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the base weight with the adapters added, in float32."""
        merged = self.base.dense(torch.float32).clone()
        for name, adapter in self.adapters.items():
            a, b = self._matrices(name)
            merged[adapter.rows].addmm_(b, a, alpha=self.scale)
        return merged

    def adapter_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return copies of the adapters under PEFT's names. `prefix` is the path of the module that holds the parts,
        such as `base_model.model.….self_attn`.
        """
        return {name: matrix.clone() for name, matrix in self._named(prefix).items()}

    @torch.no_grad()
    def load_adapter_tensors(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Load adapters that `adapter_tensors` or PEFT wrote; ignore tensors of other names."""
        for name, mine in self._named(prefix).items():
            if name not in tensors or tensors[name].shape != mine.shape:
                stored = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
                raise UserError(
                    f"{name} {stored}; this model needs shape {list(mine.shape)}.",
                    fix="Load the adapter with the lora.r and lora.target_modules that it was trained with.",
                )
            mine.copy_(tensors[name])

    def _named(self, prefix: str) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for part in self.adapters:
            a, b = self._matrices(part)
            named |= {_peft_name(prefix, part, "A"): a.detach(), _peft_name(prefix, part, "B"): b.detach()}
        return named

    def _matrices(self, name: str) -> tuple[Tensor, Tensor]:
        assert self.lora_A is not None
        return self.lora_A[self.adapters[name].columns], self.lora_B[name]


def _peft_name(prefix: str, part: str, which: str) -> str:
    module = {"out": "o"}.get(part, part)  # the other parts have the names that Llama gives them
    return f"{prefix}.{module}_proj.lora_{which}.weight"


def _adapted_linear(linear: LoraLinear, x_NI: Tensor) -> Tensor:
    if linear.lora_A is None and linear.base.plain is not None:  # autograd saves nothing but the stored weight
        bias = None if linear.bias is None else linear.bias.to(x_NI.dtype)
        return F.linear(x_NI, linear.base.dense(x_NI.dtype), bias)
    product: Tensor = _LowRank.apply(x_NI, linear.low_rank_spec(), linear.lora_A, *linear.matrices_b())
    return product


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, spec: LowRankSpec, a_RI: Tensor | None, *bs_OR: Tensor) -> Tensor:
        y_NO, xa_NR = low_rank(x_NI, spec, a_RI, bs_OR)
        ctx.save_for_backward(x_NI if a_RI is not None else None, xa_NR, a_RI, *bs_OR)
        ctx.spec = spec
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        x_NI, xa_NR, a_RI, *bs_OR = ctx.saved_tensors
        needs_grad_x = ctx.needs_input_grad[0]
        grad_x, *grads = low_rank_backward(grad_NO, x_NI, xa_NR, ctx.spec, a_RI, bs_OR, needs_grad_x=needs_grad_x)
        return grad_x, None, *(grads or [None])
