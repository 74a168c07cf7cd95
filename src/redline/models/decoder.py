"""The decoder that every job trains, and the initialisation of its weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from redline.kernels.attention import Attention, Bound
from redline.kernels.float8_choice import float8_linear
from redline.models.adapters import LoraLinear
from redline.models.float8 import Scales
from redline.models.fused import Skip, run_blocks
from redline.models.layers import Block, CachedStep, KVCache, Linear, RMSNorm, rotary_at, rotary_table
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# Initial weights.


_DRAWN_AT_ONCE = 8  # tensors


@torch.no_grad()
def fill_normal(tensors: Sequence[tuple[Tensor, float]], generator: torch.Generator) -> None:
    """Fill each tensor with normal random numbers of its standard deviation.

    They are drawn on the CPU, so that a seed gives the same model on every device, and each tensor has a seed of its
    own, so that several are drawn in parallel: one after the other, a billion parameters take ten seconds.
    """
    seeds = torch.randint(1 << 62, (len(tensors),), generator=generator).tolist()

    def draw(tensor: Tensor, std: float, seed: int) -> Tensor:
        return torch.empty(tensor.shape, device="cpu").normal_(0.0, std, generator=torch.Generator().manual_seed(seed))

    tasks = [(tensor, std, seed) for (tensor, std), seed in zip(tensors, seeds, strict=True)]
    with ThreadPoolExecutor(min(_DRAWN_AT_ONCE, os.cpu_count() or 1)) as pool:
        for first in range(
            0, len(tasks), _DRAWN_AT_ONCE
        ):  # in groups, so that no second copy of the model is in memory
            group = tasks[first : first + _DRAWN_AT_ONCE]
            for (tensor, _, _), values in zip(group, pool.map(lambda task: draw(*task), group), strict=True):
                tensor.copy_(values)


_INIT_STD = 0.02  # of matrices
_OUTPUT_MATRICES = ("attention.out.weight", "mlp.down.weight")  # their products are added to the residual stream


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
        zero = init == "zero"
        stds = {
            "embedding.weight": embedding_std,
            "head.weight": 0.0 if zero else _INIT_STD,
            **dict.fromkeys(_OUTPUT_MATRICES, 0.0 if zero else _INIT_STD / (2 * self.shape.layers) ** 0.5),
        }
        drawn = []
        for name, parameter in self.named_parameters():
            if name.startswith(("value_embeddings.", "skip_weights")) or name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                drawn.append((parameter.data, stds.get(re.sub(r"^blocks\.\d+\.", "", name), _INIT_STD)))
        fill_normal(drawn, generator)

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
    ) -> Tensor:
        """Return the hidden states [B, T, D] after the final norm.

        In place of tokens, embeddings [B, T, D] may be passed. The tokens are at positions start, start + 1, …, or at
        `positions`, a tensor whose values must not change afterwards. With a cache, the tokens follow those in it: each
        sees all earlier tokens, or with `bidirectional` all new ones as well. Without `update_cache` the cache does not
        store them.
        """
        assert cache is not None or (update_cache and not bidirectional), "without a cache the mask decides this"
        x = tokens_BT.to(self.dtype) if tokens_BT.is_floating_point() else self.embed(tokens_BT)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        if positions_T is None:
            cos, sin = self._rotary_slice(start, tokens_BT.shape[1], tokens_BT.device)
        else:
            cos, sin = self._rotary_of_positions(positions_T)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        values, skips = self._values(tokens_BT), self._skips()
        if self.kernels == "fused" and cache is None:
            attend = partial(self._attend, mask)
            return run_blocks(blocks, self.norm, x, cos, sin, attend, self.shape, values, skips, self.scales)
        states: list[Tensor] = []
        for i, (block, skip) in enumerate(zip(blocks, skips, strict=True)):
            if skip is not None:
                x = x + skip.weight * states[skip.source]
            states.append(x)
            if cache is None:
                x = block(x, cos, sin, mask, values[i])
            else:
                x = block.extend(x, cos, sin, values[i], cache[i], CachedStep(start, bidirectional, update_cache))
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

    def _rotary_of_positions(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        if positions_T not in self._rotary_at:
            table = rotary_at(positions_T, self.shape.head_dim, self.rope_theta, self.rope_scaling)
            self._rotary_at[positions_T] = table
        return self._rotary_at[positions_T]


def _frozen_norms(block: nn.Module) -> list[float]:
    """Return the largest weight of each norm before a matmul, or an empty list if the norms are trained."""
    assert isinstance(block, Block)
    norms = [block.attention_norm.weight, block.mlp_norm.weight]
    if any(weight.requires_grad for weight in norms):
        return []
    return [max(float(weight.abs().amax()), 1e-3) for weight in norms]
