"""The frozen language models: each reads [begin][prefix][anchor][answer], or a text in place of the prefix.

If the encoder does not know the question, it stands between prefix and anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.jobs.latent_prefix.data import PromptTokenizer
from redline.kernels.attention import Attention, MaskSpec, select
from redline.kernels.cross_entropy import IGNORE
from redline.models.decoder import Decoder
from redline.models.pretrained import Base, fill_frozen, random_tensors
from redline.planning.shapes import Adapter, DecoderShape
from redline.recipe.schema import Lora

_BATCH_TOKENS = 1 << 14  # tokens of texts that are read in one forward pass
CAUSAL = MaskSpec(causal=True)


@dataclass(frozen=True)
class FrozenSpec:
    """Which frozen model, and its quantisation. Without a base its weights are random, for timed steps."""

    name: str  # its number in the recipe
    source: str
    base: Base | None
    shape: DecoderShape
    quantised: bool
    double: bool

    @property
    def title(self) -> str:
        """The last part of the source, for messages."""
        return self.source.rstrip("/").rpartition("/")[2]


class FrozenModel:
    """A frozen decoder with its tokenizer. Its weights have no gradients; gradients flow through it to the prefix."""

    def __init__(self, spec: FrozenSpec, decoder: Decoder, tokenizer: PromptTokenizer | None) -> None:
        self.spec, self.decoder, self.tokenizer = spec, decoder, tokenizer
        self.device = decoder.embedding.weight.device
        begin, anchor = (tokenizer.begin, tokenizer.anchor) if tokenizer else ([0], [0, 0])
        self.begin, self.anchor = (torch.tensor(ids, device=self.device, dtype=torch.long) for ids in (begin, anchor))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def vocab(self) -> int:
        assert self.tokenizer is not None
        return min(self.tokenizer.vocab_size, self.decoder.shape.vocab)

    @property
    def rms(self) -> float:
        """The RMS of its token embeddings, which a prefix is scaled to."""
        return float(self.decoder.embedding.weight.float().square().mean().sqrt())

    def start(self, prefix_BMD: Tensor, asked_BQ: Tensor | None = None) -> Tensor:
        """Return the embeddings of everything before the answer: begin, prefix, questions of one length, anchor."""
        begin, anchor = (self.decoder.embed(ids).expand(len(prefix_BMD), -1, -1) for ids in (self.begin, self.anchor))
        question = () if asked_BQ is None else (self.decoder.embed(asked_BQ),)
        return torch.cat((begin, prefix_BMD.to(begin.dtype), *question, anchor), 1)

    def states(self, prefix_BMD: Tensor, targets_BA: Tensor, asked_BQ: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, A, D] that predict the targets, from one teacher-forced pass.

        CE, CE_first, CE_K and KD_K are all computed from these states. The original ran a pass for each. Questions are
        padded with IGNORE at their ends.
        """
        if asked_BQ is not None:
            return self._states_after_questions(prefix_BMD, targets_BA, asked_BQ)
        start = self.start(prefix_BMD)
        # Targets are padded at the end, so under the causal mask no real position sees the padding.
        answer = self.decoder.embed(targets_BA[:, :-1].clamp_min(0))
        inputs = torch.cat((start, answer), 1)
        hidden: Tensor = self.decoder(inputs, self._bind(inputs.shape[1]))
        return hidden[:, start.shape[1] - 1 :]

    def _states_after_questions(self, prefix_BMD: Tensor, targets_BA: Tensor, asked_BQ: Tensor) -> Tensor:
        """As `states`, with answers that begin at different positions: behind each row's own question."""
        (B, Q), A = asked_BQ.shape, targets_BA.shape[1]
        lengths_B1 = (asked_BQ != IGNORE).sum(1, keepdim=True)
        padded = torch.cat((asked_BQ, self.anchor.expand(B, -1), targets_BA[:, :-1]), 1).clamp_min(0)
        # Move anchor and answer of each row to the left, over the padding of its question.
        columns = torch.arange(padded.shape[1], device=self.device)[None]
        moved = torch.where(columns < lengths_B1, columns, (columns + Q - lengths_B1).clamp_max(padded.shape[1] - 1))
        begin = self.decoder.embed(self.begin).expand(B, -1, -1)
        inputs = torch.cat((begin, prefix_BMD.to(begin.dtype), self.decoder.embed(padded.gather(1, moved))), 1)
        hidden: Tensor = self.decoder(inputs, self._bind(inputs.shape[1]))
        first_B1 = len(self.begin) + prefix_BMD.shape[1] + lengths_B1 + len(self.anchor) - 1
        places_BA = first_B1 + torch.arange(A, device=self.device)
        return hidden.gather(1, places_BA[..., None].expand(-1, -1, hidden.shape[-1]))

    def text_states(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each row's number and the states [A, D] that predict its answer after its prompt, in any order."""
        lengths = [len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, answers, strict=True)]
        order = sorted(range(len(prompts)), key=lambda row: -lengths[row])
        while order:
            count = max(1, _BATCH_TOKENS // lengths[order[0]])
            batch, order = order[:count], order[count:]  # longest first: rows of a batch have similar lengths
            tokens = torch.zeros(len(batch), lengths[batch[0]], dtype=torch.long)
            for i, row in enumerate(batch):
                tokens[i, : lengths[row]] = torch.tensor([*prompts[row], *answers[row][:-1]])
            hidden = self.decoder(tokens.to(self.device), self._bind(tokens.shape[1]))
            for i, row in enumerate(batch):
                yield row, hidden[i, len(prompts[row]) - 1 : lengths[row]]

    def _bind(self, length: int) -> Any:
        return self.decoder.attention.bind(length)


def build_frozen(
    spec: FrozenSpec,
    tokenizer: PromptTokenizer | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    checkpointing: str,
    kernels: str,
    model: dict[str, Any],
) -> FrozenModel:
    """Build the decoder and load its frozen weights.

    `model` holds those keys of a recipe's `model` section that the shape does not cover: rotary embedding, norms, …
    """
    with torch.device("meta"):
        decoder = Decoder(
            spec.shape,
            attention=Attention(backend, CAUSAL, device.type, grouped=spec.shape.kv_heads != spec.shape.heads),
            rope_theta=model["rope_theta"],
            rope_scaling=model["rope_scaling"],
            eps=model["norm_eps"],
            softcap=model.get("softcap"),
            dtype=dtype,
            checkpointing=checkpointing,
            kernels=kernels,
        )
    fill_frozen(
        decoder,
        random_tensors(decoder, device) if spec.base is None else spec.base.tensors(),
        Adapter(1, (), spec.quantised, spec.double),
        lora=Lora(),
        device=device,
        generator=torch.Generator(),
    )
    decoder.eval()
    return FrozenModel(spec, decoder, tokenizer)


def choose_attention(
    requested: str, shape: DecoderShape, rows: int, length: int, device: str, dtype: torch.dtype
) -> Any:
    return select(requested, CAUSAL, device=device, dtype=dtype, shape=(rows, shape.heads, length, shape.head_dim))


@dataclass(frozen=True)
class Scores:
    """Sums over rows, to be averaged: −log p of the answers' tokens, and hits of their first tokens."""

    nll: float = 0.0
    tokens: int = 0
    top1: int = 0
    top5: int = 0
    rows: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def metrics(self) -> dict[str, float]:
        rows = max(1, self.rows)
        mean = self.nll / max(1, self.tokens)
        return {"nll": mean, "first_top1": self.top1 / rows, "first_top5": self.top5 / rows}


def score(decoder: Decoder, hidden_BAD: Tensor, targets_BA: Tensor) -> Scores:
    """Score the predictions of rows whose targets are padded with IGNORE."""
    logits = decoder.logits(hidden_BAD)
    tokens = int((targets_BA != IGNORE).sum())
    nll = F.cross_entropy(logits.flatten(0, 1), targets_BA.flatten(), ignore_index=IGNORE, reduction="sum")
    top5 = logits[:, 0].topk(min(5, logits.shape[-1])).indices == targets_BA[:, :1]
    return Scores(float(nll), tokens, int(top5[:, 0].sum()), int(top5.any(1).sum()), len(targets_BA))
