"""A block or hierarchical diffusion language model that redline trained, for transformers with trust_remote_code=True.

This file stands alone: it needs torch, numpy and transformers, and nothing of redline. The weights have the names and
shapes of the modules below. A sequence is a list of segments, each of equal blocks; a block is denoised while it reads
the finished blocks before it, whose keys and values are kept.

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True).eval()
    rows = model.write(prompt_ids, count=2, seed=0)      # token ids after the prompt
    logits = model(noisy_block, context_ids=finished)    # of one noisy block, for code of your own
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

Cache = list[tuple[Tensor, Tensor] | None]
_COLDEST = 1e-3  # below this temperature the likeliest token is taken


class RedlineDiffusionConfig(PretrainedConfig):
    model_type = "redline_diffusion"

    def __init__(self, **options: Any) -> None:
        self.layers: int = options.pop("layers", 1)
        self.d_model: int = options.pop("d_model", 8)
        self.heads: int = options.pop("heads", 1)
        self.kv_heads: int = options.pop("kv_heads", 1)
        self.head_dim: int = options.pop("head_dim", 8)
        self.d_ff: int = options.pop("d_ff", 8)
        self.mlp: str = options.pop("mlp", "swiglu")
        self.tied: bool = options.pop("tied", True)
        self.qk_norm: bool = options.pop("qk_norm", False)
        self.qkv_bias: bool = options.pop("qkv_bias", False)
        self.softcap: float | None = options.pop("softcap", None)
        self.rotary_theta: float = options.pop("rotary_theta", 10000.0)
        self.rotary_scaling: dict[str, Any] | None = options.pop("rotary_scaling", None)
        self.norm_eps: float = options.pop("norm_eps", 1e-5)
        # [name, length, block, given]: given segments are the prompt, the others are written
        self.segments: list[list[Any]] = options.pop("segments", [])
        self.repeats: bool = options.pop("repeats", False)  # any number of blocks, as for text
        self.mask_id: int = options.pop("mask_id", 0)
        self.classes: int = options.pop("classes", 0)  # ids below this can be predicted
        self.end_id: int = options.pop("end_id", 0)
        self.shift: bool = options.pop("shift", False)  # a token is predicted at the position before it
        self.sampler: str = options.pop("sampler", "first_hitting")
        self.sampler_steps: int | None = options.pop("sampler_steps", None)
        options.setdefault("vocab_size", 1)
        options["tie_word_embeddings"] = False  # the head reads the embedding itself
        super().__init__(**options)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotary(start: int, length: int, config: PretrainedConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / config.rotary_theta**exponents
    if (scaling := config.rotary_scaling) is not None:
        stretched = frequency / scaling["factor"]
        if scaling["rope_type"] == "linear":
            frequency = stretched
        else:  # llama3
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            frequency = torch.lerp(stretched, frequency, ((turns - low) / (high - low)).clamp(0.0, 1.0))
    angle = torch.arange(start, start + length, device=device).float()[:, None] * frequency[None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: RedlineDiffusionConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.d_model, bias=False)
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Let every new token see all past and all new tokens; return the output, and all keys and values."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        repeats = self.heads // self.kv_heads
        keys, values = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, keys, values)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class FeedForward(nn.Module):
    def __init__(self, config: RedlineDiffusionConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        gated = config.mlp == "swiglu"
        self.up = nn.Linear(config.d_model, config.d_ff * (2 if gated else 1), bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "swiglu":
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:  # relu2
            h = F.relu(h).square()
        out: Tensor = self.down(h)
        return out


class Block(nn.Module):
    def __init__(self, config: RedlineDiffusionConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.d_model, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, present = self.attention(self.attention_norm(x), cos, sin, past)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), present


class RedlineDiffusion(PreTrainedModel):
    config_class = RedlineDiffusionConfig
    main_input_name = "input_ids"

    def __init__(self, config: RedlineDiffusionConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.d_model, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every weight is in the file."""

    # --- the network

    def states(self, tokens: Tensor, cache: Cache, start: int, *, keep: bool) -> Tensor:
        """Return the states of one block at position `start`; with `keep`, add its keys and values to the cache."""
        cos, sin = rotary(start, tokens.shape[1], self.config, tokens.device)
        x = F.embedding(tokens, self.embedding.weight)
        for number, block in enumerate(self.blocks):
            x, present = block(x, cos, sin, cache[number])
            if keep:
                cache[number] = present
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, states: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        z = F.linear(states, weight.to(states.dtype)).float()
        cap = self.config.softcap
        return (cap * torch.tanh(z / cap) if cap else z)[..., : self.config.classes]

    def forward(self, input_ids: Tensor, context_ids: Tensor | None = None) -> Tensor:
        """Return the logits [B, L, classes] of a noisy block after the finished tokens `context_ids` [B, N].

        The context must end at the end of a block. Without `shift`, a row predicts the token at its own position.
        """
        cache, begin, before = self._read(context_ids)
        states = self.states(input_ids, cache, begin, keep=False)
        if self.config.shift:
            states = torch.cat((states[:, :1] if before is None else before, states[:, :-1]), 1)
        return self.logits(states)

    def _read(self, context: Tensor | None) -> tuple[Cache, int, Tensor | None]:
        cache: Cache = [None] * self.config.layers
        begin, before = 0, None
        for length, size, _ in self._layout(0 if context is None else context.shape[1]):
            for _ in range(length // size):
                if context is None or begin >= context.shape[1]:
                    return cache, begin, before
                before = self.states(context[:, begin : begin + size], cache, begin, keep=True)[:, -1:]
                begin += size
        return cache, begin, before

    def _layout(self, least: int = 0) -> list[tuple[int, int, bool]]:
        """Return (length, block, given) of each segment; a text is as long as it has to be."""
        segments = [(length, block, given) for _, length, block, given in self.config.segments]
        if self.config.repeats:
            block = segments[0][1]
            return [(max(segments[0][0], -(-least // block) * block), block, False)]
        return segments

    # --- sampling

    @torch.no_grad()
    def write(
        self,
        prompt_ids: list[int],
        *,
        count: int = 1,
        tokens: int = 100,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> list[list[int]]:
        """Return what the model writes after the prompt, `count` times. A row depends on the seed and its number only.

        For a model of text, the prompt begins with the end-of-text token and at most `tokens` follow. For a model of
        questions, the prompt is the question, and `tokens` is ignored.
        """
        config = self.config
        if config.repeats:
            block = config.segments[0][2]
            one_block = block == config.segments[0][1]
            length = block if one_block else -(-(len(prompt_ids) + tokens) // block) * block
            segments = [(length, block, False)]
            start = list(prompt_ids)
        else:
            segments = self._layout()
            given = segments[0][0]
            start = [*prompt_ids[:given], *[config.end_id] * (given - len(prompt_ids))]
            length = sum(size for size, _, _ in segments)
        if len(start) > length or (config.repeats and len(start) >= length):
            raise ValueError(f"a prompt of {len(start)} tokens leaves nothing of {length} positions to write")
        row = [*start, *[config.mask_id] * (length - len(start))]
        rows = torch.tensor([row] * count, device=self.embedding.weight.device)
        seeds = [int(np.random.SeedSequence((seed, n)).generate_state(1, np.uint64)[0]) for n in range(count)]
        done = self.denoise(rows, segments, seeds, temperature, top_k, top_p)
        written = done[:, len(start) : len(start) + tokens if config.repeats else None].tolist()
        return [_until(one, config.end_id) if config.repeats else one for one in written]

    @torch.no_grad()
    def denoise(
        self,
        rows: Tensor,
        segments: list[tuple[int, int, bool]],
        seeds: list[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Tensor:
        """Replace every mask in the rows, one block after the other."""
        config, rows = self.config, rows.clone()
        masked_at_first = rows == config.mask_id
        random = [np.random.default_rng(one) for one in seeds]
        cache: Cache = [None] * config.layers
        begin, before, length = 0, None, rows.shape[1]
        for segment, size, given in segments:
            ended = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
            for _ in range(segment // size):
                block = slice(begin, begin + size)
                masked = rows[:, block] == config.mask_id
                rows[:, block] = rows[:, block].masked_fill(ended[:, None] & masked, config.end_id)
                for unmasked in self._order((rows[:, block] == config.mask_id).cpu().numpy(), random):
                    states = self.states(rows[:, block], cache, begin, keep=False)
                    if config.shift:
                        states = torch.cat((states[:, :1] if before is None else before, states[:, :-1]), 1)
                    row, column = np.nonzero(unmasked)
                    counts = [int(one) for one in unmasked.sum(1)]
                    draws = np.concatenate([random[i].random(n) for i, n in enumerate(counts) if n])
                    where = torch.from_numpy(row).to(rows.device), torch.from_numpy(column).to(rows.device)
                    uniform = torch.from_numpy(draws).to(rows.device, torch.float32)
                    chosen = _choose(self.logits(states[where]), uniform, temperature, top_k, top_p)
                    rows[where[0], where[1] + begin] = chosen
                if block.stop < length:
                    before = self.states(rows[:, block], cache, begin, keep=True)[:, -1:]
                if not given:
                    ended = ended | ((rows[:, block] == config.end_id) & masked_at_first[:, block]).any(1)
                begin = block.stop
        return rows

    def _order(self, masked: Any, random: list[np.random.Generator]) -> list[Any]:
        """Return, for each forward pass, the positions [B, L] that it unmasks."""
        if not masked.any():
            return []
        steps = np.full(masked.shape, -1, dtype=np.int64)
        for i, (row, one) in enumerate(zip(masked, random, strict=True)):
            count = int(row.sum())
            if self.config.sampler == "first_hitting":
                steps[i, row] = one.permutation(count)
            else:
                number = self.config.sampler_steps or len(row)
                steps[i, row] = np.minimum((one.random(count) * number).astype(np.int64), number - 1)
        return [steps == step for step in np.unique(steps[steps >= 0])]


def _choose(logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Sample one token per row by inverting its cumulative distribution at a uniform draw."""
    if temperature < _COLDEST:
        return logits.argmax(-1)
    ordered, order = (logits.float() / temperature).softmax(-1).sort(descending=True, stable=True)
    total = ordered.cumsum(-1)
    if top_k is not None and top_k < ordered.shape[1]:
        total = total[:, :top_k].contiguous()
    mass = total[:, -1:]
    if top_p is not None and top_p < 1.0:
        inside = (total <= top_p * mass).sum(-1, keepdim=True)
        mass = total.gather(1, (inside - 1).clamp(min=0))
    chosen = torch.searchsorted(total, uniform[:, None] * mass).clamp(max=total.shape[1] - 1)
    return order.gather(1, chosen)[:, 0]


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
