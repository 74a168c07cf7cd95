"""A frozen model behind a prefix: it reads [begin][prefix][anchor][answer], or a text where the prefix was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.jobs.latent_prefix.data import Reader
from redline.kernels.attention import Attention, select
from redline.kernels.cross_entropy import IGNORE
from redline.kernels.masks import MaskSpec
from redline.models.decoder import Decoder
from redline.models.pretrained import Base, fill_frozen, random_tensors
from redline.planning.shapes import Adapter, DecoderShape
from redline.recipe.schema import Lora

_MOST_TOKENS = 1 << 14  # of texts that are read side by side
CAUSAL = MaskSpec(causal=True)


@dataclass(frozen=True)
class Spec:
    """Which frozen model, and how it is kept. Without a base it has random weights, for steps that are only timed."""

    name: str  # its number in the recipe
    source: str
    base: Base | None
    shape: DecoderShape
    quantised: bool
    double: bool

    @property
    def title(self) -> str:
        return self.source.rstrip("/").rpartition("/")[2]


class Frozen:
    """No weight of it has a gradient; what flows back goes to the prefix alone."""

    def __init__(self, spec: Spec, decoder: Decoder, reader: Reader | None) -> None:
        self.spec, self.decoder, self.reader = spec, decoder, reader
        self.device = decoder.embedding.weight.device
        begin, anchor = (reader.begin, reader.anchor) if reader else ([0], [0, 0])
        self.begin, self.anchor = (torch.tensor(ids, device=self.device, dtype=torch.long) for ids in (begin, anchor))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def vocab(self) -> int:
        assert self.reader is not None
        return min(self.reader.vocab_size, self.decoder.shape.vocab)

    @property
    def rms(self) -> float:
        """Of its embeddings: how loud a prefix must be."""
        return float(self.decoder.embedding.weight.float().square().mean().sqrt())

    def start(self, prefix_BMD: Tensor) -> Tensor:
        """Embeddings of everything before the answer."""
        before, behind = (self.decoder.embed(ids).expand(len(prefix_BMD), -1, -1) for ids in (self.begin, self.anchor))
        return torch.cat((before, prefix_BMD.to(before.dtype), behind), 1)

    def states(self, prefix_BMD: Tensor, targets_BA: Tensor) -> Tensor:
        """Hidden states [B, A, D] that predict the targets, each from those before it: one pass for all of them."""
        start = self.start(prefix_BMD)
        said = self.decoder.embed(targets_BA[:, :-1].clamp_min(0))  # what is padded comes last, and is not seen
        read = torch.cat((start, said), 1)
        hidden: Tensor = self.decoder(read, self._bound(read.shape[1]))
        return hidden[:, start.shape[1] - 1 :]

    def text_states(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Tensor]]:
        """The same after prompts of tokens: for each row, in any order, its number and states [A, D]."""
        lengths = [len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, answers, strict=True)]
        order = sorted(range(len(prompts)), key=lambda row: -lengths[row])
        while order:
            count = max(1, _MOST_TOKENS // lengths[order[0]])
            some, order = order[:count], order[count:]
            rows = torch.zeros(len(some), lengths[some[0]], dtype=torch.long)
            for place, row in enumerate(some):
                rows[place, : lengths[row]] = torch.tensor([*prompts[row], *answers[row][:-1]])
            hidden = self.decoder(rows.to(self.device), self._bound(rows.shape[1]))
            for place, row in enumerate(some):
                yield row, hidden[place, len(prompts[row]) - 1 : lengths[row]]

    def _bound(self, length: int) -> Any:
        return self.decoder.attention.bind(length)


def build_frozen(
    spec: Spec,
    reader: Reader | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    checkpointing: str,
    kernels: str,
    model: dict[str, Any],
) -> Frozen:
    """`model` are the keys of a recipe's model that shape does not say: rotary embedding, norms."""
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
    return Frozen(spec, decoder, reader)


def choose_attention(asked: str, shape: DecoderShape, rows: int, length: int, device: str, dtype: torch.dtype) -> Any:
    return select(asked, CAUSAL, device=device, dtype=dtype, shape=(rows, shape.heads, length, shape.head_dim))


@dataclass(frozen=True)
class Scores:
    """Sums over rows: of an answer's tokens, of first tokens, and how many there were."""

    nll: float = 0.0
    tokens: int = 0
    top1: int = 0
    top5: int = 0
    rows: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def figures(self) -> dict[str, float]:
        rows = max(1, self.rows)
        mean = self.nll / max(1, self.tokens)
        return {"nll": mean, "first_top1": self.top1 / rows, "first_top5": self.top5 / rows}


def score(decoder: Decoder, hidden_BAD: Tensor, targets_BA: Tensor) -> Scores:
    """Of rows that are padded with IGNORE."""
    logits = decoder.logits(hidden_BAD)
    there = targets_BA != IGNORE
    nll = F.cross_entropy(logits.flatten(0, 1), targets_BA.flatten(), ignore_index=IGNORE, reduction="sum")
    best = logits[:, 0].topk(min(5, logits.shape[-1])).indices == targets_BA[:, :1]
    return Scores(float(nll), int(there.sum()), int(best[:, 0].sum()), int(best.any(1).sum()), len(targets_BA))
