"""block_diffusion: denoise a block at a time, from left to right; on text, or on questions with their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from redline.data.corpus import Corpus
from redline.data.index import Index
from redline.data.read_stats import ProgressCallback
from redline.data.shards import TokenFile
from redline.data.tokenizer import LibraryTokenizer, Tokenizer
from redline.data.tokens import TokenSplit
from redline.errors import UserError
from redline.jobs.causal_lm import objective as causal_lm
from redline.jobs.causal_lm.objective import CausalData
from redline.jobs.diffusion import records_objective as records
from redline.jobs.diffusion.denoise import Vocabulary, denoise
from redline.jobs.diffusion.objective import DiffusionObjective, Ids, Rows, row_seeds
from redline.jobs.diffusion.records_objective import RecordObjective, RecordSequences
from redline.jobs.objective import Sample, Sampling
from redline.planning.layout import uniform
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Recipe


@dataclass(frozen=True)
class TextSequences:
    """Windows of a text. One more id than its tokenizer has stands for what is hidden."""

    text: CausalData
    seq_len: int
    index: Index | None = None  # None when nothing is trained

    @cached_property
    def facts(self) -> DataFacts:
        found = self.text.facts
        held_out = found.val_tokens if self.held_out else 0  # what fills no window is never scored
        return replace(found, vocab_size=found.vocab_size + 1, val_tokens=held_out)

    @property
    def told(self) -> tuple[str, ...]:
        return self.text.told

    @property
    def vocabulary(self) -> Vocabulary:
        tokens = self.text.tokens
        return Vocabulary(mask=tokens.vocab_size, classes=tokens.vocab_size, end=tokens.eot)

    @property
    def held_out(self) -> int:
        return 0 if self.text.held_out is None else len(self.text.held_out) // self.seq_len

    @property
    def size(self) -> tuple[int, int] | None:
        split = self.text.held_out
        return None if split is None or split.bytes is None else (len(split), split.bytes)

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        return self.text.row_keys(trained=trained)

    def sequences(self, seq_len: int) -> int:
        return self.held_out

    def training(self, samples: Ids) -> Rows:
        assert self.index is not None
        return self._rows(self.text.tokens.train, self.index.starts(samples))

    def evaluation(self, numbers: Ids) -> Rows:
        assert self.text.held_out is not None
        return self._rows(self.text.held_out, numbers * self.seq_len)

    def _rows(self, split: TokenSplit, starts: Ids) -> Rows:
        """A mark before a document that is a row's first has nothing to be predicted from."""
        tokens = split.windows(starts, self.seq_len).astype(np.int64)
        never = np.zeros(tokens.shape, dtype=bool)
        never[:, 0] = tokens[:, 0] == self.text.tokens.eot
        return Rows(tokens, ~never, never)


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    return recipe


def can_answer(recipe: Recipe) -> bool:
    """It is of records: questions with their answers."""
    return recipe.block_diffusion.question is not None  # type: ignore[attr-defined]


def load_data(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> TextSequences | RecordSequences:
    if can_answer(recipe):
        return records.load_data(recipe, for_evaluation=for_evaluation, progress=progress)
    text = causal_lm.load_data(recipe, for_evaluation=for_evaluation, progress=progress)
    corpus, seq_len = text.corpus, recipe.data.seq_len
    assert isinstance(corpus, Corpus)
    index = None if for_evaluation else corpus.index(seq_len, recipe.train.seed, shuffle=recipe.data.shuffle)
    found = TextSequences(text, seq_len, index)
    if for_evaluation and not found.held_out:
        tokens = 0 if text.held_out is None else len(text.held_out)
        what = f"the text has {tokens:,} tokens, and the run reads windows of {seq_len:,}: there is nothing to score."
        raise UserError(what, where=str(recipe.data.source), fix="Give a longer text.")
    return found


def random_data(facts: DataFacts) -> TextSequences:
    """As if such data were there: the last id stands for what is hidden."""
    return TextSequences(causal_lm.random_data(replace(facts, vocab_size=facts.vocab_size - 1)), 1)


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> TextSequences | RecordSequences:
    if can_answer(recipe):
        return records.tokenizer_alone(facts, folder, recipe)
    plain = replace(facts, vocab_size=facts.vocab_size - 1)
    return TextSequences(causal_lm.tokenizer_alone(plain, folder, recipe), recipe.data.seq_len)


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


def create(resolved: Resolved, data: TextSequences | RecordSequences) -> DiffusionObjective:
    kind = TextDiffusion if isinstance(data, TextSequences) else RecordObjective
    return kind(resolved, data)
