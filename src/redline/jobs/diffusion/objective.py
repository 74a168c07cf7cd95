"""What jobs that denoise have in common: a noisy copy of each sequence beside a clean one, and the bound on its loss.

Σ over blocks of E[1/p · Σ over hidden positions of −log p(token | noisy block, clean blocks before)] (BD3-LM, arXiv
2503.09573; MDLM, arXiv 2406.07524). Which positions are hidden is known on the CPU, so the head is computed for those
alone, and nothing waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.data.shards import TokenFile
from redline.data.tokenizer import LibraryTokenizer, Tokenizer
from redline.errors import UserError
from redline.jobs.decoder_objective import InFloat8
from redline.jobs.diffusion.data import (
    RecordSequences,
    Rows,
    Sequences,
    TextSequences,
    can_answer,
    complete,
    layout_of,
    load_data,
    random_data,
    row_of_question,
    tokenizer_alone,
)
from redline.jobs.diffusion.denoise import Denoised, Denoising, denoise
from redline.jobs.diffusion.noise import Clip, at_positions, hidden, levels, noised_blocks
from redline.jobs.objective import Answered, Asked, Batch, Sample, Sampling, Term
from redline.kernels.attention import Bound, Selection
from redline.kernels.cross_entropy import IGNORE, linear_cross_entropy
from redline.kernels.masks import MaskSpec
from redline.metrics import bits_per_byte, perplexity
from redline.planning.layout import uniform
from redline.recipe.resolve import Resolved

WHOLE = Clip(1e-3, 1.0)  # what a bound is evaluated over
CLIPS = (WHOLE, *(Clip(*pair) for pair in ((0.1, 0.9), (0.2, 0.8), (0.3, 0.8), (0.3, 0.9), (0.4, 0.9), (0.45, 0.95))))
_SEARCHED = 32  # sequences that show which is the steadiest
_LOOKED_AT = 4096  # rows of logits at once, where no gradient is wanted
_EVALUATION_SEED = 20_25_03  # the same noise in every evaluation: losses of two runs, and of two steps, compare
Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


_AT_ONCE = 64  # rows that are filled in side by side


class DiffusionObjective(InFloat8):
    def __init__(self, resolved: Resolved, data: Sequences) -> None:
        super().__init__(resolved)
        self.data = data
        self.options: Any = getattr(self.recipe, self.recipe.objective)
        self.layout = layout_of(self.recipe)
        self.mask = MaskSpec.of_layout(self.layout)
        self.clip = Clip(self.options.clip_low, self.options.clip_high)
        self._changed = False
        self._noisy, self._clean = (np.array(x, dtype=np.int64) for x in (self.layout.noisy, self.layout.clean))
        each = [segment.weight for segment in self.layout.segments for _ in range(segment.length)]
        self._weight = np.array(each, dtype=np.float32)[self._noisy]

    def build(self, device: torch.device) -> None:
        self.device = device
        self.model = self.decoder().to(device)
        self.use_float8()
        seed, options = torch.Generator().manual_seed(self.recipe.train.seed), self.recipe.model
        self.model.initialise(seed, options.init, options.embedding_std)
        self.positions = torch.from_numpy(np.concatenate((self._noisy, self._clean))).to(device)

    @property
    def read_length(self) -> int:
        return self.layout.read

    def _select_attention(self) -> Selection:
        if self.recipe.train.deterministic and self.recipe.model.attention == "auto":
            return Selection("dense", "its backward is deterministic")
        return super()._select_attention()

    @property
    def replayable(self) -> bool:
        """As many positions as are hidden go through the head: another number in each step."""
        return False

    # --- a batch

    def batch(self, samples: np.ndarray) -> Batch:
        seed, total = self.recipe.train.seed, self.resolved.batch.global_batch
        return self._noised(self.data.training(samples), seed, samples, total, self.clip, self._weight)

    def _noised(
        self, rows: Rows, seed: int, samples: Ids, total: int, clip: Clip, weight: np.ndarray | float = 1.0
    ) -> Batch:
        """With the noise of these sample numbers, `total` of which are stratified together."""
        p = levels(seed, samples, total, noised_blocks(self.layout), clip)
        masked = hidden(seed, samples, self.layout, p, never=rows.never)[:, self._noisy]
        inverse = (weight / at_positions(p, self.layout)[:, self._noisy]).astype(np.float32)
        return self._laid_out(rows, masked, inverse)

    def _laid_out(self, rows: Rows, masked: Bools, weights: np.ndarray) -> Batch:
        tokens, learnt = rows.tokens[:, self._noisy], rows.learnt[:, self._noisy]
        noisy = np.where(masked, self.data.vocabulary.mask, tokens)
        asked = masked & learnt
        row, column = np.nonzero(asked)
        room = _room(len(row), asked.size)
        return {
            "inputs": torch.from_numpy(np.concatenate((noisy, rows.tokens[:, self._clean]), 1)),
            "places": torch.from_numpy(_filled(row * self.layout.read + column, room, 0)),
            "targets": torch.from_numpy(_filled(tokens[asked], room, IGNORE)),
            "weights": torch.from_numpy(_filled(weights[asked], room, 0.0)),
            "learnt": torch.tensor(int(learnt.sum())),
            "content": torch.tensor(int((learnt if rows.content is None else rows.content[:, self._noisy]).sum())),
        }

    def weights(self, batch: Batch) -> dict[str, float]:
        """What the loss is divided by: `tokens`, of `content` or `learnt` as `loss_per` says.

        The padding that ends a segment is in the sum, since a sampler must write it to end the segment; divided by
        padding too, the loss would fall with every segment that is longer than its content.
        """
        counts = {name: float(batch[name]) for name in ("content", "learnt")}
        return {"tokens": counts[self.options.loss_per], **counts}

    def figures(self, loss: Tensor, weights: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """The loss with the other divisor: `loss_padded` per learnt token beside `loss`, per content token."""
        return {name: loss * (weights["tokens"] / weights[count]) for name, count in self._other_losses()}

    def _other_losses(self) -> list[tuple[str, str]]:
        """Names of further losses, and what they are divided by; none where nothing is padded."""
        if not any(segment.given for segment in self.layout.segments):
            return []
        return [("loss_padded", "learnt")] if self.options.loss_per == "content" else [("loss_content", "content")]

    def worst_batch(self, micro: int) -> Batch:
        """Everything is hidden."""
        shape = (micro, self.layout.length)
        tokens = np.random.default_rng(0).integers(0, self.data.vocabulary.classes, shape, dtype=np.int64)
        masked = np.ones((micro, len(self._noisy)), dtype=bool)
        return self._laid_out(Rows(tokens, np.ones(shape, dtype=bool)), masked, np.ones(masked.shape, dtype=np.float32))

    def loss(self, batch: Batch) -> dict[str, Term]:
        total = linear_cross_entropy(
            self._asked(batch),
            self.model.head_weight,
            batch["targets"],
            softcap=self.model.softcap,
            fused=self.recipe.model.kernels == "fused",
            weight_N=batch["weights"],
            classes=self.data.vocabulary.classes,
        )
        return {"bound": Term(total, "tokens")}

    def _asked(self, batch: Batch) -> Tensor:
        """Hidden states of the positions that are hidden and learnt."""
        states = self.model(batch["inputs"], self._bind(batch), positions_T=self.positions)
        return states.flatten(0, 1).index_select(0, batch["places"])

    def _bind(self, batch: Batch) -> Bound:
        return self.attention.bind(batch["inputs"].shape[1])

    # --- looking

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """The bound over all times, whatever training is clipped to."""
        count = min(self.data.held_out, self.recipe.eval.sequences)
        if count == 0:
            return {"loss": None, "perplexity": None}
        total, counts = torch.zeros((), dtype=torch.float64, device=self.device), Counter[str]()
        self.model.eval()
        with self.uncompiled():
            for batch in self._evaluated(count, micro, WHOLE):
                counts.update(self.weights(batch))
                total += self.loss(batch)["bound"].sum
            if self.options.clip_search:
                self._search(micro)
        self.model.train()
        loss, width = total.item() / max(1.0, counts["tokens"]), self.data.size
        found: dict[str, float | None] = {"loss": loss, "perplexity": perplexity(loss)}
        found |= {name: total.item() / max(1.0, counts[divisor]) for name, divisor in self._other_losses()}
        if width is not None:
            found["bits_per_byte"] = bits_per_byte(loss, *width)
        if self.options.clip_search:
            found |= {"clip_low": self.clip.low, "clip_high": self.clip.high}
        return found

    def _evaluated(self, count: int, micro: int, clip: Clip) -> Iterator[Batch]:
        for first in range(0, count, micro):
            numbers = np.arange(first, min(first + micro, count))
            batch = self._noised(self.data.evaluation(numbers), _EVALUATION_SEED, numbers, count, clip)
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _search(self, micro: int) -> None:
        """The clip under which a block's loss varies least is the one that training goes on with."""
        count = min(self.data.held_out, self.recipe.eval.sequences, _SEARCHED)
        best = min(CLIPS, key=lambda clip: self.variance(count, micro, clip))
        self._changed = self._changed or best != self.clip
        self.clip = best

    @torch.no_grad()
    def variance(self, count: int, micro: int, clip: Clip) -> float:
        """Of the estimated losses of single blocks, per position."""
        block_of = np.array(self.layout.block_of)[self._noisy]
        sizes, found = np.bincount(block_of), []
        for batch in self._evaluated(count, micro, clip):
            losses = (self._losses(batch) * batch["weights"]).cpu().numpy()
            row, column = np.divmod(batch["places"].cpu().numpy(), self.layout.read)
            sums = np.zeros((len(batch["inputs"]), len(sizes)))
            np.add.at(sums, (row, block_of[column]), losses)
            found.append(sums[:, sizes > 0] / sizes[sizes > 0])  # what is given has no loss
        return float(np.concatenate(found).var())

    def _losses(self, batch: Batch) -> Tensor:
        """Of each place; 0 where nothing is asked."""
        classes = self.data.vocabulary.classes
        states, targets = self._asked(batch).split(_LOOKED_AT), batch["targets"].split(_LOOKED_AT)
        return torch.cat(
            [
                F.cross_entropy(self.model.logits(x)[:, :classes], y, ignore_index=IGNORE, reduction="none")
                for x, y in zip(states, targets, strict=True)
            ]
        )

    def batches_changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    def how_to_denoise(self, how: Sampling) -> Denoising:
        sampler, steps = self.options.sampler, self.options.sampler_steps
        return Denoising(sampler, steps, how.temperature, how.top_k, how.top_p)

    # --- what survives a restart

    def state(self) -> dict[str, Any]:
        return super().state() | {"clip": [self.clip.low, self.clip.high]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Another rank's decision, too: what was made by the own one is made again."""
        super().load_state(state)
        taken = Clip(*state["clip"])
        self._changed = self._changed or taken != self.clip
        self.clip = taken


def row_seeds(seed: int, numbers: Sequence[int]) -> list[int]:
    """Of each row its own, whichever rows are beside it."""
    return [int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0]) for number in numbers]


def _room(count: int, most: int) -> int:
    """A few sizes, so that kernels meet few of them."""
    step = max(64, most // 16)
    return max(step, -(-count // step) * step)


def _filled(values: np.ndarray, size: int, filler: float) -> np.ndarray:
    return np.concatenate((values, np.full(size - len(values), filler, dtype=values.dtype)))


class TextDiffusion(DiffusionObjective):
    data: TextSequences

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.data.text.tokenizer

    def token_files(self) -> Sequence[TokenFile]:
        return self.data.text.tokens.stored()

    def save_tokenizer(self, folder: Path) -> None:
        if isinstance(self.tokenizer, LibraryTokenizer):
            self.tokenizer.save(folder / "tokenizer.json")

    def first_prompt(self) -> str:
        return self.data.text.first_prompt(min(self.recipe.data.seq_len, self.options.block_size))

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Blocks after the prompt, of any number; where all is one block, that one."""
        if self.tokenizer is None:
            return []
        vocabulary, block = self.data.vocabulary, self.options.block_size
        start = [self.data.text.tokens.eot, *self.tokenizer.encode(prompt)]
        if block == self.recipe.data.seq_len and len(start) >= block:
            what = f"a prompt of {len(start)} tokens leaves nothing of the run's one block of {block} to write."
            raise UserError(what, where="--prompt", fix="Give a shorter one.")
        length = block if block == self.recipe.data.seq_len else -(-(len(start) + how.tokens) // block) * block
        row = start + [vocabulary.mask] * (length - len(start))
        self.model.eval()
        with self.uncompiled():
            made = denoise(
                self.model,
                torch.tensor([row] * how.count, device=self.device),
                uniform(length, block),
                vocabulary,
                row_seeds(how.seed, range(how.count)),
                self.how_to_denoise(how),
            )
        self.model.train()
        texts = (self._until_end(written[len(start) : len(start) + how.tokens]) for written in made.rows.tolist())
        return [Sample(prompt, self.tokenizer.decode(text)) for text in texts]

    def _until_end(self, written: list[int]) -> list[int]:
        end = self.data.vocabulary.end
        return written[: written.index(end)] if end in written else written


class RecordDiffusion(DiffusionObjective):
    data: RecordSequences
    can_answer = True

    def save_tokenizer(self, folder: Path) -> None:
        if self.data.tokenizer is not None:
            self.data.tokenizer.save(folder / "tokenizer.json")

    # --- answering

    def narrow(self, count: int | None) -> None:
        split = self.data.split
        if split is not None and count is not None:
            self.data = replace(self.data, split=split.first(count))

    @cached_property
    def _given(self) -> int:
        """Positions of the question."""
        return next(segment.length for segment in self.layout.segments if segment.given)

    def questions(self) -> list[Asked]:
        split = self.data.split
        if split is None:
            return []
        return [
            Asked(record.question, tokens[: self._given].tolist(), record.answer)
            for record, tokens in zip(split.records, split.rows(np.arange(len(split)))["tokens"], strict=True)
        ]

    def answer(
        self, asked: Sequence[Asked], tokens: int, told: Callable[[int], None] = lambda _: None
    ) -> list[Answered]:
        """The likeliest token at each place, in the sampler's order. `tokens` does not bound it: its segments do."""
        found: list[Answered] = []
        for first in range(0, len(asked), _AT_ONCE):
            some = asked[first : first + _AT_ONCE]
            rows = torch.tensor([self._open(one.prompt) for one in some], device=self.device)
            made = self._denoised(rows, row_seeds(0, range(first, first + len(some))), Sampling(temperature=0.0))
            found += [
                Answered(self._text(row), ended, looks)
                for row, ended, looks in zip(made.rows.tolist(), made.ended, made.looks, strict=True)
            ]
            told(len(found))
        return found

    def first_prompt(self) -> str:
        splits = [self.data.split, None if self.data.records is None else self.data.records.train]
        return next((split.records[0].question for split in splits if split is not None and len(split)), "")

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        tokenizer = self.data.tokenizer
        if tokenizer is None or not prompt:
            return []
        if (length := len(tokenizer.encode(prompt))) > self._given:
            self.log(f"the question has {length:,} tokens, and the run reads {self._given:,}: the rest is left out")
        row = self._open(row_of_question(prompt, self.layout, tokenizer))
        rows = torch.tensor([row] * how.count, device=self.device)
        made = self._denoised(rows, row_seeds(how.seed, range(how.count)), how)
        return [Sample(prompt, self._text(row)) for row in made.rows.tolist()]

    def _open(self, question: list[int]) -> list[int]:
        """The question, and everything after it still hidden."""
        return [*question, *[self.data.vocabulary.mask] * (self.layout.length - len(question))]

    def _denoised(self, rows: Tensor, seeds: Sequence[int], how: Sampling) -> Denoised:
        denoising: Denoising = self.how_to_denoise(how)
        self.model.eval()
        with self.uncompiled():
            made = denoise(self.model, rows, self.layout, self.data.vocabulary, seeds, denoising)
        self.model.train()
        return made

    def _text(self, row: list[int]) -> str:
        """What follows the question, segment by segment, with the marks between them."""
        tokenizer = self.data.tokenizer
        assert tokenizer is not None
        parts = []
        for segment, begin in zip(self.layout.segments, self.layout.starts, strict=True):
            written = row[begin : begin + segment.length]
            if not segment.given:
                end = written.index(tokenizer.pad) if tokenizer.pad in written else len(written)
                parts.append(tokenizer.decode(written[:end]))
        return "\n".join(parts)


def create(resolved: Resolved, data: TextSequences | RecordSequences) -> DiffusionObjective:
    kind = TextDiffusion if isinstance(data, TextSequences) else RecordDiffusion
    return kind(resolved, data)


__all__ = ["can_answer", "complete", "create", "load_data", "random_data", "tokenizer_alone"]
