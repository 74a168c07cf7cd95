"""The decoder's parts. Weights are float32 masters; each layer computes in its input's precision."""

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

from redline.kernels.attention import Attention, Bound, attend_cached
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# Gradient checkpointing: what a block keeps for its backward, and what it computes again.


def _plain(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return function(*inputs)


def _save_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
CHECKPOINTING: dict[str, Callable[..., Tensor]] = {
    "none": _plain,
    "full": partial(checkpoint, use_reentrant=False),
    # keep what matmuls and attention made, recompute the cheap rest
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_matmuls)
    ),
}


class Linear(nn.Module):
    """x·Wᵀ, with a bias if asked. `splits` names the matrices stored merged along the rows."""

    def __init__(self, inputs: int, outputs: int, splits: tuple[int, ...] = (), bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.splits = splits or (outputs,)
        self.float8: Callable[[Tensor, Tensor], Tensor] | None = None  # how to train in fp8

    def forward(self, x: Tensor) -> Tensor:
        if self.float8 is not None and torch.is_grad_enabled():
            y = self.float8(x, self.weight)
            return y if self.bias is None else y + self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.Module):
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
    """Radians per position [K/2] in float32, stretched as a recipe's `model.rope_scaling` says.

    A reciprocal of a power, not a negative power: the last bit is that of the checkpoints' own code, and thousands of
    positions multiply it.
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling is None:
        return plain
    stretched = plain / scaling["factor"]
    if scaling["rope_type"] == "linear":  # positions closer together (arXiv 2306.15595)
        return stretched
    # Llama 3.1 (arXiv 2407.21783): waves that turned often within the old context stay, long ones are stretched, and
    # between `low` and `high` turns the two are blended
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
    """cos and sin [T, K/2] in float32 (RoFormer, arXiv 2104.09864)."""
    return rotary_at(torch.arange(length, device=device), head_dim, theta, scaling)


def rotary_at(
    positions_T: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of that table for positions in any order."""
    frequency = inverse_frequencies(head_dim, theta, scaling, positions_T.device)
    angle = positions_T.float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x_BHTK: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Pairs are (i, i + K/2), as in Llama checkpoints."""
    a, b = x_BHTK.float().chunk(2, -1)
    return torch.cat((a * cos_TF - b * sin_TF, b * cos_TF + a * sin_TF), -1).to(x_BHTK.dtype)


@dataclass
class KVCache:
    """Keys and values of one layer, grown as tokens are sampled."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, keep: bool = True) -> tuple[Tensor, Tensor]:
        """All so far and these; without `keep` they are forgotten again."""
        keys = k if self.keys is None else torch.cat((self.keys, k), 2)
        values = v if self.values is None else torch.cat((self.values, v), 2)
        if keep:
            self.keys, self.values = keys, values
        return keys, values


class New(NamedTuple):
    """How tokens that come after those in a cache are read."""

    start: int  # position of the first
    whole: bool = False  # each sees all of them, and not only those before it
    keep: bool = True  # for the tokens after them


class SelfAttention(nn.Module):
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
        new: New = New(0),
    ) -> Tensor:
        """With what is to be added to the values of its tokens."""
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
            y = attend_cached(q, *cache.extend(k, v, new.keep), new.start, new.whole)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))
        return out


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), gate and up merged; or squared ReLU (arXiv 2109.08668)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gated = shape.mlp == "swiglu"
        self.up = Linear(shape.d_model, shape.d_up, (shape.d_ff, shape.d_ff) if self.gated else ())
        self.down = Linear(shape.d_ff, shape.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.up(x_BTD)
        if self.gated:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.relu(h).square()
        out: Tensor = self.down(h)
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream."""

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
        """One of its four: qkv, out, up, down."""
        found = getattr(self.attention if name in ("qkv", "out") else self.mlp, name)
        assert isinstance(found, Linear)
        return found

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Bound, values: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            return self.run(self._body, x, cos, sin, mask, values)
        return self._body(x, cos, sin, mask, values)

    def _body(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Bound, values: Tensor | None) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), cos, sin, mask, values))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def extend(self, x: Tensor, cos: Tensor, sin: Tensor, values: Tensor | None, cache: KVCache, new: New) -> Tensor:
        """The same for new tokens after those in the cache."""
        x = x + self.attention(self.attention_norm(x), cos, sin, Bound(), values, cache, new)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
