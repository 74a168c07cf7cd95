"""The decoder that every job trains: its layers, its gradient checkpointing and its initial weights.

This is the readable version, which runs on every device. On GPUs that the Triton kernels support, `fused.py` runs the
same layers with a backward pass written by hand.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from redline.kernels.activations import ACTIVATIONS
from redline.kernels.attention import Attention, Bound, attend_cached
from redline.kernels.float8_choice import float8_linear
from redline.models.adapters import LoraLinear
from redline.models.float8 import Scales
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


# ----------------------------------------------------------------------------------------------------
# The layers. Weights are float32 master weights; each layer computes in its input's precision.


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
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return rms_norm(x, self.weight, self.eps)
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
    """Rotate heads by their positions. Pairs are (i, i + K/2), as in Llama checkpoints.

    With a table for each row, cos and sin are [B, T, F].
    """
    if cos_TF.dim() == 3:
        cos_TF, sin_TF = cos_TF[:, None], sin_TF[:, None]
    a, b = x_BHTK.float().chunk(2, -1)
    return torch.cat((a * cos_TF - b * sin_TF, b * cos_TF + a * sin_TF), -1).to(x_BHTK.dtype)


_CACHE_STEP = 64  # tokens


class KVCache:
    """The keys and values [B, H, T, K] of one layer, which grow as tokens are sampled.

    They lie at the beginning of buffers with room for more, so that a new token copies itself and not all before it.
    No gradient flows through a cache.
    """

    def __init__(self) -> None:
        self.length = 0  # tokens that are stored
        self._room: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Tensor | None:
        return None if self._room is None or not self.length else self._room[0][:, :, : self.length]

    @property
    def values(self) -> Tensor | None:
        return None if self._room is None or not self.length else self._room[1][:, :, : self.length]

    def extend(self, k: Tensor, v: Tensor, update: bool = True) -> tuple[Tensor, Tensor]:
        """Return all keys and values including the new ones; without `update` the cache does not store those."""
        begin, end = self.length, self.length + k.shape[2]
        if self._room is None or self._room[0].shape[2] < end:
            self._make_room(k, end)
        assert self._room is not None
        for stored, new in zip(self._room, (k, v), strict=True):
            stored[:, :, begin:end] = new.detach()
        if update:
            self.length = end
        keys, values = self._room
        return keys[:, :, :end], values[:, :, :end]

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows only; a row may be taken more than once."""
        if self._room is not None:
            keys, values = self._room
            self._room = keys[rows], values[rows]

    def _make_room(self, like: Tensor, length: int) -> None:
        """Allocate for half as many tokens again, in steps, so that lengths that grow by one seldom copy anything."""
        B, H, _, K = like.shape
        size = -(-(length + length // 2) // _CACHE_STEP) * _CACHE_STEP
        before, self._room = self._room, (like.new_empty(B, H, size, K), like.new_empty(B, H, size, K))
        for old, new in zip(before or (), self._room, strict=False):
            new[:, :, : self.length] = old[:, :, : self.length]


class CachedStep(NamedTuple):
    """How new tokens, which follow those in a cache, are read."""

    bidirectional: bool = False  # each new token sees all new tokens, not only those up to itself
    update_cache: bool = True  # store the new tokens for those that follow
    seen: Tensor | None = None  # [B or 1, 1, T, S]: which keys each new token sees; None: those before it, or all


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
        step: CachedStep = CachedStep(),
    ) -> Tensor:
        """Return the attention's output [B, T, D]. `values`, if given, is added to the values of the tokens."""
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = self._heads(qkv, cos, sin)
        if values_BTV is not None:
            v = v + values_BTV.view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        if cache is None:
            y = self.attention(q, k, v, mask)
        else:
            y = attend_cached(q, *cache.extend(k, v, step.update_cache), step.seen, step.bidirectional)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))
        return out

    def _heads(self, qkv_BTHK: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normed and rotated, and values, each [B, H, T, K]."""
        if self.q_norm is None or self.k_norm is None:
            q, k, v = (x.transpose(1, 2) for x in qkv_BTHK.split((self.heads, self.kv_heads, self.kv_heads), 2))
            return rotate(q, cos, sin), rotate(k, cos, sin), v
        if qkv_BTHK.device.type == "cpu" and not torch.compiler.is_compiling():
            weights = self.q_norm.weight, self.k_norm.weight
            return split_norm_rotate(qkv_BTHK, *weights, cos, sin, self.heads, self.q_norm.eps)
        q, k, v = (x.transpose(1, 2) for x in qkv_BTHK.split((self.heads, self.kv_heads, self.kv_heads), 2))
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v


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


# ----------------------------------------------------------------------------------------------------
# Norm and rotation on a CPU, with a backward written by hand: autograd's, of a dozen small operations in float32, takes
# twice as long (docs/decisions/0030-cpu-steps.md).


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of the last dimension, computed in float32 and rounded once."""
    normed: Tensor = _RMSNorm.apply(x, weight_D, eps)
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        unit, rstd = _unit(x, eps)
        ctx.save_for_backward(unit, weight_D, rstd)
        ctx.dtype = x.dtype
        return (unit * weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        unit, weight_D, rstd = ctx.saved_tensors
        wide = grad.float()
        of_weight = wide * unit
        g_weight = of_weight.flatten(0, -2).sum(0)
        mean = (of_weight @ weight_D.to(of_weight.dtype)).div_(len(weight_D))[..., None]
        g_x = (wide * weight_D).addcmul_(unit, mean, value=-1).mul_(rstd)
        return g_x.to(ctx.dtype), g_weight, None


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x/rms in float32, in memory of its own, and 1/rms of each row.

    The backward keeps the former in place of x: half as many passes, for two more bytes a value.
    """
    rstd = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x.float() * rstd if x.dtype == torch.float32 else x.float().mul_(rstd), rstd


def split_norm_rotate(
    qkv_BTHK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and values, each contiguous [B, H, T, K].

    Between norm and rotation nothing is rounded.
    """
    q, k, v = _SplitNormRotate.apply(qkv_BTHK, q_weight_K, k_weight_K, cos_TF, sin_TF, heads, eps)
    return q, k, v


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = (qkv.shape[2] - heads) // 2
        weights = torch.cat((q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)))
        unit, rstd = _unit(qkv[:, :, : heads + kv_heads], eps)
        ctx.save_for_backward(unit, weights, rstd, cos, sin)
        ctx.heads, ctx.shape, ctx.dtype = heads, qkv.shape, qkv.dtype
        # The weights multiply the table of angles, which is smaller than the heads by the size of the batch.
        rotated = _rotated(unit, _turned(cos, cos, weights), _turned(-sin, sin, weights.roll(weights.shape[1] // 2, 1)))
        parts = rotated[:, :, :heads], rotated[:, :, heads:], qkv[:, :, heads + kv_heads :]
        q, k, v = (_heads_first(part, qkv.dtype) for part in parts)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, g_q: Tensor, g_k: Tensor, g_v: Tensor) -> Any:
        unit, weights, rstd, cos, sin = ctx.saved_tensors
        heads, count = ctx.heads, weights.shape[0]
        grad = torch.empty_like(unit)
        grad[:, :, :heads].copy_(g_q.transpose(1, 2))
        grad[:, :, heads:].copy_(g_k.transpose(1, 2))
        # the transpose of a rotation is the rotation by the negative angle
        normed = _rotated(grad, _turned(cos, cos), _turned(sin, -sin))
        of_weight = torch.mul(normed, unit, out=grad)
        g_weights = of_weight.flatten(0, 1).sum(0)
        mean = of_weight.mul_(weights).mean(-1, keepdim=True)
        g_x = normed.mul_(weights).addcmul_(unit, mean, value=-1).mul_(rstd)
        merged = torch.empty(ctx.shape, dtype=ctx.dtype)
        merged[:, :, :count].copy_(g_x)
        merged[:, :, count:].copy_(g_v.transpose(1, 2))
        return merged, g_weights[:heads].sum(0), g_weights[heads:].sum(0), None, None, None, None


def _turned(left_TF: Tensor, right_TF: Tensor, weights_HK: Tensor | None = None) -> Tensor:
    """Return the factors of both halves of a head side by side [T, 1 or H, K], times the heads' weights if given."""
    factors = torch.cat((left_TF, right_TF), -1).unsqueeze(-2)
    return factors if weights_HK is None else factors * weights_HK


def _rotated(x_BTHK: Tensor, own_THK: Tensor, other_THK: Tensor) -> Tensor:
    """Return own·x + other·(x with its halves exchanged), in float32."""
    half = x_BTHK.shape[-1] // 2
    out = x_BTHK * own_THK
    out[..., :half].addcmul_(x_BTHK[..., half:], other_THK[..., :half])
    out[..., half:].addcmul_(x_BTHK[..., :half], other_THK[..., half:])
    return out


def _heads_first(x_BTHK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy [B, H, T, K]: rounding and reordering in one pass."""
    B, T, H, K = x_BTHK.shape
    return torch.empty(B, H, T, K, dtype=dtype).copy_(x_BTHK.transpose(1, 2))


# ----------------------------------------------------------------------------------------------------
# The model.


_INIT_STD = 0.02  # of matrices
_OUTPUT_MATRICES = ("attention.out.weight", "mlp.down.weight")  # their products are added to the residual stream


class Skip(NamedTuple):
    """A skip connection: the state that went into block `source`, times `weight`, is added to another block's input."""

    source: int
    weight: Tensor


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Return an embedding without initial values.

    torch would draw them, and on the meta device that imports a compiler, which takes seconds.
    """
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Decoder(nn.Module):
    """A pre-norm decoder of the Llama family, with optional QK norm, value embeddings and long skip connections."""

    def __init__(
        self,
        shape: DecoderShape,
        *,
        attention: Attention,
        rope_theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        eps: float = 1e-5,
        dropout: float = 0.0,
        softcap: float | None = None,
        dtype: torch.dtype = torch.float32,
        checkpointing: str = "none",
        kernels: str = "torch",
    ) -> None:
        super().__init__()
        self.shape, self.softcap, self.dtype = shape, softcap, dtype
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.dropout, self.kernels, self.attention = dropout, kernels, attention
        self.embedding = _embedding(shape.vocab, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape, eps, dropout, attention, checkpointing) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.d_model, eps)
        self.head = None if shape.tied else Linear(shape.d_model, shape.vocab)
        tables = (_embedding(shape.vocab, shape.d_kv) for _ in range(shape.value_embeddings))
        self.value_embeddings = nn.ModuleList(tables)
        self.skip_weights = nn.Parameter(torch.empty(shape.skip_count)) if shape.skip_count else None
        self.scales: Scales | None = None  # of the tensors that fused blocks store in fp8
        self._rotary_tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        # Keyed by the identity of a tensor of positions, and kept for as long as that tensor lives: a step recorded as
        # a CUDA graph reads the memory of the table that was made for it.
        self._rotary_at: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakIdKeyDictionary()

    @property
    def head_weight(self) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    def initialise(self, generator: torch.Generator, init: str = "gpt2", embedding_std: float = _INIT_STD) -> None:
        """Initialise all weights.

        `gpt2` makes the matrices whose products are added to the residual stream smaller the deeper the model is;
        `zero` makes them and an untied head zero. Value embeddings, skip weights and biases start at zero, so that the
        model starts as one without them.
        """
        fill = self._initial(init, embedding_std)
        drawn = []
        for name, parameter in self.named_parameters():
            if (std := fill[name].std) is None:
                parameter.data.fill_(fill[name].constant)
            else:
                drawn.append((parameter.data, std))
        fill_normal(drawn, tensor_seeds(len(drawn), generator))

    def initialise_in_parts(
        self, device: torch.device, generator: torch.Generator, init: str = "gpt2", embedding_std: float = _INIT_STD
    ) -> Iterator[nn.Module]:
        """Do what `initialise` does for a decoder on the meta device; yield each block when its weights are there.

        Every tensor is drawn from a seed of its own, so that the weights are those of `initialise`, to the bit.
        """
        fill = self._initial(init, embedding_std)
        drawn = [name for name, about in fill.items() if about.std is not None]
        seeds = dict(zip(drawn, tensor_seeds(len(drawn), generator), strict=True))
        parts = [[n for n in fill if n.startswith(f"blocks.{i}.")] for i in range(self.shape.layers)]
        outside = [name for name in fill if not name.startswith("blocks.")]
        for names, block in zip([*parts, outside], [*self.blocks, None], strict=True):
            tensors = {name: materialise(self, name, device) for name in names}
            for name in tensors.keys() - seeds.keys():
                tensors[name].data.fill_(fill[name].constant)
            random = [name for name in names if name in seeds]
            stds = [(tensors[name].data, fill[name].std or 0.0) for name in random]
            fill_normal(stds, [seeds[name] for name in random])
            if block is not None:
                yield block

    def _initial(self, init: str, embedding_std: float) -> dict[str, Fill]:
        """Return how each parameter is filled, in the order in which their seeds are drawn."""
        zero = init == "zero"
        stds = {
            "embedding.weight": embedding_std,
            "head.weight": 0.0 if zero else _INIT_STD,
            **dict.fromkeys(_OUTPUT_MATRICES, 0.0 if zero else _INIT_STD / (2 * self.shape.layers) ** 0.5),
        }
        found = {}
        for name, parameter in self.named_parameters():
            if name.startswith(("value_embeddings.", "skip_weights")) or name.endswith(".bias"):
                found[name] = Fill(0.0)
            elif parameter.dim() == 1:
                found[name] = Fill(1.0)
            else:
                found[name] = Fill(std=stds.get(re.sub(r"^blocks\.\d+\.", "", name), _INIT_STD))
        return found

    def use_float8(self, linears: Iterable[str], device: torch.device) -> None:
        """Train these linears of every block in fp8: fused blocks by our kernels, plain blocks by torchao."""
        if self.kernels == "fused":
            norms = [_frozen_norms(block) for block in self.blocks]
            self.scales = Scales(self.shape.layers, linears, self.shape.d_model, device, norms if all(norms) else ())
            return
        for block in self.blocks:
            assert isinstance(block, Block)
            for name in linears:
                block.linear(name).float8 = float8_linear()

    def compile_blocks(self, mode: str = "default") -> None:
        """Compile the blocks with torch.compile in `mode`.

        Each block is compiled by itself: they have the same graph, so the first one compiles for all. Fused blocks are
        hand-written kernels already.
        """
        if self.kernels == "fused":
            return
        for module in self.modules():
            if isinstance(module, LoraLinear):
                module.before_compiling()
        for block in self.blocks:
            block.compile(dynamic=False, mode=mode)

    def forward(
        self,
        tokens_BT: Tensor,
        mask: Bound,
        cache: list[KVCache] | None = None,
        start: int = 0,
        *,
        positions_T: Tensor | None = None,
        bidirectional: bool = False,
        update_cache: bool = True,
        padding_B: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [B, T, D] after the final norm.

        In place of tokens, embeddings [B, T, D] may be passed. The tokens are at positions start, start + 1, …, or at
        `positions`, a tensor whose values must not change afterwards. With a cache, the tokens follow those in it: each
        sees all earlier tokens, or with `bidirectional` all new ones as well. Without `update_cache` the cache does not
        store them. `padding` is how many tokens at the beginning of each row only fill it: no other token sees them,
        and positions are counted from the first one after them.
        """
        assert cache is not None or (update_cache and not bidirectional), "without a cache the mask decides this"
        x = tokens_BT.to(self.dtype) if tokens_BT.is_floating_point() else self.embed(tokens_BT)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        if padding_B is not None:
            cos, sin = self._rotary_of_rows(start, tokens_BT.shape[1], padding_B)
        elif positions_T is None:
            cos, sin = self._rotary_slice(start, tokens_BT.shape[1], tokens_BT.device)
        else:
            cos, sin = self._rotary_of_positions(positions_T)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        values, skips = self._values(tokens_BT), self._skips()
        if self.kernels == "fused" and cache is None:
            from redline.models.fused import run_blocks  # it imports this module

            attend = partial(self._attend, mask)
            return run_blocks(blocks, self.norm, x, cos, sin, attend, self.shape, values, skips, self.scales)
        states: list[Tensor] = []
        seen = None if cache is None else _seen_keys(tokens_BT, start, padding_B, bidirectional=bidirectional)
        step = CachedStep(bidirectional, update_cache, seen)
        for i, (block, skip) in enumerate(zip(blocks, skips, strict=True)):
            if skip is not None:
                x = x + skip.weight * states[skip.source]
            states.append(x)
            if cache is None:
                x = block(x, cos, sin, mask, values[i])
            else:
                x = block.extend(x, cos, sin, values[i], cache[i], step)
        hidden: Tensor = self.norm(x)
        return hidden

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the tokens' embeddings [B, T, D] in the compute precision."""
        return F.embedding(tokens_BT, self.embedding.weight).to(self.dtype)

    def _values(self, tokens_BT: Tensor) -> list[Tensor | None]:
        """Return for each layer the value embeddings to add to its values, if any."""
        tables = [table.weight for table in self.value_embeddings if isinstance(table, nn.Embedding)]
        embedded = [F.embedding(tokens_BT, table).to(self.dtype) for table in tables]
        return [None if table is None else embedded[table] for table in self.shape.value_tables]

    def _skips(self) -> list[Skip | None]:
        """Return for each layer the skip connection that is added to its input, if any."""
        sources = self.shape.skip_sources
        weights = iter(() if self.skip_weights is None else self.skip_weights.unbind())
        return [None if source is None else Skip(source, next(weights)) for source in sources]

    def _attend(self, mask: Bound, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in float32, with the softcap applied."""
        z = F.linear(hidden, self.head_weight.to(hidden.dtype)).float()
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    @torch.no_grad()
    def store_for_inference(self, unpack: bool = False) -> None:
        """Store the matrices in the compute precision, so that no pass has to convert them: outputs keep their bits.

        With `unpack`, frozen matrices in NF4 are stored dense too. A model can no longer be trained after this.
        """
        for module in self.modules():
            if isinstance(module, (Linear, nn.Embedding)):
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
                    parameter.data = parameter.data.to(self.dtype)
            elif isinstance(module, LoraLinear) and unpack:
                module.base.unpack(self.dtype)

    def new_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.blocks]

    def _rotary_slice(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # a power of two, so that sampling token by token makes few tables
        size = 1 << max(0, start + length - 1).bit_length()
        if (size, device) not in self._rotary_tables:
            head_dim = self.shape.head_dim
            self._rotary_tables[size, device] = rotary_table(size, head_dim, self.rope_theta, device, self.rope_scaling)
        cos, sin = self._rotary_tables[size, device]
        return cos[start : start + length], sin[start : start + length]

    def _rotary_of_rows(self, start: int, length: int, padding_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables [B, T, F] of rows whose positions begin after their padding."""
        cos, sin = self._rotary_slice(0, start + length, padding_B.device)
        positions = torch.arange(start, start + length, device=padding_B.device) - padding_B[:, None]
        return cos[positions.clamp_min(0)], sin[positions.clamp_min(0)]

    def _rotary_of_positions(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        if positions_T not in self._rotary_at:
            table = rotary_at(positions_T, self.shape.head_dim, self.rope_theta, self.rope_scaling)
            self._rotary_at[positions_T] = table
        return self._rotary_at[positions_T]


def _seen_keys(tokens_BT: Tensor, start: int, padding_B: Tensor | None, *, bidirectional: bool) -> Tensor | None:
    """Return which keys each new token sees, where that is not simply all of them or those up to the token itself."""
    assert padding_B is None or not bidirectional
    T = tokens_BT.shape[1]
    if bidirectional or (padding_B is None and (T == 1 or start == 0)):
        return None
    keys = torch.arange(start + T, device=tokens_BT.device)
    own = torch.arange(start, start + T, device=tokens_BT.device)[:, None]
    seen = keys <= own
    if padding_B is None:
        return seen[None, None]
    # A padding token sees itself, because attention over no keys at all is not a number.
    return ((seen & (keys >= padding_B[:, None, None])) | (keys == own))[:, None]


def _frozen_norms(block: nn.Module) -> list[float]:
    """Return the largest weight of each norm before a matmul, or an empty list if the norms are trained."""
    assert isinstance(block, Block)
    norms = [block.attention_norm.weight, block.mlp_norm.weight]
    if any(weight.requires_grad for weight in norms):
        return []
    return [max(float(weight.abs().amax()), 1e-3) for weight in norms]


# ----------------------------------------------------------------------------------------------------
# Initial weights.


_DRAWN_AT_ONCE = 8  # tensors


class Fill(NamedTuple):
    """The initial values of a parameter: a constant, or normal random numbers of a standard deviation."""

    constant: float = 0.0
    std: float | None = None


def materialise(model: nn.Module, name: str, device: torch.device) -> Tensor:
    """Return the parameter of this name; if it is on the meta device, replace it by an uninitialised one."""
    path, _, kind = name.rpartition(".")
    owner = model.get_submodule(path)
    parameter: Tensor = getattr(owner, kind)
    if parameter.is_meta:
        parameter = nn.Parameter(torch.empty_like(parameter, device=device))
        setattr(owner, kind, parameter)
    return parameter


def tensor_seeds(count: int, generator: torch.Generator) -> list[int]:
    """Return a seed for each of so many tensors: none depends on how the others are drawn, or where."""
    seeds: list[int] = torch.randint(1 << 62, (count,), generator=generator).tolist()
    return seeds


@torch.no_grad()
def fill_normal(tensors: Sequence[tuple[Tensor, float]], seeds: Sequence[int]) -> None:
    """Fill each tensor with normal random numbers of its standard deviation.

    They are drawn on the CPU, so that a seed gives the same model on every device, and each tensor has a seed of its
    own, so that several are drawn in parallel: one after the other, a billion parameters take ten seconds.
    """

    def draw(tensor: Tensor, std: float, seed: int) -> Tensor:
        return torch.empty(tensor.shape, device="cpu").normal_(0.0, std, generator=torch.Generator().manual_seed(seed))

    tasks = [(tensor, std, seed) for (tensor, std), seed in zip(tensors, seeds, strict=True)]
    with ThreadPoolExecutor(min(_DRAWN_AT_ONCE, os.cpu_count() or 1)) as pool:
        # In groups, so that no second copy of the model is in memory.
        for first in range(0, len(tasks), _DRAWN_AT_ONCE):
            group = tasks[first : first + _DRAWN_AT_ONCE]
            for (tensor, _, _), values in zip(group, pool.map(lambda task: draw(*task), group), strict=True):
                tensor.copy_(values)
