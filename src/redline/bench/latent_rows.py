"""Random texts with answers for `redline bench latent`, as long as SQuAD's are: the same for everyone who asks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from redline.jobs.latent_prefix.costs import slots_read
from redline.jobs.latent_prefix.data import Lengths, Rows, options_of
from redline.jobs.latent_prefix.pairs import Pair
from redline.jobs.objective import Batch
from redline.recipe.schema import Recipe

BEGIN, ANCHOR = [0], [0, 0]  # what a random model reads before a text, and between it and the answer
TEXT_BYTES, SPREAD = 800, 0.4  # the median, and of its logarithm; 40 articles of SQuAD: 784, 867 on average
BYTES_PER_TOKEN = 4.8
ENDS = 0.25  # the chance that an answer ends with a token: four on average, and its end
_LETTERS = 6  # of a word

Lists = dict[str, list[list[int]]]  # of tokens, by model and row


@dataclass(frozen=True)
class TimedRows:
    batch: Batch  # bytes, each model's targets, words: what any loop learns from
    prompts: Lists  # what a teacher reads before the answer
    answers: Lists

    def micros(self, size: int) -> list[TimedRows]:
        return [self._part(slice(first, first + size)) for first in range(0, len(self.batch["bytes"]), size)]

    def _part(self, some: slice) -> TimedRows:
        prompts, answers = (
            {name: rows[some] for name, rows in lists.items()} for lists in (self.prompts, self.answers)
        )
        return TimedRows({key: tensor[some] for key, tensor in self.batch.items()}, prompts, answers)

    @property
    def prompt_tokens(self) -> float:
        return float(np.mean([len(prompt) for prompts in self.prompts.values() for prompt in prompts]))


def timed_rows(recipe: Recipe, vocabularies: dict[str, int], count: int) -> TimedRows:
    """So many, with the answers of models of these vocabularies, laid out as in training."""
    options, chance = options_of(recipe), np.random.default_rng(0)
    room = recipe.data.seq_len - slots_read(options) - len(BEGIN) - len(ANCHOR) + 1
    sizes = np.clip(np.exp(chance.normal(np.log(TEXT_BYTES), SPREAD, count)), 2, options.bytes).astype(int)
    lengths = np.minimum(chance.geometric(ENDS, count) + 1, room)
    texts = [_text(chance, size) for size in sizes.tolist()]
    answers, prompts = {}, {}
    for name, vocabulary in vocabularies.items():
        answers[name] = [chance.integers(0, vocabulary, length).tolist() for length in lengths.tolist()]
        told = [chance.integers(0, vocabulary, max(1, round(size / BYTES_PER_TOKEN))).tolist() for size in sizes]
        prompts[name] = [[*BEGIN, *tokens, *ANCHOR] for tokens in told]
    limits = Lengths(options.bytes, options.patch, (room,) * len(vocabularies), options.words_weight > 0)
    rows = Rows([Pair(text, "", (), "") for text in texts], list(answers.values()), limits)
    names = {f"targets.{place}": f"targets.{name}" for place, name in enumerate(vocabularies)}
    taken = rows.take(np.arange(count))
    return TimedRows({names.get(key, key): torch.from_numpy(array) for key, array in taken.items()}, prompts, answers)


def _text(chance: np.random.Generator, size: int) -> str:
    letters = chance.integers(ord("a"), ord("z") + 1, size, dtype=np.uint8)
    letters[_LETTERS :: _LETTERS + 1] = ord(" ")
    return letters.tobytes().decode()
