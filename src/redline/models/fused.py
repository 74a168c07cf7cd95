"""The decoder's blocks with their backward written out: few kernels, each value read and written once.

The stream between blocks is a pair (residual, delta) whose sum is what a plain block would pass on; the sum is made
together with the norm that follows. Attention keeps its own autograd graph, so every back-end works here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from redline.kernels.float8 import (
    Float8,
    Scale,
    add_rms_norm8,
    input_gradient8,
    linear8,
    mean_correction,
    merge_rotated_gradients8,
    quantise,
    rms_norm_backward8,
    swiglu8,
    swiglu_backward8,
    weight_gradient8,
)
from redline.kernels.matmul import weight_gradient as plain_weight_gradient
from redline.kernels.mix import mix, mix_backward
from redline.kernels.qk_norm import norm_rotate_backward, norm_rotate_qkv
from redline.kernels.relu2 import relu2, relu2_8, relu2_backward8, relu2_backward_
from redline.kernels.rms_norm import add_rms_norm, rms_norm_backward
from redline.kernels.rotary import merge_rotated_gradients, rotate_qkv_
from redline.kernels.swiglu import swiglu, swiglu_backward_
from redline.models.adapters import (
    LoraLinear,
    LowRank,
    low_rank,
    low_rank8,
    low_rank_backward,
    low_rank_backward8,
)
from redline.models.float8 import BlockScales, How, Probe, Scales
from redline.models.layers import Block, Linear, RMSNorm
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# What the matmuls of a fused block multiply: each operand in bf16 or in fp8, made by the kernel that computes it.


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


# ----------------------------------------------------------------------------------------------------
# The four matmuls of a fused block: what each multiplies by, what it keeps for its backward, and what it learns.


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


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class _Relay:
    """Carries the operand that a backward made of a gradient to the one that multiplies it next.

    Autograd passes tensors alone; the operand goes beside, and is taken only for the very tensor it was made of.
    """

    def __init__(self) -> None:
        self._made: tuple[int, Operand] | None = None

    def put(self, grad: Tensor, operand: Operand) -> None:
        self._made = (grad.data_ptr(), operand)

    def take(self, grad: Tensor, how: How) -> Operand:
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] == grad.data_ptr() else stored(grad, grad.dtype, how)


class Skip(NamedTuple):
    """The state that went into block `source`, added with a weight."""

    source: int
    weight: Tensor


class Products(NamedTuple):
    """A block's matmuls."""

    qkv: Product
    out: Product
    up: Product
    down: Product

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for product in self for parameter in product.parameters]


class _How(NamedTuple):
    """What a block needs besides tensors that have gradients."""

    cos: Tensor
    sin: Tensor
    attend: Attend
    heads: _Heads
    mlp: str
    eps: float
    products: Products
    scales: BlockScales
    grad_before: How  # how the block before stores the gradient that this one sends it
    relay: _Relay


def run_blocks(
    blocks: list[Block],
    norm: RMSNorm,
    x_BTD: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    shape: DecoderShape,
    values: list[Tensor | None],
    skips: list[Skip | None],
    scales: Scales | None = None,
) -> Tensor:
    """Hidden states after the final norm; for each block what is added to its values, and to its input.

    With scales, the matmuls these are for run in fp8 while training.
    """
    heads = _Heads(shape.heads, shape.kv_heads, shape.head_dim)
    training = scales is not None and torch.is_grad_enabled()
    each = scales.next() if scales is not None and training else [BlockScales()] * len(blocks)
    relay, grad_before = _Relay(), None
    sources = {skip.source for skip in skips if skip is not None}
    states: dict[int, Tensor] = {}  # those that skips begin at
    residual, delta = x_BTD, None
    for i, (block, own, skip) in enumerate(zip(blocks, each, skips, strict=True)):
        if skip is not None:
            residual, delta = _Mixed.apply(residual, delta, states[skip.source], skip.weight), None
        if i in sources:
            states[i] = residual = residual if delta is None else residual + delta
            delta, grad_before = None, None  # more than one gradient will reach it: no operand yet
        products, attention = _products(block, own, shape.mlp), block.attention
        residual, delta = _FusedBlock.apply(
            residual,
            delta,
            _How(cos, sin, attend, heads, shape.mlp, block.attention_norm.eps, products, own, grad_before, relay),
            block.attention_norm.weight,
            block.mlp_norm.weight,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            attention.qkv.bias if isinstance(attention.qkv, Linear) else None,  # one with adapters adds its own
            values[i],
            *products.parameters,
        )
        grad_before = own.down_grad
    hidden: Tensor = _FusedNorm.apply(residual, delta, norm.weight, norm.eps, grad_before, relay)
    return hidden


def _products(block: Block, scales: BlockScales, mlp: str) -> Products:
    attention, gated = block.attention, 2 if mlp == "swiglu" else 1
    return Products(
        product(attention.qkv, scales.qkv),
        product(attention.out, scales.out),
        product(block.mlp.up, scales.up, gated),
        product(block.mlp.down, scales.down),
    )


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual_BTD: Tensor,
        delta_BTD: Tensor | None,
        how: _How,
        attention_norm: Tensor,
        mlp_norm: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        qkv_bias: Tensor | None,
        values_BTV: Tensor | None,
        *_parameters: Tensor,  # of the products, which have them already
    ) -> tuple[Tensor, Tensor]:
        B, T, D = residual_BTD.shape
        wide, s, by = residual_BTD.dtype, how.scales, how.products

        x1, n1, r1 = normed(_rows(residual_BTD), _rows(delta_BTD), attention_norm, how.eps, s.qkv_input)
        qkv, of_qkv = by.qkv.forward(n1, wide)
        qkv = qkv.view(B, T, -1)
        if qkv_bias is not None:
            qkv += qkv_bias.to(wide)
        if values_BTV is not None:
            qkv[..., -values_BTV.shape[-1] :] += values_BTV
        raw, rstd, (q, k, v) = _rotated(qkv, q_norm, k_norm, how)
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            q, k, v = (x.detach().requires_grad_(torch.is_grad_enabled()) for x in (q, k, v))
            attended = how.attend(q, k, v)
        o = stored(attended.detach().transpose(1, 2).reshape(B * T, -1), wide, s.out_input)
        mid, of_out = by.out.forward(o, wide)
        x2, n2, r2 = normed(x1, mid, mlp_norm, how.eps, s.up_input)
        h, of_up = by.up.forward(n2, wide)
        y, of_down = by.down.forward(activated(h, how.mlp, s.down_input), wide)

        kept = (of_qkv, of_out, of_up, of_down)
        ctx.save_for_backward(x1, r1, x2, r2, h, attention_norm, mlp_norm, q_norm, k_norm, raw, rstd, *chain(*kept))
        ctx.counts = [len(tensors) for tensors in kept]
        ctx.attention, ctx.how = (q, k, v, attended), how
        ctx.alone, ctx.valued, ctx.biased = delta_BTD is None, values_BTV is not None, qkv_bias is not None
        return x2.view(B, T, D), y.view(B, T, D)

    @staticmethod
    def backward(ctx: Any, grad_x2: Tensor, grad_y: Tensor) -> Any:
        x1, r1, x2, r2, h, attention_norm, mlp_norm, q_norm, k_norm, raw, rstd, *rest = ctx.saved_tensors
        kept = iter(rest)
        of_qkv, of_out, of_up, of_down = (list(islice(kept, count)) for count in ctx.counts)
        (q, k, v, attended), how, s, by = ctx.attention, ctx.how, ctx.how.scales, ctx.how.products
        del ctx.attention  # its graph goes with this pass
        B, H, T, K = q.shape

        g_y = how.relay.take(_rows(grad_y), s.down_grad)
        g_a, g_down = by.down.backward(g_y, of_down)
        g_h = activated_backward(g_a, h, how.mlp, s.up_grad)
        g_n2, g_up = by.up.backward(g_h, of_up)
        g_x, g_mid, g_mlp_norm = normed_backward(g_n2, x2, r2, mlp_norm, _rows(grad_x2), s.out_grad)

        g_o, g_out = by.out.backward(g_mid, of_out)
        g_q, g_k, g_v = torch.autograd.grad(attended, (q, k, v), g_o.view(B, T, H, K).transpose(1, 2))
        g_values = g_v.transpose(1, 2).reshape(B, T, -1) if ctx.valued else None
        g_q_norm = g_k_norm = g_bias = None
        if raw is None and not ctx.biased:
            g_qkv = merged_backward(g_q, g_k, g_v, how.cos, how.sin, s.qkv_grad)
        else:
            if raw is None:
                merged = merge_rotated_gradients(g_q, g_k, g_v, how.cos, how.sin)
            else:
                merged, g_q_norm, g_k_norm = norm_rotate_backward(
                    g_q, g_k, g_v, raw, rstd, q_norm, k_norm, how.cos, how.sin
                )
            g_qkv = stored(_rows(merged), merged.dtype, s.qkv_grad)
            g_bias = _rows(merged).sum(0, dtype=torch.float32) if ctx.biased else None  # before it is rounded to fp8
        g_n1, g_w_qkv = by.qkv.backward(g_qkv, of_qkv)
        g_x, g_before, g_attention_norm = normed_backward(g_n1, x1, r1, attention_norm, g_x, how.grad_before)

        how.relay.put(g_x, g_before)
        g_stream = g_x.view_as(grad_x2)
        g_delta = None if ctx.alone else g_stream
        g_norms = g_attention_norm, g_mlp_norm, g_q_norm, g_k_norm
        return g_stream, g_delta, None, *g_norms, g_bias, g_values, *g_w_qkv, *g_out, *g_up, *g_down


class _Mixed(torch.autograd.Function):
    """The sum of the stream's pair with an earlier state."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, delta: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(state, weight)
        return mix(residual, delta, state, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad, *mix_backward(grad, *ctx.saved_tensors)


class _FusedNorm(torch.autograd.Function):
    """The last sum and norm."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, grad_before: How, relay: _Relay
    ) -> Tensor:
        x, out, rstd = normed(_rows(residual), _rows(delta), weight, eps, None)
        ctx.save_for_backward(x, rstd, weight)
        ctx.grad_before, ctx.relay = grad_before, relay
        assert isinstance(out, Tensor)
        return out.view_as(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        g_x, g_before, g_weight = normed_backward(_rows(grad), x, rstd, weight, None, ctx.grad_before)
        ctx.relay.put(g_x, g_before)
        g_stream = g_x.view_as(grad)
        return g_stream, g_stream, g_weight, None, None, None


def _rows(x: Any) -> Any:
    return None if x is None else x.reshape(-1, x.shape[-1])


def _rotated(
    qkv_BTW: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, how: _How
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor, Tensor]]:
    """What a norm's gradient needs; then queries and keys at their positions, and values, as [B, H, T, K] views."""
    heads, kv_heads, head_dim = how.heads
    each = qkv_BTW.unflatten(-1, (-1, head_dim))
    if q_norm is None or k_norm is None:
        rotate_qkv_(qkv_BTW, how.cos, how.sin, *how.heads)
        q, k, v = (x.transpose(1, 2) for x in each.split((heads, kv_heads, kv_heads), 2))
        return None, None, (q, k, v)
    rotated, rstd = norm_rotate_qkv(qkv_BTW, q_norm, k_norm, how.cos, how.sin, heads, kv_heads, how.eps)
    q, k = (x.transpose(1, 2) for x in rotated.unflatten(-1, (-1, head_dim)).split((heads, kv_heads), 2))
    return qkv_BTW, rstd, (q, k, each[:, :, heads + kv_heads :].transpose(1, 2))
