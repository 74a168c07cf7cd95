"""The layers of the decoder. Weights are float32 master weights; each layer computes in its input's precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from redline.kernels.activations import ACTIVATIONS
from redline.kernels.attention import Attention, Bound, attend_cached
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# Gradient checkpointing: what a block saves for its backward, and what it computes again.


def _without_checkpointing(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return function(*inputs)


def _save_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_SAVED_OPS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
CHECKPOINTING: dict[str, Callable[..., Tensor]] = {
    "none": _without_checkpointing,
    "full": partial(checkpoint, use_reentrant=False),
    # save the results of matmuls and attention, recompute everything else, which is cheap
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_matmuls)
    ),
}


class Linear(nn.Module):
    """x·Wᵀ, optionally with a bias. `splits` are the rows of each of the matrices that are stored merged in W."""

    def __init__(self, inputs: int, outputs: int, splits: tuple[int, ...] = (), bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.splits = splits or (outputs,)
        self.float8: Callable[[Tensor, Tensor], Tensor] | None = None  # x·Wᵀ in fp8, while training

    def forward(self, x: Tensor) -> Tensor:
        if self.float8 is not None and torch.is_grad_enabled():
            y = self.float8(x, self.weight)
            return y if self.bias is None else y + self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467), computed in float32 and rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None, device: torch.device | None = None
) -> Tensor:
    """Return radians per position [K/2] in float32, scaled as the recipe's `model.rope_scaling` says.

    Written as the reciprocal of a power, not as a negative power, as in the code that trained the checkpoints: the two
    differ in the last bit, and thousands of positions multiply the difference.
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling is None:
        return plain
    stretched = plain / scaling["factor"]
    if scaling["rope_type"] == "linear":  # positions closer together (arXiv 2306.15595)
        return stretched
    # Llama 3.1 (arXiv 2407.21783): frequencies with more than `high` turns within the old context stay, those with
    # fewer than `low` are stretched, and in between the two are blended linearly
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(stretched, plain, kept)


def rotary_table(
    length: int,
    head_dim: int,
    theta: float,
    device: torch.device | None = None,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, K/2] in float32 for positions 0 to length (RoFormer, arXiv 2104.09864)."""
    return rotary_at(torch.arange(length, device=device), head_dim, theta, scaling)


def rotary_at(
    positions_T: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, K/2] in float32 for positions in any order."""
    frequency = inverse_frequencies(head_dim, theta, scaling, positions_T.device)
    angle = positions_T.float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate heads by their positions. Pairs are (i, i + K/2), as in Llama checkpoints."""
    a, b = x_BHTK.float().chunk(2, -1)
    return torch.cat((a * cos_TF - b * sin_TF, b * cos_TF + a * sin_TF), -1).to(x_BHTK.dtype)


@dataclass
class KVCache:
    """The keys and values [B, H, T, K] of one layer, which grow as tokens are sampled."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, update: bool = True) -> tuple[Tensor, Tensor]:
        """Return all keys and values including the new ones; without `update` the cache does not store those."""
        keys = k if self.keys is None else torch.cat((self.keys, k), 2)
        values = v if self.values is None else torch.cat((self.values, v), 2)
        if update:
            self.keys, self.values = keys, values
        return keys, values


class CachedStep(NamedTuple):
    """How new tokens, which follow those in a cache, are read."""

    start: int  # position of the first new token
    bidirectional: bool = False  # each new token sees all new tokens, not only those up to itself
    update_cache: bool = True  # store the new tokens for those that follow


class SelfAttention(nn.Module):
    """Causal self-attention with grouped queries, rotary positions and optional QK norm; qkv is one merged matrix."""

    def __init__(self, shape: DecoderShape, eps: float, attention: Attention) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        widths = (shape.d_attention, shape.d_kv, shape.d_kv)
        self.qkv = Linear(shape.d_model, shape.d_qkv, widths, bias=shape.qkv_bias)
        self.out = Linear(shape.d_attention, shape.d_model)
        self.q_norm = RMSNorm(shape.head_dim, eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, eps) if shape.qk_norm else None
        self.attention = attention

    def forward(
        self,
        x_BTD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Bound,
        values_BTV: Tensor | None = None,
        cache: KVCache | None = None,
        step: CachedStep = CachedStep(0),
    ) -> Tensor:
        """Return the attention's output [B, T, D]. `values`, if given, is added to the values of the tokens."""
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = (x.transpose(1, 2) for x in qkv.split((self.heads, self.kv_heads, self.kv_heads), 2))
        if values_BTV is not None:
            v = v + values_BTV.view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is None:
            y = self.attention(q, k, v, mask)
        else:
            y = attend_cached(q, *cache.extend(k, v, step.update_cache), step.start, step.bidirectional)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))
        return out


class MLP(nn.Module):
    """The feed-forward layer: down(activation(up(x))). A gated activation has gate and up merged in one matrix."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.mlp].plain
        self.up = Linear(shape.d_model, shape.d_up, (shape.d_ff, shape.d_ff) if shape.gated else ())
        self.down = Linear(shape.d_ff, shape.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x_BTD)))
        return out


class ShardedBlock(nn.Module):
    """A block of a model's layers, which FSDP gathers as one unit."""

    # Methods beside `forward` that read the block's parameters. FSDP must gather the parameters before each of them.
    entry_points: tuple[str, ...] = ()


class Block(ShardedBlock):
    """A decoder block: pre-norm attention and feed-forward, each added to the residual stream."""

    entry_points = ("extend",)

    def __init__(
        self, shape: DecoderShape, eps: float, dropout: float, attention: Attention, checkpointing: str = "none"
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.d_model, eps)
        self.attention = SelfAttention(shape, eps, attention)
        self.mlp_norm = RMSNorm(shape.d_model, eps)
        self.mlp = MLP(shape)
        self.dropout = dropout
        self.run = CHECKPOINTING[checkpointing]

    def linear(self, name: str) -> Linear:
        """Return one of the block's four linears: qkv, out, up, down."""
        linear = getattr(self.attention if name in ("qkv", "out") else self.mlp, name)
        assert isinstance(linear, Linear)
        return linear

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Bound, values: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            return self.run(self._body, x, cos, sin, mask, values)
        return self._body(x, cos, sin, mask, values)

    def _body(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Bound, values: Tensor | None) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), cos, sin, mask, values))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def extend(
        self, x: Tensor, cos: Tensor, sin: Tensor, values: Tensor | None, cache: KVCache, step: CachedStep
    ) -> Tensor:
        """Do what `forward` does for new tokens that follow those in the cache."""
        x = x + self.attention(self.attention_norm(x), cos, sin, Bound(), values, cache, step)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
