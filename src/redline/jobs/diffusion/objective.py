"""The objective of both diffusion jobs: a noisy copy of each sequence beside a clean one, and the NELBO as the loss.

    Σ over blocks of E_p[1/p · Σ over masked positions of −log p(token | noisy block, clean blocks before it)]

(BD3-LM, arXiv 2503.09573; MDLM, arXiv 2406.07524). With the linear schedule the mask probability p is the time t, and
the weight of the loss is 1/t. The SUBS parametrisation holds: the mask cannot be predicted (`classes` ends below its
id), and clean positions carry no loss. The attention mask (`MaskSpec.of_layout`) keeps a noisy block from its own clean
copy, through which the answer would leak.

Which positions are masked is decided on the CPU, so that the head is computed for those positions only, and nothing
waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.data.sources import ProgressCallback
from redline.data.tokenizer import LibraryTokenizer, Tokenizer
from redline.data.tokens import TokenFile
from redline.errors import UserError
from redline.hardware.device import sum_dtype
from redline.jobs.base import job
from redline.jobs.diffusion.costs import SAMPLERS
from redline.jobs.diffusion.data import (
    SPECIALS,
    Clip,
    RecordSequences,
    Rows,
    Sequences,
    SpecialTokenizer,
    TextSequences,
    expand_to_positions,
    layout_of,
    load_data,
    mask_probabilities,
    masked_positions,
    noised_blocks,
    preview_records,
    question_row,
    reads_records,
    tokenizer_alone,
)
from redline.jobs.diffusion.denoise import Denoised, SamplerOptions, denoise, denoising
from redline.jobs.objective import (
    Answer,
    Batch,
    CodeModel,
    Log,
    Question,
    Sample,
    Sampling,
    Term,
    bits_per_byte,
    perplexity,
)
from redline.jobs.pretrained import PretrainedObjective, PretrainedRuntime
from redline.jobs.preview import SamplePreview
from redline.jobs.streaming import (
    LENGTH,
    QUESTION,
    STOP,
    TEXT,
    Ask,
    Cells,
    Choice,
    Event,
    Finished,
    Panel,
    Section,
    Unmasked,
)
from redline.kernels.attention import Bound, MaskSpec, Selection
from redline.kernels.context import Part
from redline.kernels.cross_entropy import IGNORE, linear_cross_entropy
from redline.kernels.matmul import DTYPES
from redline.planning.layout import Layout, growing_layouts, uniform
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Recipe

FULL_RANGE = Clip(1e-3, 1.0)  # evaluation always draws p from this interval, so that bounds are comparable
# Candidates of the clip search: intervals like those that BD3-LM compares.
CLIPS = (
    FULL_RANGE,
    *(Clip(*pair) for pair in ((0.1, 0.9), (0.2, 0.8), (0.3, 0.8), (0.3, 0.9), (0.4, 0.9), (0.45, 0.95))),
)
_SEARCH_SEQUENCES = 32  # validation sequences on which the candidates are compared
_LOGIT_ROWS = 4096  # rows of logits formed at once where no gradient is needed
_EVALUATION_SEED = 20_25_03  # the same noise in every evaluation, so that losses of two steps or runs are comparable
_ANSWER_BATCH = 64  # rows that are denoised side by side
# Every position is masked, with a weight of 1. In blocks of one position p decides nothing: a masked token is predicted
# from the tokens before it, whatever p. So these have the loss of an autoregressive model, without noise.
_ALL_MASKED = Clip(1.0, 1.0)
Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class DiffusionObjective(PretrainedObjective):
    """What diffusion on text and on records have in common: noise, loss, evaluation and the clip search."""

    def __init__(self, resolved: Resolved, data: Sequences) -> None:
        super().__init__(resolved, data.base)
        self.data = data
        self.options: Any = getattr(self.recipe, self.recipe.objective)
        self.layout = layout_of(self.recipe)
        self.mask = MaskSpec.of_layout(self.layout)
        # The stages of the causal warm-up, the last of which is the job's own layout.
        layouts = growing_layouts(self.layout) if self.options.causal_warmup else [self.layout]
        self.stages = [Stage.of(layout, shift=self.options.shift) for layout in layouts]
        self.clip = Clip(self.options.clip_low, self.options.clip_high)
        self._clip_changed = False
        # Positions in the sequence of the noisy copy, and of the clean copy behind it. Given segments have no noisy
        # copy; a layout of one block (MDLM) has no clean copy, since nothing reads it.
        self._noisy, self._clean = (np.array(x, dtype=np.int64) for x in (self.layout.noisy, self.layout.clean))
        weights = [segment.weight for segment in self.layout.segments for _ in range(segment.length)]
        self._segment_weight = np.array(weights, dtype=np.float32)[self._noisy]

    def identity(self) -> dict[str, str]:
        return super().identity() | self.data.identity()

    @property
    def known_tokens(self) -> int:
        return self.data.facts.vocab_size - job(self.recipe.objective).added_tokens(self.recipe)

    def build(self, device: torch.device) -> None:
        super().build(device)
        self._built(device)

    def build_in_parts(self, device: torch.device) -> Iterator[nn.Module]:
        yield from super().build_in_parts(device)
        self._built(device)

    def _built(self, device: torch.device) -> None:
        self.attentions = [*(self.attention_for(stage.mask) for stage in self.stages[:-1]), self.attention]
        # Rotary positions begin again in the clean copy: a token has the same position in both.
        self.positions = torch.from_numpy(np.concatenate((self._noisy, self._clean))).to(device)
        self.local_positions = self.positions if self.part is None else self.positions[self.part.positions_T]

    @property
    def read_length(self) -> int:
        return self.layout.read

    @property
    def row_copies(self) -> tuple[int, ...]:
        return tuple(length for length in (len(self._noisy), len(self._clean)) if length)

    def _select_attention(self) -> Selection:
        if (
            self.recipe.train.deterministic
            and self.recipe.model.attention == "auto"
            and not self._unable_in_parts("dense")
        ):
            return Selection("dense", "its backward is deterministic")
        return super()._select_attention()

    @property
    def replayable(self) -> bool:
        """False: the head runs on the masked positions, whose number differs from step to step."""
        return False

    # --- a batch

    def batch(self, samples: np.ndarray) -> Batch:
        seed, total = self.recipe.train.seed, self.resolved.batch.global_batch
        rows, stage = self.data.training(samples), self._stage_at(samples)
        return self._noisy_batch(rows, seed, samples, total, self.clip, self._segment_weight, stage)

    def _stage_at(self, samples: Ids) -> int:
        """Return the stage of the causal warm-up in which these samples are read; they belong to one step."""
        last, warmup = len(self.stages) - 1, self.options.causal_warmup
        if last == 0:
            return 0
        steps = np.asarray(samples) // self.resolved.batch.global_batch
        assert (steps == steps[0]).all(), "a batch of several steps may belong to several stages"
        return min(last, int(steps[0]) * last // warmup)

    def _noisy_batch(
        self,
        rows: Rows,
        seed: int,
        samples: Ids,
        total: int,
        clip: Clip,
        weight: np.ndarray | float = 1.0,
        stage: int = -1,
    ) -> Batch:
        """Mask the rows with the noise of these sample numbers, of which `total` are stratified together."""
        layout = self.stages[stage].layout
        if self.options.shift:
            rows = _first_given(rows)
        if all(segment.given or segment.block == 1 for segment in layout.segments):
            clip = _ALL_MASKED
        p = mask_probabilities(seed, samples, total, noised_blocks(layout), clip)
        masked = masked_positions(seed, samples, layout, p, never_masked=rows.never_masked)[:, self._noisy]
        inverse = (weight / expand_to_positions(p, layout)[:, self._noisy]).astype(np.float32)
        return self._assemble(rows, masked, inverse, stage)

    def _assemble(self, rows: Rows, masked: Bools, weights: np.ndarray, stage: int = -1) -> Batch:
        """Return the batch: both copies side by side, and the targets of the positions that are scored.

        `positions` index the flattened batch; they, `targets` and `weights` are padded to one of a few sizes.
        `learnt` and `content` count the tokens that the loss may be divided by. `stage` is that of the causal warm-up.
        """
        tokens, loss_mask = rows.tokens[:, self._noisy], rows.loss_mask[:, self._noisy]
        noisy = np.where(masked, self.data.vocabulary.mask, tokens)
        scored = masked & loss_mask
        row, column = np.nonzero(scored)
        size = _padded_size(len(row), scored.size)
        positions = row * self.layout.read + self.stages[stage].predicted_from[column]
        batch = {
            "inputs": torch.from_numpy(np.concatenate((noisy, rows.tokens[:, self._clean]), 1)),
            "positions": torch.from_numpy(_pad(positions, size, 0)),
            "targets": torch.from_numpy(_pad(tokens[scored], size, IGNORE)),
            "weights": torch.from_numpy(_pad(weights[scored], size, 0.0)),
            "learnt": torch.tensor(int(loss_mask.sum())),
            "content": torch.tensor(int((loss_mask if rows.content is None else rows.content[:, self._noisy]).sum())),
        }
        return {**batch, "stage": torch.tensor(stage)} if len(self.stages) > 1 else batch

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the divisor of the loss as `tokens`: the `content` or `learnt` tokens, as `loss_per` says.

        Padding that ends a segment is in the numerator, because a sampler has to generate it. The denominator counts
        content tokens only: if it counted padding too, the loss would fall merely because segments are longer than
        their content.
        """
        counts = {name: float(batch[name]) for name in ("content", "learnt")}
        return {"tokens": counts[self.options.loss_per], **counts}

    def figures(self, loss: Tensor, weights: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Return the loss with the other divisor: `loss_padded`, per token of the loss mask, beside `loss`."""
        return {name: loss * (weights["tokens"] / weights[count]) for name, count in self._other_losses()}

    def _other_losses(self) -> list[tuple[str, str]]:
        """Return the name and the divisor of the loss with the other divisor; nothing where rows have no padding."""
        if not any(segment.given for segment in self.layout.segments):
            return []
        return [("loss_padded", "learnt")] if self.options.loss_per == "content" else [("loss_content", "content")]

    def worst_batch(self, micro: int) -> Batch:
        """Return a batch in which every position is masked."""
        shape = (micro, self.layout.length)
        tokens = np.random.default_rng(0).integers(0, self.data.vocabulary.classes, shape, dtype=np.int64)
        masked = np.ones((micro, len(self._noisy)), dtype=bool)
        return self._assemble(Rows(tokens, np.ones(shape, dtype=bool)), masked, np.ones(masked.shape, dtype=np.float32))

    def loss(self, batch: Batch) -> dict[str, Term]:
        total = linear_cross_entropy(
            self._scored_states(batch),
            self.model.head_weight,
            batch["targets"],
            softcap=self.model.softcap,
            fused=self.recipe.model.kernels == "fused",
            weight_N=batch["weights"],
            classes=self.data.vocabulary.classes,
        )
        return {"bound": Term(total, "tokens")}

    def _scored_states(self, batch: Batch) -> Tensor:
        """Return the hidden states of the masked positions that carry a loss."""
        positions = self.local_positions if "context" in batch else self.positions
        states = self.model(batch["inputs"], self._bind(batch), positions_T=positions)
        return states.flatten(0, 1).index_select(0, batch["positions"])

    def _bind(self, batch: Batch) -> Bound:
        stage = int(batch["stage"]) if "stage" in batch else -1
        if "context" in batch:
            return self._bind_part(self.attentions[stage], batch)
        return self.attentions[stage].bind(batch["inputs"].shape[1])

    def _local_targets(self, batch: Batch, part: Part) -> Batch:
        targets = batch["targets"].numpy()
        scored = np.flatnonzero(targets != IGNORE)
        mine, positions = part.scored(batch["positions"].numpy()[scored])
        chosen = scored[mine]
        size = _padded_size(len(mine), len(batch["inputs"]) * len(self._noisy) // part.split.ranks)
        return {
            "positions": torch.from_numpy(_pad(positions, size, 0)),
            "targets": torch.from_numpy(_pad(targets[chosen], size, IGNORE)),
            "weights": torch.from_numpy(_pad(batch["weights"].numpy()[chosen], size, 0.0)),
        }

    # --- evaluation

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Return the bound over the full range of p, whatever interval training is clipped to."""
        count = min(self.data.held_out, self.recipe.eval.sequences)
        if count == 0:
            return {"loss": None, "perplexity": None}
        total, counts = torch.zeros((), dtype=sum_dtype(self.device), device=self.device), Counter[str]()
        self.model.eval()
        with self.uncompiled():
            for batch in self._evaluation_batches(count, micro, FULL_RANGE):
                counts.update(self.weights(batch))
                total += self.evaluated(batch, "bound")
            if self.options.clip_search:
                self._search_clip(micro)
        self.model.train()
        loss, size = total.item() / max(1.0, counts["tokens"]), self.data.size
        metrics: dict[str, float | None] = {"loss": loss, "perplexity": perplexity(loss)}
        metrics |= {name: total.item() / max(1.0, counts[divisor]) for name, divisor in self._other_losses()}
        if size is not None:
            metrics["bits_per_byte"] = bits_per_byte(loss, *size)
        if self.options.clip_search:
            metrics |= {"clip_low": self.clip.low, "clip_high": self.clip.high}
        return metrics

    def _evaluation_batches(self, count: int, micro: int, clip: Clip) -> Iterator[Batch]:
        for first in range(0, count, micro):
            numbers = np.arange(first, min(first + micro, count))
            yield self._noisy_batch(self.data.evaluation(numbers), _EVALUATION_SEED, numbers, count, clip)

    def _search_clip(self, micro: int) -> None:
        """Go on training with the candidate under which the loss of a block varies least, as BD3-LM
        does: a lower variance of the estimate is a lower variance of the gradient."""
        count = min(self.data.held_out, self.recipe.eval.sequences, _SEARCH_SEQUENCES)
        best = min(CLIPS, key=lambda clip: self.block_loss_variance(count, micro, clip))
        self._clip_changed = self._clip_changed or best != self.clip
        self.clip = best

    @torch.no_grad()
    def block_loss_variance(self, count: int, micro: int, clip: Clip) -> float:
        """Return the variance of the estimated per-position loss over single blocks."""
        block_of = np.array(self.layout.block_of)[self._noisy]
        sizes, estimates = np.bincount(block_of), []
        for batch in self._evaluation_batches(count, micro, clip):
            rows = {name: tensor.to(self.device) for name, tensor in batch.items()}
            losses = (self._token_losses(rows) * rows["weights"]).cpu().numpy()
            row, read = np.divmod(batch["positions"].numpy(), self.layout.read)
            column = self.stages[-1].predicts[read]
            sums = np.zeros((len(batch["inputs"]), len(sizes)))
            np.add.at(sums, (row, block_of[column]), losses)
            estimates.append(sums[:, sizes > 0] / sizes[sizes > 0])  # blocks of given segments have no loss
        return float(np.concatenate(estimates).var())

    def _token_losses(self, batch: Batch) -> Tensor:
        """Return −log p at each scored position; 0 at the padding of `positions`."""
        classes = self.data.vocabulary.classes
        states, targets = self._scored_states(batch).split(_LOGIT_ROWS), batch["targets"].split(_LOGIT_ROWS)
        return torch.cat(
            [
                F.cross_entropy(self.model.logits(x)[:, :classes], y, ignore_index=IGNORE, reduction="none")
                for x, y in zip(states, targets, strict=True)
            ]
        )

    def _choices(self) -> tuple[Choice, ...]:
        """Return the sampler's settings that a user may change: the run's own value comes first."""
        own = self.options.sampler
        samplers = (own, *(name for name in SAMPLERS if name != own))
        return (Choice("sampler", "Sampler", samplers, "sampler"),)

    def _asked_options(self, ask: Ask, how: Sampling) -> SamplerOptions:
        options, sampler = self.sampler_options(how), ask.choices.get("sampler")
        return options if sampler is None else replace(options, sampler=sampler)

    def _events(
        self, row: list[int], layout: Layout, options: SamplerOptions, seed: int, sections: Sequence[OutputPart]
    ) -> Generator[Event, None, list[int]]:
        """Denoise one row; yield what each pass unmasks in the sections, and return the tokens."""
        passes = denoising(
            self.model,
            torch.tensor([row], device=self.device),
            layout,
            self.data.vocabulary,
            row_seeds(seed, [0]),
            options,
            shift=self.options.shift,
        )
        tokenizer, end, forwards = self.tokenizer, self.data.vocabulary.end, 0
        assert tokenizer is not None
        while True:
            try:
                one = next(passes)
            except StopIteration as finished:
                tokens: list[int] = finished.value.rows[0].tolist()
                return tokens
            forwards += bool(one.probabilities)
            chances: Sequence[float | None] = one.probabilities or [None] * len(one.places)
            for part in sections:
                found = [
                    (place - part.begin, "" if token == end else tokenizer.decode([token]), chance)
                    for place, token, chance in zip(one.places, one.tokens, chances, strict=True)
                    if part.begin <= place < part.stop
                ]
                if found:
                    places, texts, of = zip(*found, strict=True)
                    yield Unmasked(part.name, places, texts, of, forwards)

    def batches_changed(self) -> bool:
        changed, self._clip_changed = self._clip_changed, False
        return changed

    def sampler_options(self, sampling: Sampling) -> SamplerOptions:
        sampler, steps = self.options.sampler, self.options.sampler_steps
        return SamplerOptions(sampler, steps, sampling.temperature, sampling.top_k, sampling.top_p)

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        return super().state() | {"clip": [self.clip.low, self.clip.high]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the clip. It may also be the decision of rank 0: batches that were prefetched with another clip must
        then be made again."""
        super().load_state(state)
        clip = Clip(*state["clip"])
        self._clip_changed = self._clip_changed or clip != self.clip
        self.clip = clip


@dataclass(frozen=True)
class OutputPart:
    """A section of the output: positions of the row."""

    name: str
    begin: int
    stop: int


@dataclass(frozen=True)
class Stage:
    """A stage of the causal warm-up, in which blocks are as small as its layout says."""

    layout: Layout
    mask: MaskSpec
    predicted_from: Ids  # for each noisy position, the position of the row whose state predicts it
    predicts: Ids  # the inverse: for each position of the row, the noisy position that it predicts, if any

    @classmethod
    def of(cls, layout: Layout, *, shift: bool) -> Stage:
        noisy = np.array(layout.noisy, dtype=np.int64)
        found = np.arange(len(noisy))
        if shift:
            column = {position: number for number, position in enumerate(layout.noisy)}
            clean = {position: len(noisy) + number for number, position in enumerate(layout.clean)}
            block = layout.block_of
            found = np.array(
                [
                    # Position 0 has nothing before it, and is never masked.
                    0 if n == 0 else column[n - 1] if block[n] == block[n - 1] else clean[n - 1]
                    for n in layout.noisy
                ],
                dtype=np.int64,
            )
        predicts = np.zeros(layout.read, dtype=np.int64)
        predicts[found] = np.arange(len(noisy))  # position 0 comes first, so that position 1 replaces it
        return cls(layout, MaskSpec.of_layout(layout), found, predicts)


def _first_given(rows: Rows) -> Rows:
    """Return the rows with their first token given: no state before it could predict it."""
    first = np.arange(rows.tokens.shape[1]) == 0
    never = first[None] if rows.never_masked is None else rows.never_masked | first
    content = None if rows.content is None else rows.content & ~first
    return Rows(rows.tokens, rows.loss_mask & ~first, np.broadcast_to(never, rows.tokens.shape), content)


def row_seeds(seed: int, numbers: Sequence[int]) -> list[int]:
    """Return a seed per row that depends on its number only, not on the rows that are sampled beside it."""
    return [int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0]) for number in numbers]


def _padded_size(count: int, most: int) -> int:
    """Round up to one of about 16 sizes: each further size may cost a compilation, and fragments the allocator."""
    step = max(64, most // 16)
    return max(step, -(-count // step) * step)


def _pad(values: np.ndarray, size: int, filler: float) -> np.ndarray:
    return np.concatenate((values, np.full(size - len(values), filler, dtype=values.dtype)))


class TextDiffusion(DiffusionObjective):
    """Diffusion on windows of a text."""

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
        """Sample blocks after the prompt, any number of them; with one block per sequence (MDLM), that block."""
        if self.tokenizer is None:
            return []
        row, start, layout = self._row(prompt, how.tokens)
        self.model.eval()
        with self.uncompiled():
            denoised = denoise(
                self.model,
                torch.tensor([row] * how.count, device=self.device),
                layout,
                self.data.vocabulary,
                row_seeds(how.seed, range(how.count)),
                self.sampler_options(how),
                shift=self.options.shift,
            )
        self.model.train()
        texts = (self._until_end(tokens[start : start + how.tokens]) for tokens in denoised.rows.tolist())
        return [Sample(prompt, self.tokenizer.decode(text)) for text in texts]

    def panels(self) -> list[Panel]:
        if self.tokenizer is None:
            return []
        return [Panel("denoise", "Complete", TEXT, "A text to continue", choices=self._choices())]

    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        assert self.tokenizer is not None
        row, start, layout = self._row(ask.text, how.tokens)
        starts = accumulate(layout.sizes[:-1], initial=0)
        blocks = [size - max(0, min(size, start - at)) for at, size in zip(starts, layout.sizes, strict=True)]
        yield Section("text", prompt_tokens=start)
        yield Cells("text", tuple(size for size in blocks if size))
        part = OutputPart("text", start, len(row))
        tokens = yield from self._events(row, layout, self._asked_options(ask, how), how.seed, [part])
        text = self._until_end(tokens[start : start + how.tokens])
        reason = STOP if len(text) < how.tokens else LENGTH
        yield Finished("text", self.tokenizer.decode(text), reason, len(text))

    def _row(self, prompt: str, tokens: int) -> tuple[list[int], int, Layout]:
        """Return the prompt followed by masks up to the end of a block, the prompt's length, and the row's layout."""
        assert self.tokenizer is not None
        block = self.options.block_size
        start = [self.data.text.tokens.eot, *self.tokenizer.encode(prompt)]
        one_block = block == self.recipe.data.seq_len
        if one_block and len(start) >= block:
            what = f"a prompt of {len(start)} tokens fills the run's only block of {block} tokens."
            raise UserError(what, where="--prompt", fix="Give a shorter one.")
        length = block if one_block else -(-(len(start) + tokens) // block) * block
        return start + [self.data.vocabulary.mask] * (length - len(start)), len(start), uniform(length, block)

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = self.data.vocabulary.end
        return tokens[: tokens.index(end)] if end in tokens else tokens


class RecordDiffusion(DiffusionObjective):
    """Diffusion on records: the question is given, and the segments after it are denoised."""

    data: RecordSequences

    @property
    def tokenizer(self) -> SpecialTokenizer | None:
        return self.data.tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save(folder / "tokenizer.json")

    # --- questions and answers

    def select_questions(self, count: int | None) -> None:
        split = self.data.split
        if split is not None and count is not None:
            self.data = replace(self.data, split=split.first(count))

    @cached_property
    def _question_length(self) -> int:
        return next(segment.length for segment in self.layout.segments if segment.given)

    def questions(self) -> list[Question]:
        split = self.data.split
        if split is None:
            return []
        return [
            Question(record.question, tokens[: self._question_length].tolist(), record.answer)
            for record, tokens in zip(split.records, split.rows(np.arange(len(split)))["tokens"], strict=True)
        ]

    def answer(
        self, questions: Sequence[Question], tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[Answer]:
        """Return greedy answers. `tokens` is ignored: the length of an answer is that of its segments."""
        answers: list[Answer] = []
        for first in range(0, len(questions), _ANSWER_BATCH):
            some = questions[first : first + _ANSWER_BATCH]
            rows = torch.tensor([self._masked_row(one.prompt) for one in some], device=self.device)
            denoised = self._denoise(rows, row_seeds(0, range(first, first + len(some))), Sampling(temperature=0.0))
            answers += [
                Answer(self._text(row), ended, forwards)
                for row, ended, forwards in zip(denoised.rows.tolist(), denoised.ended, denoised.forwards, strict=True)
            ]
            progress(len(answers))
        return answers

    def first_prompt(self) -> str:
        splits = [self.data.split, None if self.data.records is None else self.data.records.train]
        return next((split.records[0].question for split in splits if split is not None and len(split)), "")

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        tokenizer = self.data.tokenizer
        if tokenizer is None or not prompt:
            return []
        if (length := len(tokenizer.encode(prompt))) > self._question_length:
            self.log(
                f"the question has {length:,} tokens, and the run reads {self._question_length:,}: the rest is cut off"
            )
        row = self._masked_row(question_row(prompt, self.layout, tokenizer))
        rows = torch.tensor([row] * how.count, device=self.device)
        denoised = self._denoise(rows, row_seeds(how.seed, range(how.count)), how)
        return [Sample(prompt, self._text(row)) for row in denoised.rows.tolist()]

    def panels(self) -> list[Panel]:
        if self.tokenizer is None:
            return []
        controls = ("temperature", "top_k", "top_p", "seed")  # the layout decides the length
        return [Panel("answer", "Ask", QUESTION, "A question", controls, self._choices())]

    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        """Show each segment after the question as a section: for hierarchical diffusion plan, execution and answer."""
        tokenizer = self.data.tokenizer
        assert tokenizer is not None
        if not ask.text:
            raise UserError("the question is empty.", fix="Write a question.")
        row = self._masked_row(question_row(ask.text, self.layout, tokenizer))
        parts = []
        for segment, begin in zip(self.layout.segments, self.layout.starts, strict=True):
            if not segment.given:
                parts.append(OutputPart(segment.name, begin, begin + segment.length))
                yield Section(segment.name, segment.name, prompt_tokens=self._question_length)
                yield Cells(segment.name, (segment.size,) * segment.blocks)
        tokens = yield from self._events(row, self.layout, self._asked_options(ask, how), how.seed, parts)
        for part in parts:
            written = self._segment_tokens(tokens, part.begin, part.stop)
            ended = STOP if len(written) < part.stop - part.begin else LENGTH
            yield Finished(part.name, tokenizer.decode(written), ended, len(written))

    def _segment_tokens(self, row: list[int], begin: int, stop: int) -> list[int]:
        """Return the tokens of a segment before its padding."""
        assert self.data.tokenizer is not None
        tokens, pad = row[begin:stop], self.data.tokenizer.pad
        return tokens[: tokens.index(pad)] if pad in tokens else tokens

    def _masked_row(self, question: list[int]) -> list[int]:
        """Return the question, followed by masks."""
        return [*question, *[self.data.vocabulary.mask] * (self.layout.length - len(question))]

    def _denoise(self, rows: Tensor, seeds: Sequence[int], how: Sampling) -> Denoised:
        options = self.sampler_options(how)
        self.model.eval()
        with self.uncompiled():
            denoised = denoise(
                self.model, rows, self.layout, self.data.vocabulary, seeds, options, shift=self.options.shift
            )
        self.model.train()
        return denoised

    def _text(self, row: list[int]) -> str:
        """Return what follows the question, a segment per line, with the marks between them."""
        tokenizer = self.data.tokenizer
        assert tokenizer is not None
        parts = []
        for segment, begin in zip(self.layout.segments, self.layout.starts, strict=True):
            if not segment.given:
                parts.append(tokenizer.decode(self._segment_tokens(row, begin, begin + segment.length)))
        return "\n".join(parts)


_LOAD = """from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH-OF-THIS-FOLDER")
model = AutoModel.from_pretrained("PATH-OF-THIS-FOLDER", trust_remote_code=True).eval()
"""
_TEXT_USAGE = f"""{_LOAD}prompt = tokenizer("The ").input_ids  # begins with the end-of-text token
for row in model.write(prompt, count=2, tokens=100, temperature=0.8, top_p=0.95, seed=0):
    print(tokenizer.decode(row))
"""
_RECORD_USAGE = f"""{_LOAD}question = tokenizer("What is 3 plus 4?", add_special_tokens=False).input_ids
for row in model.write(question, temperature=0.0):
    print(tokenizer.decode([token for token in row if token != model.config.end_id]))
"""


class DiffusionRuntime(PretrainedRuntime[TextSequences | RecordSequences]):
    """The runtime of both diffusion jobs."""

    def load_data(
        self, recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
    ) -> TextSequences | RecordSequences:
        return load_data(recipe, for_evaluation=for_evaluation, progress=progress)

    def random_data(self, facts: DataFacts) -> RecordSequences:
        return RecordSequences(facts)

    def tokenizer_alone(self, facts: DataFacts, folder: Path, recipe: Recipe) -> TextSequences | RecordSequences:
        return tokenizer_alone(facts, folder, recipe)

    def create(self, resolved: Resolved, data: TextSequences | RecordSequences) -> DiffusionObjective:
        return TextDiffusion(resolved, data) if isinstance(data, TextSequences) else RecordDiffusion(resolved, data)

    def export(
        self, recipe: Recipe, tensors: dict[str, Tensor], *, eot: Callable[[], int], vocab_size: int, dtype: str
    ) -> CodeModel:
        model, options, records = recipe.model, getattr(recipe, recipe.objective), reads_records(recipe)
        for key, off in {"value_embeddings": 0, "skips": "none"}.items():
            if (value := getattr(model, key)) != off:
                what = f"model.{key}={value} is not in the code that is exported with a diffusion model."
                raise UserError(what, fix=f"Only model.{key}={off} can be exported.")
        layout = layout_of(recipe)
        shape = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "mlp", "tied", "qk_norm", "qkv_bias")
        config = {
            "architectures": ["RedlineDiffusion"],
            "model_type": "redline_diffusion",
            **{key: getattr(model, key) for key in (*shape, "softcap", "norm_eps")},
            "rotary_theta": model.rope_theta,
            "rotary_scaling": model.rope_scaling,
            "vocab_size": model.vocab,
            "segments": [[one.name, one.length, one.size, one.given] for one in layout.segments],
            "repeats": not records,
            "mask_id": vocab_size - 1,
            "classes": vocab_size - 1,
            "end_id": vocab_size - 2 if records else eot(),
            "shift": options.shift,
            "sampler": options.sampler,
            "sampler_steps": options.sampler_steps,
        }
        kind = DTYPES[dtype]
        special = SPECIALS if records else SPECIALS[-1:]
        usage = _RECORD_USAGE if records else _TEXT_USAGE
        held = {name: tensor.to(kind) for name, tensor in tensors.items()}
        return CodeModel(config, held, "modeling_redline_diffusion", usage, special)

    def preview(self, recipe: Recipe, count: int, progress: ProgressCallback | None, log: Log) -> SamplePreview | None:
        if not reads_records(recipe):
            return None
        data = load_data(recipe, progress=progress)
        assert isinstance(data, RecordSequences)
        assert data.records is not None
        return SamplePreview(preview_records(data.records, count), data.messages)
