"""A text's bytes → a few latents → prefixes that frozen models read.

    bytes → encoder → memory → queries that look into it, gated → Z [M, d_z] → an adapter for each model → [M, D]

Nothing here sees an answer or its length, and padding is masked wherever positions meet. Weights are float32 masters;
each layer computes in its input's precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.jobs.latent_prefix.costs import BYTES, WORDS, WireShape
from redline.models.layers import CHECKPOINTING, Linear, rotary_table, rotate

PAD = BYTES - 1
_THETA = 10000.0
_EPS = 1e-5
_QUERY_STD = 0.02


class LayerNorm(nn.Module):
    """In float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, _EPS).to(x.dtype)


def _heads(x_BTD: Tensor, heads: int) -> Tensor:
    B, T, _ = x_BTD.shape
    return x_BTD.view(B, T, heads, -1).transpose(1, 2)


def _joined(x_BHTK: Tensor) -> Tensor:
    return x_BHTK.transpose(1, 2).flatten(2)


class EncoderBlock(nn.Module):
    """Pre-norm attention over all positions that are not padding, and a feed-forward layer."""

    def __init__(self, d: int, heads: int, checkpointing: str) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = LayerNorm(d)
        self.qkv = Linear(d, 3 * d, (d, d, d))
        self.out = Linear(d, d)
        self.mlp_norm = LayerNorm(d)
        self.up = Linear(d, 4 * d)
        self.down = Linear(4 * d, d)
        self.run = CHECKPOINTING[checkpointing]

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, seen_B11S: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.run(self._body, x_BSD, cos, sin, seen_B11S)
        return self._body(x_BSD, cos, sin, seen_B11S)

    def _body(self, x: Tensor, cos: Tensor, sin: Tensor, seen_B11S: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=seen_B11S)
        x = x + self.out(_joined(y))
        down: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + down


class ByteEncoder(nn.Module):
    """Bytes [B, S], padded behind → states [B, S / patch, d_z] and which of them hold a byte."""

    def __init__(self, shape: WireShape, checkpointing: str) -> None:
        super().__init__()
        d = shape.d_z
        self.patch, self.head_dim = shape.patch, d // shape.heads
        self.embedding = nn.Embedding(BYTES, d)
        self.join = Linear(shape.patch * d, d) if shape.patch > 1 else None
        self.blocks = nn.ModuleList(EncoderBlock(d, shape.heads, checkpointing) for _ in range(shape.layers))
        self.norm = LayerNorm(d)

    def forward(self, bytes_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = F.embedding(bytes_BS, self.embedding.weight).to(dtype)
        seen_BS = bytes_BS != PAD
        if self.join is not None:
            B, S = bytes_BS.shape
            held = x * seen_BS[..., None]  # a patch that is partly padding is the same whatever follows it
            x = self.join(held.view(B, S // self.patch, -1))
            seen_BS = seen_BS.view(B, S // self.patch, self.patch).any(-1)
        cos, sin = rotary_table(x.shape[1], self.head_dim, _THETA, x.device)
        for block in self.blocks:
            x = block(x, cos, sin, seen_BS[:, None, None])
        return self.norm(x), seen_BS


class Pool(nn.Module):
    """Queries look into the encoder's states, and add what they find as far as a gate lets it (as in Flamingo, arXiv
    2204.14198, but open at first: a closed gate teaches the encoder nothing).

    Without more, every query begins by averaging the whole text, and all texts look alike. So each begins with a
    stretch of its own: scores fall with the distance from it, by a focus that each head learns.
    """

    def __init__(self, d: int, heads: int, focus: float) -> None:
        super().__init__()
        self.heads = heads
        self.focus = nn.Parameter(torch.full((heads,), focus))
        self.query_norm, self.memory_norm, self.mlp_norm = LayerNorm(d), LayerNorm(d), LayerNorm(d)
        self.query, self.out = Linear(d, d), Linear(d, d)
        self.memory = Linear(d, 2 * d, (d, d))
        self.up, self.down = Linear(d, 4 * d), Linear(4 * d, d)
        self.gates = nn.Parameter(torch.ones(2))
        self.norm = LayerNorm(d)

    def forward(self, queries_MD: Tensor, centres_M: Tensor, memory_BSD: Tensor, seen_BS: Tensor) -> Tensor:
        """`centres` are the middles of the queries' stretches, as shares of a text; their widths are equal."""
        z = queries_MD.expand(len(memory_BSD), -1, -1)
        attend, think = torch.tanh(self.gates).to(z.dtype)
        q = _heads(self.query(self.query_norm(z)), self.heads)
        k, v = (_heads(part, self.heads) for part in self.memory(self.memory_norm(memory_BSD)).chunk(2, -1))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self._nearness(centres_M, seen_BS).to(q.dtype))
        z = z + attend * self.out(_joined(found))
        z = z + think * self.down(F.gelu(self.up(self.mlp_norm(z))))
        pooled: Tensor = self.norm(z)
        return pooled

    def _nearness(self, centres_M: Tensor, seen_BS: Tensor) -> Tensor:
        """What is added to scores [B, H, M, S]: the squared distance in stretches, and −∞ where nothing is."""
        length = seen_BS.sum(1, keepdim=True).float()
        places_BS = (torch.arange(seen_BS.shape[1], device=seen_BS.device) + 0.5) / length
        stretch = 2.0 * centres_M.min()  # the first begins at 0
        apart_BMS = ((places_BS[:, None] - centres_M[None, :, None]) / stretch).square()
        bias = -self.focus[None, :, None, None] * apart_BMS[:, None]
        return bias.masked_fill(~seen_BS[:, None, None], float("-inf"))


class Adapter(nn.Module):
    """Latents → a prefix for one frozen model, as loud as that model's own embeddings."""

    def __init__(self, shape: WireShape, d_model: int, rms: float) -> None:
        super().__init__()
        d = shape.d_z
        self.rms = rms  # of the model's embedding
        self.slots = nn.Embedding(shape.read, d)
        self.norm = LayerNorm(d)
        self.first, self.second, self.third = Linear(d, 2 * d), Linear(2 * d, 2 * d), Linear(2 * d, d_model)
        self.skip = Linear(d, d_model)
        self.film = Linear(d, 2 * d_model, (d_model, d_model))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, z_BMD: Tensor) -> Tensor:
        h = self.norm(z_BMD + self.slots.weight.to(z_BMD.dtype))
        y = self.third(F.gelu(self.second(F.gelu(self.first(h))))) + self.skip(h)
        # what the latents say together bends each of them (arXiv 1709.07871); never how long the answer is
        gain, shift = self.film(z_BMD.mean(1, keepdim=True)).chunk(2, -1)
        bent = (y * (1.0 + gain) + shift).float()
        normed = F.layer_norm(bent, bent.shape[-1:], eps=_EPS)
        return (normed * (self.scale * self.rms)).to(z_BMD.dtype)


class Wire(nn.Module):
    """Everything that learns. Models are known by their numbers in the recipe, of which any may be left out."""

    def __init__(
        self,
        shape: WireShape,
        widths: dict[str, int],
        rms: dict[str, float],
        *,
        dtype: torch.dtype = torch.float32,
        checkpointing: str = "none",
    ) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.encoder = ByteEncoder(shape, checkpointing)
        self.shared = nn.Embedding(shape.slots, shape.d_z)
        self.pool = Pool(shape.d_z, shape.heads, shape.focus)
        private = {name: nn.Embedding(shape.private, shape.d_z) for name in widths if shape.private}
        self.private = nn.ModuleDict(private)
        self.adapters = nn.ModuleDict({name: Adapter(shape, width, rms[name]) for name, width in widths.items()})
        self.words = Linear(shape.d_z, WORDS) if shape.words else None

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Drawn on the CPU, and each part apart: a model's adapter begins the same whoever else is there."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # norms, gates and scales begin as they were made
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            if name.startswith(("shared.", "private.")) or name.endswith(".slots.weight"):
                std = _QUERY_STD
            elif name.endswith(".film.weight"):
                std = 0.0  # bends nothing at first
            else:
                std = 1.0 if name == "encoder.embedding.weight" else 1.0 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 1.0, generator=generator) * std)

    @property
    def names(self) -> list[str]:
        return list(self.adapters)

    def latents(self, bytes_BS: Tensor) -> dict[str, Tensor]:
        """For each model its [B, M, d_z]: the shared slots, then its own."""
        memory, seen = self.encoder(bytes_BS, self.dtype)
        # one look for all of them; no query sees another, so one model's are the same without the others'
        own = [table.weight for table in self.private.values() if isinstance(table, nn.Embedding)]
        queries = (self.shared.weight, *own)
        every = self.pool(torch.cat(queries).to(self.dtype), self._centres(queries), memory, seen)
        shared, *apart = every.split([len(one) for one in queries], 1)
        if not apart:
            return dict.fromkeys(self.names, shared)
        return {name: torch.cat((shared, mine), 1) for name, mine in zip(self.names, apart, strict=True)}

    def _centres(self, queries: Sequence[Tensor]) -> Tensor:
        """Each group of queries spans the text; all of them in stretches as short as the largest group's."""
        device = queries[0].device
        return torch.cat([(torch.arange(len(one), device=device) + 0.5) / len(one) for one in queries])

    def prefix(self, name: str, z_BMD: Tensor) -> Tensor:
        made: Tensor = self.adapters[name](z_BMD.to(self.dtype))
        return made

    def scale_terms(self) -> Tensor:
        """Σ (scale − 1)² over the models."""
        scales = tuple(adapter.scale for adapter in self.adapters.values() if isinstance(adapter, Adapter))
        return (torch.cat(scales) - 1.0).square().sum()

    def compile_blocks(self, mode: str = "default") -> None:
        """Rows come in a few lengths, each with a graph of its own in every model: beyond its limit torch would go on
        uncompiled, and not say so."""
        import torch._dynamo

        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 8 * len(self.adapters))
        for block in self.encoder.blocks:
            block.compile(dynamic=False, mode=mode)


def _seed_of(seed: int, name: str) -> int:
    found = seed & 0xFFFFFFFF
    for character in name.encode():
        found = (found * 1_000_003 ^ character) & 0x7FFF_FFFF_FFFF_FFFF
    return found


def word_loss(head: Linear, z_BMD: Tensor, words_BW: Tensor) -> Tensor:
    """Of each text [B]: −log of what the latents together give to each of its words (a mixture: every slot has a
    distribution of its own), averaged over them. Words are padded with −1."""
    logs_BMV = head(z_BMD).float().log_softmax(-1)
    mixed_BV = logs_BMV.logsumexp(1) - math.log(z_BMD.shape[1])
    there = words_BW >= 0
    found = mixed_BV.gather(1, words_BW.clamp_min(0)) * there
    return -found.sum(1) / there.sum(1).clamp_min(1)


def cosine(latents: Sequence[Tensor]) -> float | None:
    """Between the latents of different texts, on average: 1 is collapse. None of fewer than two."""
    rows = torch.cat([z.flatten(1).float() for z in latents]) if latents else torch.empty(0, 1)
    if len(rows) < 2:
        return None
    total = F.normalize(rows, dim=1).sum(0)
    count = len(rows)
    return float((total.square().sum() - count) / (count * (count - 1)))
