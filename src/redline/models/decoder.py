"""The one decoder: every job trains this."""

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
from redline.models.layers import Block, KVCache, Linear, New, RMSNorm, rotary_at, rotary_table
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# Weights that a model begins with.


_AT_ONCE = 8


@torch.no_grad()
def draw_normal(wanted: Sequence[tuple[Tensor, float]], generator: torch.Generator) -> None:
    """Each with its standard deviation.

    On the CPU, so that a seed gives the same model on every device; each from a seed of its own, so that several can be
    drawn at once: one after the other, a billion takes ten seconds.
    """
    seeds = torch.randint(1 << 62, (len(wanted),), generator=generator).tolist()

    def drawn(tensor: Tensor, std: float, seed: int) -> Tensor:
        return torch.empty(tensor.shape, device="cpu").normal_(0.0, std, generator=torch.Generator().manual_seed(seed))

    every = [(tensor, std, seed) for (tensor, std), seed in zip(wanted, seeds, strict=True)]
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        for first in range(0, len(every), _AT_ONCE):  # a few are held beside the model, not all
            some = every[first : first + _AT_ONCE]
            for (tensor, _, _), values in zip(some, pool.map(lambda one: drawn(*one), some), strict=True):
                tensor.copy_(values)


_INIT_STD = 0.02  # of matrices
_ADDING = ("attention.out.weight", "mlp.down.weight")  # to the stream


def _table(rows: int, width: int) -> nn.Embedding:
    """Not drawn yet: torch's own would be, and without memory imports a compiler for it."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Decoder(nn.Module):
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
        self.embedding = _table(shape.vocab, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape, eps, dropout, attention, checkpointing) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.d_model, eps)
        self.head = None if shape.tied else Linear(shape.d_model, shape.vocab)
        tables = (_table(shape.vocab, shape.d_kv) for _ in range(shape.value_embeddings))
        self.value_embeddings = nn.ModuleList(tables)
        self.skip_weights = nn.Parameter(torch.empty(shape.skip_count)) if shape.skip_count else None
        self.scales: Scales | None = None  # of what trains in fp8
        self._rotary: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        # by the tensor itself, and for as long as it lives: a recorded step reads what was made for it
        self._placed: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakIdKeyDictionary()

    @property
    def head_weight(self) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    def initialise(self, generator: torch.Generator, init: str = "gpt2", embedding_std: float = _INIT_STD) -> None:
        """GPT-2's initialisation: what adds to the stream is smaller the deeper the model; or `zero` at first, and an
        untied head with it. Value embeddings, skips and biases begin at zero: they add nothing until they
        have learnt to."""
        zero = init == "zero"
        stds = {
            "embedding.weight": embedding_std,
            "head.weight": 0.0 if zero else _INIT_STD,
            **dict.fromkeys(_ADDING, 0.0 if zero else _INIT_STD / (2 * self.shape.layers) ** 0.5),
        }
        wanted = []
        for name, parameter in self.named_parameters():
            if name.startswith(("value_embeddings.", "skip_weights")) or name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                wanted.append((parameter.data, stds.get(re.sub(r"^blocks\.\d+\.", "", name), _INIT_STD)))
        draw_normal(wanted, generator)

    def use_float8(self, linears: Iterable[str], device: torch.device) -> None:
        """Train these linears of every block in fp8: fused blocks by our kernels, plain ones by torchao's."""
        if self.kernels == "fused":
            norms = [_frozen_norms(block) for block in self.blocks]
            self.scales = Scales(self.shape.layers, linears, self.shape.d_model, device, norms if all(norms) else ())
            return
        for block in self.blocks:
            assert isinstance(block, Block)
            for name in linears:
                block.linear(name).float8 = float8_linear()

    def compile_blocks(self, mode: str = "default") -> None:
        """Compile one graph for all layers: they are alike, so the first compiles for all. Fused blocks are kernels
        already. `mode` is torch.compile's."""
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
        whole: bool = False,
        keep: bool = True,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm.

        The tokens are at positions start…, or at those given: a tensor that stays as it is. After those in a cache
        each sees the tokens before it, or the `whole` of them; without `keep` the cache stays as it was. In place of
        tokens their embeddings [B, T, D] may be given, or anything else of that form.
        """
        assert cache is not None or (keep and not whole), "without a cache the mask says who sees whom"
        x = tokens_BT.to(self.dtype) if tokens_BT.is_floating_point() else self.embed(tokens_BT)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        if positions_T is None:
            cos, sin = self._rotary_slice(start, tokens_BT.shape[1], tokens_BT.device)
        else:
            cos, sin = self._rotary_of(positions_T)
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
                x = block.extend(x, cos, sin, values[i], cache[i], New(start, whole, keep))
        hidden: Tensor = self.norm(x)
        return hidden

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.embedding.weight).to(self.dtype)

    def _values(self, tokens_BT: Tensor) -> list[Tensor | None]:
        """For each layer what is added to its values."""
        tables = [table.weight for table in self.value_embeddings if isinstance(table, nn.Embedding)]
        found = [F.embedding(tokens_BT, table).to(self.dtype) for table in tables]
        return [None if table is None else found[table] for table in self.shape.value_tables]

    def _skips(self) -> list[Skip | None]:
        """For each layer what is added to its input."""
        sources = self.shape.skip_sources
        weights = iter(() if self.skip_weights is None else self.skip_weights.unbind())
        return [None if source is None else Skip(source, next(weights)) for source in sources]

    def _attend(self, mask: Bound, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        z = F.linear(hidden, self.head_weight.to(hidden.dtype)).float()
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    def new_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.blocks]

    def _rotary_slice(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = 1 << max(0, start + length - 1).bit_length()
        if (size, device) not in self._rotary:
            head_dim = self.shape.head_dim
            self._rotary[size, device] = rotary_table(size, head_dim, self.rope_theta, device, self.rope_scaling)
        cos, sin = self._rotary[size, device]
        return cos[start : start + length], sin[start : start + length]

    def _rotary_of(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        if positions_T not in self._placed:
            found = rotary_at(positions_T, self.shape.head_dim, self.rope_theta, self.rope_scaling)
            self._placed[positions_T] = found
        return self._placed[positions_T]


def _frozen_norms(block: nn.Module) -> list[float]:
    """The largest weight of each norm before a matmul; none where they learn."""
    assert isinstance(block, Block)
    norms = [block.attention_norm.weight, block.mlp_norm.weight]
    if any(weight.requires_grad for weight in norms):
        return []
    return [max(float(weight.abs().amax()), 1e-3) for weight in norms]
