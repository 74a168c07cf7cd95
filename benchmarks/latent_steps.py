"""Steps of a latent prefix on random texts, timed: redline's own row of `python -m benchmarks latent`.

    python -m benchmarks.latent_steps < request.json

The request holds a resolved recipe, the facts of its data and the number of `steps` to time. The answer is one line of
JSON. The frozen models have random weights: nothing is downloaded. Their teachers read the texts before the first step,
as in training; `teacher_ms` is the time of that for the texts of one step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.finetune_steps import PACKAGES, Figures, installed, time_steps
from benchmarks.reply import reply
from redline.jobs.latent_prefix.costs import needs_teacher, prefix_length
from redline.jobs.latent_prefix.data import Pair, PairRows, RowLengths, options_of
from redline.jobs.objective import Batch
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Recipe
from redline.training.step import step_batch, to_device
from redline.training.trial import warm_trainer

BEGIN, ANCHOR = [0], [0, 0]  # tokens before a text, and between the text and the answer
TEXT_BYTES, SPREAD = 800, 0.4  # median, and deviation of the logarithm; 40 articles of SQuAD have 784
BYTES_PER_TOKEN = 4.8
ENDS = 0.25  # probability that an answer ends after a token: four tokens on average, and the end
_LETTERS = 6  # letters of a word

Lists = dict[str, list[list[int]]]  # token ids by model and row


@dataclass(frozen=True)
class TimedRows:
    batch: Batch  # bytes, each model's targets, words: what every loop trains on
    prompts: Lists  # the teacher's tokens before the answer
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
    """Return `count` random rows, with answers in the vocabulary of each model, laid out as in training."""
    options, chance = options_of(recipe), np.random.default_rng(0)
    room = recipe.data.seq_len - prefix_length(options) - len(BEGIN) - len(ANCHOR) + 1
    sizes = np.clip(np.exp(chance.normal(np.log(TEXT_BYTES), SPREAD, count)), 2, options.bytes).astype(int)
    lengths = np.minimum(chance.geometric(ENDS, count) + 1, room)
    texts = [_text(chance, size) for size in sizes.tolist()]
    answers, prompts = {}, {}
    for name, vocabulary in vocabularies.items():
        answers[name] = [chance.integers(0, vocabulary, length).tolist() for length in lengths.tolist()]
        texts_in_tokens = [
            chance.integers(0, vocabulary, max(1, round(size / BYTES_PER_TOKEN))).tolist() for size in sizes
        ]
        prompts[name] = [[*BEGIN, *tokens, *ANCHOR] for tokens in texts_in_tokens]
    limits = RowLengths(options.bytes, options.patch, (room,) * len(vocabularies), options.words_weight > 0)
    rows = PairRows([Pair(text, "", (), "") for text in texts], list(answers.values()), limits)
    names = {f"targets.{place}": f"targets.{name}" for place, name in enumerate(vocabularies)}
    taken = rows.batch(np.arange(count))
    return TimedRows({names.get(key, key): torch.from_numpy(array) for key, array in taken.items()}, prompts, answers)


def _text(chance: np.random.Generator, size: int) -> str:
    letters = chance.integers(ord("a"), ord("z") + 1, size, dtype=np.uint8)
    letters[_LETTERS :: _LETTERS + 1] = ord(" ")
    return letters.tobytes().decode()


def measure(request: dict[str, Any]) -> Figures:
    with warm_trainer(request["recipe"], DataFacts(**request["facts"]), where="bench") as own:
        trainer, objective = own.trainer, own.objective
        vocabularies = {name: one.decoder.shape.vocab for name, one in objective.frozen.items()}
        rows = timed_rows(own.resolved.recipe, vocabularies, trainer.batch.global_batch)
        teacher_ms = 0.0
        for _ in range(2):  # the first pass is slower
            states, teacher_ms = _teacher_states(objective, rows)
        micros = TimedRows(rows.batch | states, rows.prompts, rows.answers).micros(trainer.batch.micro)
        batch = step_batch(objective, [to_device(one.batch, trainer.device) for one in micros])
        terms: list[dict[str, Tensor]] = []

        def step(number: int) -> Tensor:
            result = trainer.train_step(number, batch, 1.0)
            terms.append(result.terms)
            return result.loss

        total = trainer.batch.global_batch
        figures = time_steps(step, steps=request["steps"], tokens=total, device=trainer.device)
    return {
        **rename_to_texts(figures),
        **own.settings(),
        "first_terms": {name: term.item() for name, term in terms[0].items()},
        "teacher_ms": teacher_ms,
        "prompt_tokens": rows.prompt_tokens,
        "versions": installed(*PACKAGES),
    }


def rename_to_texts(figures: Figures) -> Figures:
    """Rename the figures of tokens to texts, which are what this benchmark counts."""
    return {key.replace("tokens", "texts"): value for key, value in figures.items()}


@torch.no_grad()
def _teacher_states(objective: Any, rows: TimedRows) -> tuple[dict[str, Tensor], float]:
    """Return the states that each teacher would store for a step's texts, and the milliseconds that they took."""
    options, device, all_states = objective.options, objective.device, {}
    if not needs_teacher(options):
        return {}, 0.0
    begin = time.perf_counter()
    with objective.uncompiled():
        for name, one in objective.frozen.items():
            size = (len(rows.prompts[name]), options.first_tokens, one.decoder.shape.d_model)
            states = all_states[f"teacher.{name}"] = torch.zeros(size, dtype=objective.dtype)
            answers = [answer[: options.first_tokens] for answer in rows.answers[name]]
            for place, hidden in one.text_states(rows.prompts[name], answers):
                states[place, : len(hidden)] = hidden.to("cpu", objective.dtype)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return all_states, 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    reply(measure)
