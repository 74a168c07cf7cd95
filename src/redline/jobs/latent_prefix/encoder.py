"""The trained part of latent_prefix: the bytes of a text → a few latents → a prefix for each frozen model.

    bytes → encoder → states → M learned queries, by gated cross-attention → Z [M, d_z] → one adapter per model → [M, D]

Nothing here sees an answer or its length: the original LatentWire passed the answer's length to its adapter, which
leaks the label. Padding is masked in every attention, so that a text's latents do not depend on the batch. Weights are
float32; each layer computes in the precision of its input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.jobs.latent_prefix.costs import BYTES, WORDS, PrefixShape
from redline.kernels.attention import additive, by_matmuls
from redline.models.decoder import CHECKPOINTING, Linear, rotary_table, rotate

PAD = BYTES - 1
_THETA = 10000.0
_EPS = 1e-5
_QUERY_STD = 0.02
_MATMUL_POSITIONS = 384  # from about 512 on, torch's fused kernel is as fast, and keeps no weights


class LayerNorm(nn.Module):
    """Layer norm that computes in float32, whatever the precision of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, _EPS).to(x.dtype)


def _split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    B, T, _ = x_BTD.shape
    return x_BTD.view(B, T, heads, -1).transpose(1, 2)


def _merge_heads(x_BHTK: Tensor) -> Tensor:
    return x_BHTK.transpose(1, 2).flatten(2)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen_B11S: Tensor) -> Tensor:
    """Compute attention to the keys that are seen, on a CPU by matmuls where they are faster (decision 0030)."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[2] <= _MATMUL_POSITIONS:
        return by_matmuls(q, k, v, additive(seen_B11S, q.dtype), causal=False)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_B11S)


class EncoderBlock(nn.Module):
    """A pre-norm transformer block: attention over all positions that are not padding, and an MLP."""

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
        q, k, v = (_split_heads(part, self.heads) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        y = _attend(rotate(q, cos, sin), rotate(k, cos, sin), v, seen_B11S)
        x = x + self.out(_merge_heads(y))
        down: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + down


class ByteEncoder(nn.Module):
    """Bytes [B, S], padded at the end → states [B, S / patch, d_z] and a mask of the positions that hold a byte."""

    def __init__(self, shape: PrefixShape, checkpointing: str) -> None:
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
            filled = x * seen_BS[..., None]  # zero the padding of a patch that is only partly filled
            x = self.join(filled.view(B, S // self.patch, -1))
            seen_BS = seen_BS.view(B, S // self.patch, self.patch).any(-1)
        cos, sin = rotary_table(x.shape[1], self.head_dim, _THETA, x.device)
        for block in self.blocks:
            x = block(x, cos, sin, seen_BS[:, None, None])
        return self.norm(x), seen_BS


class Pool(nn.Module):
    """Gated cross-attention from learned queries to the encoder's states, and a gated MLP.

    The gates are tanh(a), as in Flamingo (arXiv 2204.14198), but a starts at 1 instead of 0: through a closed gate no
    gradient reaches the encoder.

    With plain attention every query starts as an average over the whole text, so the latents of all texts are nearly
    equal and training collapses to one answer for all. Therefore each query starts on its own stretch of the text:
    attention scores fall with the squared distance from it, at a rate (`focus`) that each head learns.
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
        """`centres` are the middles of the queries' stretches, as fractions of a text; the stretches have one width."""
        z = queries_MD.expand(len(memory_BSD), -1, -1)
        attention_gate, mlp_gate = torch.tanh(self.gates).to(z.dtype)
        q = _split_heads(self.query(self.query_norm(z)), self.heads)
        k, v = (_split_heads(part, self.heads) for part in self.memory(self.memory_norm(memory_BSD)).chunk(2, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(centres_M, seen_BS).to(q.dtype))
        z = z + attention_gate * self.out(_merge_heads(attended))
        z = z + mlp_gate * self.down(F.gelu(self.up(self.mlp_norm(z))))
        pooled: Tensor = self.norm(z)
        return pooled

    def _bias(self, centres_M: Tensor, seen_BS: Tensor) -> Tensor:
        """Return the bias of the scores [B, H, M, S]: −focus · (distance in stretches)², and −∞ at padding."""
        length = seen_BS.sum(1, keepdim=True).float()
        fractions_BS = (torch.arange(seen_BS.shape[1], device=seen_BS.device) + 0.5) / length
        stretch = 2.0 * centres_M.min()  # the first stretch begins at 0, so its width is twice its middle
        distance_BMS = ((fractions_BS[:, None] - centres_M[None, :, None]) / stretch).square()
        bias = -self.focus[None, :, None, None] * distance_BMS[:, None]
        return bias.masked_fill(~seen_BS[:, None, None], float("-inf"))


class Adapter(nn.Module):
    """Latents → a prefix for one frozen model, scaled to the RMS of that model's token embeddings.

    Slot embedding, layer norm, MLP with a linear skip, FiLM, layer norm, learned scale.
    """

    def __init__(self, shape: PrefixShape, d_model: int, rms: float) -> None:
        super().__init__()
        d = shape.d_z
        self.rms = rms  # of the frozen model's embeddings
        self.slots = nn.Embedding(shape.read, d)
        self.norm = LayerNorm(d)
        self.first, self.second, self.third = Linear(d, 2 * d), Linear(2 * d, 2 * d), Linear(2 * d, d_model)
        self.skip = Linear(d, d_model)
        self.film = Linear(d, 2 * d_model, (d_model, d_model))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, z_BMD: Tensor) -> Tensor:
        h = self.norm(z_BMD + self.slots.weight.to(z_BMD.dtype))
        y = self.third(F.gelu(self.second(F.gelu(self.first(h))))) + self.skip(h)
        # FiLM (arXiv 1709.07871), conditioned on the mean latent. The original conditioned it on the answer's length.
        gain, shift = self.film(z_BMD.mean(1, keepdim=True)).chunk(2, -1)
        modulated = (y * (1.0 + gain) + shift).float()
        normed = F.layer_norm(modulated, modulated.shape[-1:], eps=_EPS)
        return (normed * (self.scale * self.rms)).to(z_BMD.dtype)


class PrefixModel(nn.Module):
    """All trained parameters. Frozen models are named by their numbers in the recipe; some may be absent."""

    entry_points = ("latents",)  # as of ShardedBlock; everything else is computed after it

    def __init__(
        self,
        shape: PrefixShape,
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
        """Initialise on the CPU, each parameter from its own seed.

        So the values depend neither on the device nor on which other frozen models the recipe names.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # norms, gates and scales keep the values that they were constructed with
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            if name.startswith(("shared.", "private.")) or name.endswith(".slots.weight"):
                std = _QUERY_STD
            elif name.endswith(".film.weight"):
                std = 0.0  # FiLM starts as the identity
            else:
                std = 1.0 if name == "encoder.embedding.weight" else 1.0 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 1.0, generator=generator) * std)

    @property
    def names(self) -> list[str]:
        return list(self.adapters)

    def latents(self, bytes_BS: Tensor) -> dict[str, Tensor]:
        """Return the latents [B, M, d_z] of each model: the shared slots, then its private ones."""
        states, seen = self.encoder(bytes_BS, self.dtype)
        # One cross-attention for all queries. Queries do not attend to each other, so the latents of one model are the
        # same whether or not the queries of other models are present.
        private = [table.weight for table in self.private.values() if isinstance(table, nn.Embedding)]
        queries = (self.shared.weight, *private)
        latents = self.pool(torch.cat(queries).to(self.dtype), self._centres(queries), states, seen)
        shared_latents, *private_latents = latents.split([len(one) for one in queries], 1)
        if not private_latents:
            return dict.fromkeys(self.names, shared_latents)
        return {name: torch.cat((shared_latents, z), 1) for name, z in zip(self.names, private_latents, strict=True)}

    def _centres(self, queries: Sequence[Tensor]) -> Tensor:
        """Return the middle of each query's stretch; the queries of each group together span the text."""
        device = queries[0].device
        return torch.cat([(torch.arange(len(one), device=device) + 0.5) / len(one) for one in queries])

    def prefix(self, name: str, z_BMD: Tensor) -> Tensor:
        prefix: Tensor = self.adapters[name](z_BMD.to(self.dtype))
        return prefix

    def scale_terms(self) -> Tensor:
        """Return Σ (scale − 1)² over the models."""
        scales = tuple(adapter.scale for adapter in self.adapters.values() if isinstance(adapter, Adapter))
        return (torch.cat(scales) - 1.0).square().sum()

    def compile_blocks(self, mode: str = "default") -> None:
        """Compile the encoder's blocks, and raise torch's limit of recompilations.

        Rows come in a few lengths, and each length compiles a graph in every model. Beyond the limit torch would run
        uncompiled without a message.
        """
        import torch._dynamo

        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 8 * len(self.adapters))
        for block in self.encoder.blocks:
            block.compile(dynamic=False, mode=mode)


def _seed_of(seed: int, name: str) -> int:
    """Return a seed that depends on the parameter's name; unlike `hash`, it is the same in every process."""
    mixed = seed & 0xFFFFFFFF
    for character in name.encode():
        mixed = (mixed * 1_000_003 ^ character) & 0x7FFF_FFFF_FFFF_FFFF
    return mixed


def word_loss(head: Linear, z_BMD: Tensor, words_BW: Tensor) -> Tensor:
    """Return −log p(word), averaged over the words of each text [B]. Words are hashed, and padded with −1."""
    return _mixture_loss(head(z_BMD).float(), words_BW)


def token_loss(prefix_BMD: Tensor, embedding_VD: Tensor, tokens_BW: Tensor) -> Tensor:
    """Return −log p(token), averaged over the distinct tokens of each text [B], which are padded with −1.

    A position of the prefix predicts tokens by its products with their embeddings in the frozen model. That model reads
    embeddings of tokens best, so a prefix begins as the text's own words in the order of their places. The products are
    divided so that those of a vector as long as the embeddings with itself are √D, whatever their scale.
    """
    prefix, embedding = prefix_BMD.float(), embedding_VD.float()
    scale = embedding.square().mean() * math.sqrt(embedding.shape[1])
    return _mixture_loss(prefix @ embedding.T / scale, tokens_BW)


def _mixture_loss(logits_BMV: Tensor, ids_BW: Tensor) -> Tensor:
    """Return −log p(id), averaged over the valid ids of each row, where p is the mean of all slots' distributions."""
    mixture_BV = logits_BMV.log_softmax(-1).logsumexp(1) - math.log(logits_BMV.shape[1])
    valid_BW = ids_BW >= 0
    logs_BW = mixture_BV.gather(1, ids_BW.clamp_min(0)) * valid_BW
    return -logs_BW.sum(1) / valid_BW.sum(1).clamp_min(1)


def mean_cosine(latents: Tensor) -> float | None:
    """Return the mean cosine similarity between the latents [B, M, d_z] of different texts; None with fewer than two.

    A value of 1 is mode collapse: the latents do not depend on the text.
    """
    rows = latents.flatten(1).float()
    if len(rows) < 2:
        return None
    total = F.normalize(rows, dim=1).sum(0)
    count = len(rows)
    return float((total.square().sum() - count) / (count * (count - 1)))
