"""LatentWire's encoder and adapters as redline trained them, for transformers with trust_remote_code=True.

This file stands alone: it needs torch and transformers, and nothing of redline. It turns the bytes of a text into a few
latents, and these into a prefix of embeddings for each frozen language model, which then answers about the text without
reading it.

    wire = AutoModel.from_pretrained(FOLDER, trust_remote_code=True).eval()
    latents = wire.encode(["a text\\n"])                       # {model's number: [B, M, d_z]}
    answers = wire.answer("0", frozen_model, latents["0"])    # token ids, by the frozen model itself
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

_PAD, _BYTES = 256, 257
_EPS, _THETA = 1e-5, 10000.0
_COLDEST = 1e-3  # below this temperature the likeliest token is taken


class RedlineLatentConfig(PretrainedConfig):
    model_type = "redline_latent"

    def __init__(self, **options: Any) -> None:
        self.d_z: int = options.pop("d_z", 8)
        self.layers: int = options.pop("layers", 1)
        self.heads: int = options.pop("heads", 1)
        self.patch: int = options.pop("patch", 1)  # bytes per position of the encoder
        self.most_bytes: int = options.pop("most_bytes", 64)  # of a text; the rest is cut off
        self.slots: int = options.pop("slots", 1)  # latents that all models read
        self.private_slots: int = options.pop("private_slots", 0)  # latents of each model alone
        # by the model's number: name, revision, fingerprint, width, rms, begin, anchor, stops, vocab, quant
        self.frozen: dict[str, dict[str, Any]] = options.pop("frozen", {})
        super().__init__(**options)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, _EPS).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class EncoderBlock(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = Norm(d), Norm(d)
        self.qkv, self.out = linear(d, 3 * d), linear(d, d)
        self.up, self.down = linear(d, 4 * d), linear(4 * d, d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=seen[:, None, None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + down


class Encoder(nn.Module):
    """Bytes [B, S], padded at the end → states, and which of them hold a byte."""

    def __init__(self, config: RedlineLatentConfig) -> None:
        super().__init__()
        d = config.d_z
        self.patch, self.head_dim = config.patch, d // config.heads
        self.embedding = nn.Embedding(_BYTES, d)
        self.join = linear(config.patch * d, d) if config.patch > 1 else None
        self.blocks = nn.ModuleList(EncoderBlock(d, config.heads) for _ in range(config.layers))
        self.norm = Norm(d)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x, seen = F.embedding(text, self.embedding.weight), text != _PAD
        if self.join is not None:
            rows, size = text.shape
            x = self.join((x * seen[..., None]).view(rows, size // self.patch, -1))
            seen = seen.view(rows, size // self.patch, self.patch).any(-1)
        exponents = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        angle = torch.arange(x.shape[1], device=x.device).float()[:, None] * (1.0 / _THETA**exponents)[None]
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin(), seen)
        return self.norm(x), seen


class Pool(nn.Module):
    """Gated cross-attention from learned queries, each of which starts on its own stretch of the text."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.focus = nn.Parameter(torch.ones(heads))
        self.query_norm, self.memory_norm, self.mlp_norm = Norm(d), Norm(d), Norm(d)
        self.query, self.out, self.memory = linear(d, d), linear(d, d), linear(d, 2 * d)
        self.up, self.down = linear(d, 4 * d), linear(4 * d, d)
        self.gates = nn.Parameter(torch.ones(2))
        self.norm = Norm(d)

    def forward(self, queries: Tensor, centres: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        z = queries.expand(len(memory), -1, -1)
        attention_gate, mlp_gate = torch.tanh(self.gates).to(z.dtype)
        q = split_heads(self.query(self.query_norm(z)), self.heads)
        k, v = (split_heads(part, self.heads) for part in self.memory(self.memory_norm(memory)).chunk(2, -1))
        places = (torch.arange(seen.shape[1], device=seen.device) + 0.5) / seen.sum(1, keepdim=True).float()
        distance = ((places[:, None] - centres[None, :, None]) / (2.0 * centres.min())).square()
        bias = -self.focus[None, :, None, None] * distance[:, None]
        bias = bias.masked_fill(~seen[:, None, None], float("-inf")).to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        z = z + attention_gate * self.out(y.transpose(1, 2).flatten(2))
        z = z + mlp_gate * self.down(F.gelu(self.up(self.mlp_norm(z))))
        pooled: Tensor = self.norm(z)
        return pooled


class Adapter(nn.Module):
    """Latents → a prefix for one frozen model, with the size of that model's embeddings."""

    def __init__(self, d: int, slots: int, width: int, rms: float) -> None:
        super().__init__()
        self.rms = rms
        self.slots, self.norm = nn.Embedding(slots, d), Norm(d)
        self.first, self.second, self.third = linear(d, 2 * d), linear(2 * d, 2 * d), linear(2 * d, width)
        self.skip, self.film = linear(d, width), linear(d, 2 * width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, z: Tensor) -> Tensor:
        h = self.norm(z + self.slots.weight.to(z.dtype))
        y = self.third(F.gelu(self.second(F.gelu(self.first(h))))) + self.skip(h)
        gain, shift = self.film(z.mean(1, keepdim=True)).chunk(2, -1)
        modulated = (y * (1.0 + gain) + shift).float()
        normed = F.layer_norm(modulated, modulated.shape[-1:], eps=_EPS)
        return (normed * (self.scale * self.rms)).to(z.dtype)


class RedlineLatent(PreTrainedModel):
    config_class = RedlineLatentConfig

    def __init__(self, config: RedlineLatentConfig) -> None:
        super().__init__(config)
        d, frozen = config.d_z, config.frozen
        self.encoder = Encoder(config)
        self.shared = nn.Embedding(config.slots, d)
        self.pool = Pool(d, config.heads)
        private = {name: nn.Embedding(config.private_slots, d) for name in frozen if config.private_slots}
        self.private = nn.ModuleDict(private)
        read = config.slots + config.private_slots
        self.adapters = nn.ModuleDict(
            {name: Adapter(d, read, one["width"], one["rms"]) for name, one in frozen.items()}
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every weight is in the file."""

    def forward(self, text: Tensor) -> dict[str, Tensor]:
        """Return the latents [B, M, d_z] of each model. `text` holds bytes, padded with 256."""
        states, seen = self.encoder(text)
        tables = [self.shared.weight, *(one.weight for one in self.private.values() if isinstance(one, nn.Embedding))]
        centres = torch.cat([(torch.arange(len(one), device=text.device) + 0.5) / len(one) for one in tables])
        shared, *private = self.pool(torch.cat(tables), centres, states, seen).split([len(one) for one in tables], 1)
        if not private:
            return dict.fromkeys(self.config.frozen, shared)
        names = list(self.config.frozen)
        return {name: torch.cat((shared, own), 1) for name, own in zip(names, private, strict=True)}

    @torch.no_grad()
    def encode(self, texts: list[str]) -> dict[str, Tensor]:
        """Return the latents of the texts. In training every text ended with a line break."""
        most, patch = self.config.most_bytes, self.config.patch
        raw = []
        for text in texts:
            own = text.encode("utf-8", "replace")
            raw.append(own if len(own) <= most else own[:most].decode("utf-8", "ignore").encode("utf-8"))
        size = -(-max(map(len, raw)) // patch) * patch
        rows = torch.full((len(raw), size), _PAD, dtype=torch.long)
        for row, own in enumerate(raw):
            rows[row, : len(own)] = torch.tensor(list(own), dtype=torch.long)
        latents: dict[str, Tensor] = self(rows.to(self.shared.weight.device))
        return latents

    def prefix(self, name: str, latents: Tensor) -> Tensor:
        """Return the prefix [B, M, width] for a frozen model."""
        prefix: Tensor = self.adapters[name](latents)
        return prefix

    def start(self, name: str, model: Any, latents: Tensor, question: list[int] | None = None) -> Tensor:
        """Return the embeddings that the frozen model reads before its answer: begin, prefix, question, anchor."""
        about, embed = self.config.frozen[name], model.get_input_embeddings()
        device = embed.weight.device
        parts = (about["begin"], [*(question or []), *about["anchor"]])
        ids = [torch.tensor(part, device=device, dtype=torch.long) for part in parts]
        begin, end = (embed(part).expand(len(latents), -1, -1) for part in ids)
        return torch.cat((begin, self.prefix(name, latents).to(device, begin.dtype), end), 1)

    @torch.no_grad()
    def answer(
        self,
        name: str,
        model: Any,
        latents: Tensor,
        *,
        question: list[int] | None = None,
        tokens: int = 32,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """Return the token ids that a frozen causal model of transformers writes, without the one that ends them.

        `question` has the tokens of `Question: …` and a line break, if the encoder was trained on contexts without
        questions (`question_aware: false`): the model reads them after the prefix.
        """
        about = self.config.frozen[name]
        inputs: dict[str, Any] = {"inputs_embeds": self.start(name, model, latents, question)}
        generator = torch.Generator(device=inputs["inputs_embeds"].device).manual_seed(seed)
        rows: list[list[int]] = [[] for _ in latents]
        ended, past = [False] * len(rows), None
        for _ in range(tokens):
            out = model(**inputs, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[:, -1].float()[:, : about["vocab"]]
            chosen = _choose(logits, generator, temperature, top_k, top_p)
            for row, token in enumerate(chosen.tolist()):
                ended[row] = ended[row] or token in about["stops"]
                if not ended[row]:
                    rows[row].append(token)
            if all(ended):
                break
            inputs = {"input_ids": chosen[:, None]}
        return rows


def _choose(
    logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    if temperature < _COLDEST:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
