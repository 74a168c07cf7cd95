"""Diffusion on records: a question that is given, and what follows from it, in segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from redline.data.read_stats import ProgressCallback
from redline.jobs.base import job
from redline.jobs.diffusion.data import (
    RecordData,
    RecordSplit,
    WithSpecials,
    load_records,
    row_of_question,
    with_specials,
)
from redline.jobs.diffusion.denoise import Denoised, Denoising, Vocabulary, denoise
from redline.jobs.diffusion.objective import DiffusionObjective, Ids, Rows, row_seeds
from redline.jobs.objective import Answered, Asked, Sample, Sampling
from redline.planning.layout import Layout
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Recipe

_AT_ONCE = 64  # rows that are filled in side by side


@dataclass(frozen=True)
class RecordSequences:
    facts: DataFacts
    tokenizer: WithSpecials | None = None  # None: for steps that are only timed
    records: RecordData | None = None
    split: RecordSplit | None = None  # what is held out

    @property
    def vocabulary(self) -> Vocabulary:
        if self.tokenizer is None:
            return Vocabulary(mask=self.facts.vocab_size - 1, classes=self.facts.vocab_size - 1)
        return Vocabulary(self.tokenizer.mask, self.tokenizer.classes, self.tokenizer.pad)

    @property
    def held_out(self) -> int:
        return 0 if self.split is None else len(self.split)

    @property
    def size(self) -> None:
        return None

    @property
    def told(self) -> list[str]:
        return [] if self.records is None else self.records.report.lines()

    def row_keys(self, *, trained: bool) -> list[int] | None:
        """One key per row to train on, or per row that is evaluated."""
        to_train = None if self.records is None else self.records.train
        split = to_train if trained else self.split
        return None if split is None else [record.key for record in split.records]

    def training(self, samples: Ids) -> Rows:
        assert self.records is not None
        return self._rows(self.records.train, self.records.index.sequences(samples))

    def evaluation(self, numbers: Ids) -> Rows:
        assert self.split is not None
        return self._rows(self.split, numbers)

    def _rows(self, split: RecordSplit, numbers: Ids) -> Rows:
        assert self.tokenizer is not None
        found = split.rows(numbers)
        return Rows(**found, content=found["learnt"] & (found["tokens"] != self.tokenizer.pad))


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    return recipe


def load_data(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> RecordSequences:
    """All are held out when nothing is trained."""
    found = load_records(
        recipe.data,
        _layout(recipe),
        seed=recipe.train.seed,
        val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
        progress=progress,
    )
    return RecordSequences(found.facts, found.tokenizer, found, found.train if for_evaluation else found.val)


def _layout(recipe: Recipe) -> Layout:
    layout: Layout = job(recipe.objective).layout(recipe)
    return layout


def random_data(facts: DataFacts) -> RecordSequences:
    return RecordSequences(facts)


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> RecordSequences:
    """For a model that only answers, wherever its data may be."""
    return RecordSequences(facts, with_specials(facts, folder))


class RecordObjective(DiffusionObjective):
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


def can_answer(recipe: Recipe) -> bool:
    return True
