"""The decoder's blocks with their backward written by hand: few kernels, each value read and written once.

The residual stream between blocks is a pair (residual, delta) whose sum is what a plain block would pass on; the sum is
computed in the same kernel as the norm that follows. Attention keeps its own autograd graph, so every attention
back-end works here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from redline.kernels.activations import ACTIVATIONS
from redline.kernels.float8 import (
    Float8,
    Scale,
    input_gradient8,
    linear8,
    mean_correction,
    quantise,
    weight_gradient8,
)
from redline.kernels.matmul import weight_gradient as plain_weight_gradient
from redline.kernels.qk_norm import norm_rotate_backward, norm_rotate_qkv
from redline.kernels.rms_norm import add_rms_norm, add_rms_norm8, rms_norm_backward, rms_norm_backward8
from redline.kernels.rotary import merge_rotated_gradients, merge_rotated_gradients8, rotate_qkv_
from redline.kernels.skip import add_skip, add_skip_backward
from redline.models.adapters import (
    LoraLinear,
    LowRankSpec,
    low_rank,
    low_rank8,
    low_rank_backward,
    low_rank_backward8,
)
from redline.models.decoder import Block, Linear, RMSNorm, Skip
from redline.models.float8 import AmaxProbe, BlockScales, Scales, Storage
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# Operands: what the matmuls of a fused block multiply, in bf16 or in fp8, made by the kernel that computes the values.
# A Storage says which: Scale for fp8, AmaxProbe for bf16 with a measurement of the magnitude, None for bf16.


Operand = Tensor | Float8


def store(x: Tensor, dtype: torch.dtype, storage: Storage) -> Operand:
    """Make an operand of a weight, or of an activation that no fused kernel wrote as one."""
    return quantise(x, storage) if isinstance(storage, Scale) else _probed(x.to(dtype), storage)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, storage: Storage
) -> tuple[Tensor, Operand, Tensor]:
    """Return x + delta, its RMSNorm as an operand, and 1/rms."""
    if isinstance(storage, Scale):
        return add_rms_norm8(x, delta, weight, eps, storage)
    total, out, rstd = add_rms_norm(x, delta, weight, eps)
    return total, _probed(out, storage), rstd


def norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, grad_sum: Tensor | None, storage: Storage
) -> tuple[Tensor, Operand, Tensor]:
    """Return the gradient of the sum, the same as an operand, and the gradient of the weight."""
    if isinstance(storage, Scale):
        return rms_norm_backward8(grad, x, rstd, weight, grad_sum, storage)
    out, grad_weight = rms_norm_backward(grad, x, rstd, weight, grad_sum)
    return out, _probed(out, storage), grad_weight


def activate(h: Tensor, activation: str, storage: Storage) -> Operand:
    """Return the activation of h as an operand."""
    functions = ACTIVATIONS[activation]
    if isinstance(storage, Scale):
        return functions.forward8(h, storage)
    return _probed(functions.forward(h), storage)


def activate_backward(grad: Tensor, h: Tensor, activation: str, storage: Storage) -> Operand:
    """Return the gradient of h as an operand. May overwrite h."""
    functions = ACTIVATIONS[activation]
    if isinstance(storage, Scale):
        return functions.backward8(grad, h, storage)
    return _probed(functions.backward_(grad, h), storage)


def merge_gradients(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, storage: Storage) -> Operand:
    """Return the gradient of the merged qkv projection [B·T, W] as an operand."""
    if isinstance(storage, Scale):
        return merge_rotated_gradients8(q, k, v, cos, sin, storage)
    return _probed(merge_rotated_gradients(q, k, v, cos, sin).flatten(0, 1), storage)


def linear(x: Operand, weight: Operand, exact: Tensor) -> Tensor:
    """Return x·Wᵀ; `exact` is the weight before it was rounded."""
    if isinstance(x, Float8) and isinstance(weight, Float8):
        return linear8(x, weight, mean_correction(x, weight, exact))
    assert isinstance(x, Tensor)
    assert isinstance(weight, Tensor)
    return x @ weight.T


def input_gradient(grad: Operand, weight: Operand) -> Tensor:
    """Return grad·W."""
    if isinstance(grad, Float8) and isinstance(weight, Float8):
        return input_gradient8(grad, weight)
    assert isinstance(grad, Tensor)
    assert isinstance(weight, Tensor)
    return grad @ weight


def weight_gradient(grad: Operand, x: Operand, parts: int = 1) -> Tensor:
    """Return gradᵀ·x in float32."""
    if isinstance(grad, Float8) and isinstance(x, Float8):
        return weight_gradient8(grad, x)
    assert isinstance(grad, Tensor)
    assert isinstance(x, Tensor)
    return plain_weight_gradient(grad, x, parts)


def pack(*operands: Operand) -> list[Tensor | None]:
    """Flatten operands to tensors for autograd to save. Of fp8 keep the transpose only: the backward reads no rows."""
    flat: list[Tensor | None] = []
    for operand in operands:
        flat += (operand.column, operand.unscale) if isinstance(operand, Float8) else (operand, None)
    return flat


def unpack(flat: list[Tensor | None]) -> list[Operand]:
    """Undo `pack`."""
    operands: list[Operand] = []
    for tensor, unscale in zip(flat[::2], flat[1::2], strict=True):
        assert tensor is not None
        operands.append(tensor if unscale is None else Float8(None, tensor, unscale))
    return operands


def _probed(x: Tensor, storage: Storage) -> Tensor:
    """Return x; with an AmaxProbe, record its largest magnitude."""
    if isinstance(storage, AmaxProbe):
        largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
        torch.maximum(storage.amax, largest, out=storage.amax)
    return x


# ----------------------------------------------------------------------------------------------------
# The four matmuls of a fused block: each knows its weights, what to save for the backward, and its gradients.


Saved = list[Tensor | None]


class Matmul(Protocol):
    """x·Wᵀ and its gradients, for a weight of one kind."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient."""

    def forward(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, Saved]:
        """Return x·Wᵀ, and what the backward needs."""

    def backward(self, grad: Operand, saved: Saved) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the gradients of x and of the parameters."""


@dataclass(frozen=True)
class TrainedMatmul:
    """By a weight that is trained, in bf16 or fp8."""

    weight: Tensor
    storage: Storage
    parts: int  # matrices merged in the weight

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, Saved]:
        weight = store(self.weight, dtype, self.storage)
        return linear(x, weight, self.weight), pack(x, weight)

    def backward(self, grad: Operand, saved: Saved) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, weight = unpack(saved)
        grad_weight = weight_gradient(grad, x, self.parts)
        return input_gradient(grad, weight), (grad_weight,)


@dataclass(frozen=True)
class AdaptedMatmul:
    """By a frozen weight with low-rank adapters that are trained."""

    spec: LowRankSpec
    a: Tensor | None
    bs: tuple[Tensor, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.a is None else (self.a, *self.bs)

    def forward(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, Saved]:
        if isinstance(x, Float8):
            y, xa = low_rank8(x, self.spec, self.a, self.bs)
            return y, [xa, *((None, None) if self.a is None else (x.row, x.unscale))]
        y, xa = low_rank(x, self.spec, self.a, self.bs)
        return y, [xa, None if self.a is None else x]

    def backward(self, grad: Operand, saved: Saved) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        grads: tuple[Tensor | None, ...]
        if isinstance(grad, Float8):
            xa, x, unscale = saved
            grads = low_rank_backward8(grad, x, unscale, xa, self.spec, self.a, self.bs)
        else:
            xa, x = saved
            grads = low_rank_backward(grad, x, xa, self.spec, self.a, self.bs)
        assert grads[0] is not None
        return grads[0], grads[1:]


def matmul(module: nn.Module, storage: Storage, parts: int = 1) -> Matmul:
    """Return the matmul of a block's linear for one pass: each pass of an adapter has its own dropout seed."""
    if isinstance(module, LoraLinear):
        return AdaptedMatmul(module.low_rank_spec(), module.lora_A, module.matrices_b())
    assert isinstance(module, Linear)
    return TrainedMatmul(module.weight, storage, parts)


class BlockMatmuls(NamedTuple):
    """The four matmuls of a block."""

    qkv: Matmul
    out: Matmul
    up: Matmul
    down: Matmul

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for matmul in self for parameter in matmul.parameters]


def _matmuls(block: Block, scales: BlockScales, shape: DecoderShape) -> BlockMatmuls:
    attention = block.attention
    return BlockMatmuls(
        matmul(attention.qkv, scales.qkv),
        matmul(attention.out, scales.out),
        matmul(block.mlp.up, scales.up, 2 if shape.gated else 1),
        matmul(block.mlp.down, scales.down),
    )


# ----------------------------------------------------------------------------------------------------
# The blocks.


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class _OperandRelay:
    """Carries a gradient's operand from the backward that made it to the backward that multiplies it next.

    Autograd passes plain tensors only, and the norm's backward already wrote this gradient in fp8. The operand is taken
    only if the gradient that arrives is the very tensor it was made of: if autograd added another gradient to it, the
    operand is made anew.
    """

    def __init__(self) -> None:
        self._operand: tuple[int, Operand] | None = None

    def put(self, grad: Tensor, operand: Operand) -> None:
        self._operand = (grad.data_ptr(), operand)

    def take(self, grad: Tensor, storage: Storage) -> Operand:
        held, self._operand = self._operand, None
        if held is not None and held[0] == grad.data_ptr():
            return held[1]
        return store(grad, grad.dtype, storage)


class _BlockSpec(NamedTuple):
    """What a fused block needs besides tensors that get a gradient."""

    cos: Tensor
    sin: Tensor
    attend: Attend
    heads: _Heads
    activation: str
    eps: float
    matmuls: BlockMatmuls
    scales: BlockScales
    previous_down_grad: Storage  # how the previous block's down projection stores the gradient that this block sends it
    relay: _OperandRelay


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
    """Return the hidden states [B, T, D] after the final norm.

    `values` is added to each block's values, `skips` to its input. While training with `scales`, the matmuls that they
    cover run in fp8.
    """
    heads = _Heads(shape.heads, shape.kv_heads, shape.head_dim)
    in_fp8 = scales is not None and torch.is_grad_enabled()
    block_scales = scales.next() if scales is not None and in_fp8 else [BlockScales()] * len(blocks)
    relay, previous_down_grad = _OperandRelay(), None
    sources = {skip.source for skip in skips if skip is not None}
    states: dict[int, Tensor] = {}  # the inputs of the blocks at which skips begin
    residual, delta = x_BTD, None
    for i, (block, own, skip) in enumerate(zip(blocks, block_scales, skips, strict=True)):
        if skip is not None:
            residual, delta = _AddSkip.apply(residual, delta, states[skip.source], skip.weight), None
        if i in sources:
            states[i] = residual = residual if delta is None else residual + delta
            # autograd will add the skip's gradient to the block's, so no operand can be made of the latter alone
            delta, previous_down_grad = None, None
        matmuls, attention = _matmuls(block, own, shape), block.attention
        spec = _BlockSpec(
            cos,
            sin,
            attend,
            heads,
            shape.mlp,
            block.attention_norm.eps,
            matmuls,
            own,
            previous_down_grad,
            relay,
        )
        residual, delta = _FusedBlock.apply(
            residual,
            delta,
            spec,
            block.attention_norm.weight,
            block.mlp_norm.weight,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            attention.qkv.bias if isinstance(attention.qkv, Linear) else None,  # a LoraLinear adds its own
            values[i],
            *matmuls.parameters,
        )
        previous_down_grad = own.down_grad
    hidden: Tensor = _FusedNorm.apply(residual, delta, norm.weight, norm.eps, previous_down_grad, relay)
    return hidden


class _FusedBlock(torch.autograd.Function):
    """One block: (residual, delta) → (residual, delta)."""

    @staticmethod
    def forward(
        ctx: Any,
        residual_BTD: Tensor,
        delta_BTD: Tensor | None,
        spec: _BlockSpec,
        attention_norm: Tensor,
        mlp_norm: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        qkv_bias: Tensor | None,
        values_BTV: Tensor | None,
        *_parameters: Tensor,  # of the matmuls, which hold them too: passed so that autograd asks for their gradients
    ) -> tuple[Tensor, Tensor]:
        B, T, D = residual_BTD.shape
        dtype, s, matmuls = residual_BTD.dtype, spec.scales, spec.matmuls

        x1, n1, r1 = add_norm(_rows(residual_BTD), _rows(delta_BTD), attention_norm, spec.eps, s.qkv_input)
        qkv, saved_qkv = matmuls.qkv.forward(n1, dtype)
        qkv = qkv.view(B, T, -1)
        if qkv_bias is not None:
            qkv += qkv_bias.to(dtype)
        if values_BTV is not None:
            qkv[..., -values_BTV.shape[-1] :] += values_BTV
        raw, rstd, (q, k, v) = _rotate(qkv, q_norm, k_norm, spec)
        # attention gets an autograd graph of its own, which the backward below runs
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            q, k, v = (x.detach().requires_grad_(torch.is_grad_enabled()) for x in (q, k, v))
            attended = spec.attend(q, k, v)
        o = store(attended.detach().transpose(1, 2).reshape(B * T, -1), dtype, s.out_input)
        mid, saved_out = matmuls.out.forward(o, dtype)
        x2, n2, r2 = add_norm(x1, mid, mlp_norm, spec.eps, s.up_input)
        h, saved_up = matmuls.up.forward(n2, dtype)
        y, saved_down = matmuls.down.forward(activate(h, spec.activation, s.down_input), dtype)

        saved = (saved_qkv, saved_out, saved_up, saved_down)
        ctx.save_for_backward(x1, r1, x2, r2, h, attention_norm, mlp_norm, q_norm, k_norm, raw, rstd, *chain(*saved))
        ctx.counts = [len(tensors) for tensors in saved]
        ctx.attention, ctx.spec = (q, k, v, attended), spec
        ctx.has_delta, ctx.has_values, ctx.has_bias = (
            delta_BTD is not None,
            values_BTV is not None,
            qkv_bias is not None,
        )
        return x2.view(B, T, D), y.view(B, T, D)

    @staticmethod
    def backward(ctx: Any, grad_x2: Tensor, grad_y: Tensor) -> Any:
        x1, r1, x2, r2, h, attention_norm, mlp_norm, q_norm, k_norm, raw, rstd, *rest = ctx.saved_tensors
        saved = iter(rest)
        saved_qkv, saved_out, saved_up, saved_down = (list(islice(saved, count)) for count in ctx.counts)
        (q, k, v, attended), spec, s, matmuls = ctx.attention, ctx.spec, ctx.spec.scales, ctx.spec.matmuls
        del ctx.attention  # so that its graph is freed during this pass, not when the whole backward ends
        B, H, T, K = q.shape

        g_y = spec.relay.take(_rows(grad_y), s.down_grad)
        g_a, g_down = matmuls.down.backward(g_y, saved_down)
        g_h = activate_backward(g_a, h, spec.activation, s.up_grad)
        g_n2, g_up = matmuls.up.backward(g_h, saved_up)
        g_x, g_mid, g_mlp_norm = norm_backward(g_n2, x2, r2, mlp_norm, _rows(grad_x2), s.out_grad)

        g_o, g_out = matmuls.out.backward(g_mid, saved_out)
        g_q, g_k, g_v = torch.autograd.grad(attended, (q, k, v), g_o.view(B, T, H, K).transpose(1, 2))
        g_values = g_v.transpose(1, 2).reshape(B, T, -1) if ctx.has_values else None
        g_q_norm = g_k_norm = g_bias = None
        if raw is None and not ctx.has_bias:
            g_qkv = merge_gradients(g_q, g_k, g_v, spec.cos, spec.sin, s.qkv_grad)
        else:
            if raw is None:
                merged = merge_rotated_gradients(g_q, g_k, g_v, spec.cos, spec.sin)
            else:
                merged, g_q_norm, g_k_norm = norm_rotate_backward(
                    g_q, g_k, g_v, raw, rstd, q_norm, k_norm, spec.cos, spec.sin
                )
            g_qkv = store(_rows(merged), merged.dtype, s.qkv_grad)
            # the bias sums the gradient before its rounding to fp8
            g_bias = _rows(merged).sum(0, dtype=torch.float32) if ctx.has_bias else None
        g_n1, g_w_qkv = matmuls.qkv.backward(g_qkv, saved_qkv)
        g_x, g_operand, g_attention_norm = norm_backward(g_n1, x1, r1, attention_norm, g_x, spec.previous_down_grad)

        spec.relay.put(g_x, g_operand)
        g_stream = g_x.view_as(grad_x2)
        g_delta = g_stream if ctx.has_delta else None
        g_norms = g_attention_norm, g_mlp_norm, g_q_norm, g_k_norm
        return g_stream, g_delta, None, *g_norms, g_bias, g_values, *g_w_qkv, *g_out, *g_up, *g_down


class _AddSkip(torch.autograd.Function):
    """The sum of the residual stream's pair with an earlier state."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, delta: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(state, weight)
        return add_skip(residual, delta, state, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad, *add_skip_backward(grad, *ctx.saved_tensors)


class _FusedNorm(torch.autograd.Function):
    """The last sum of the residual stream, and the final norm."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        previous_down_grad: Storage,
        relay: _OperandRelay,
    ) -> Tensor:
        x, out, rstd = add_norm(_rows(residual), _rows(delta), weight, eps, None)
        ctx.save_for_backward(x, rstd, weight)
        ctx.previous_down_grad, ctx.relay = previous_down_grad, relay
        assert isinstance(out, Tensor)
        return out.view_as(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        g_x, g_operand, g_weight = norm_backward(_rows(grad), x, rstd, weight, None, ctx.previous_down_grad)
        ctx.relay.put(g_x, g_operand)
        g_stream = g_x.view_as(grad)
        return g_stream, g_stream, g_weight, None, None, None


def _rows(x: Any) -> Any:
    """Return a tensor [B, T, D] as [B·T, D], and None as None."""
    return None if x is None else x.reshape(-1, x.shape[-1])


def _rotate(
    qkv_BTW: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, spec: _BlockSpec
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor, Tensor]]:
    """Apply QK norm, if any, and rotary positions. Return queries, keys and values as [B, H, T, K] views.

    The first two results are what the backward of the norm needs, the raw projection and 1/rms; None without a norm.
    """
    heads, kv_heads, head_dim = spec.heads
    all_heads = qkv_BTW.unflatten(-1, (-1, head_dim))
    if q_norm is None or k_norm is None:
        rotate_qkv_(qkv_BTW, spec.cos, spec.sin, *spec.heads)
        q, k, v = (x.transpose(1, 2) for x in all_heads.split((heads, kv_heads, kv_heads), 2))
        return None, None, (q, k, v)
    rotated, rstd = norm_rotate_qkv(qkv_BTW, q_norm, k_norm, spec.cos, spec.sin, heads, kv_heads, spec.eps)
    q, k = (x.transpose(1, 2) for x in rotated.unflatten(-1, (-1, head_dim)).split((heads, kv_heads), 2))
    return qkv_BTW, rstd, (q, k, all_heads[:, :, heads + kv_heads :].transpose(1, 2))
