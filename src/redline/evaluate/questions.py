"""Evaluation besides the loss: scores of answers, generative perplexity, and what a score was measured on.

Nothing here imports torch at the top, since the command line needs the names of the metrics for its help.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.data.estimate import expected_facts
from redline.data.facts import is_facts
from redline.data.problems import is_problems
from redline.data.sources import is_clean, source_bytes
from redline.errors import UserError
from redline.fields import none_if_auto
from redline.metrics import METRICS, RULE, answer_text, final_answer
from redline.recipe.resolve import FEW_ROWS
from redline.recipe.schema import Recipe
from redline.remote import is_url

if TYPE_CHECKING:
    from redline.jobs.objective import Answer, JobData, Objective, Question

# Receives how many questions or texts are done, and how many there are.
Progress = Callable[[int, int], None]


def ignore_progress(done: int, total: int) -> None:
    """The default of parameters of type `Progress`."""


@dataclass(frozen=True)
class ScoredAnswer:
    """A question, the model's answer, and its scores."""

    question: str
    reference: str
    answer: str
    ended: bool
    scores: dict[str, float]  # metric → score
    forward_passes: int = 0  # that it took, for a model that does not need one per token

    @property
    def right(self) -> bool:
        return self.scores["exact_match"] == 1.0

    def as_dict(self) -> dict[str, str]:
        return {"question": self.question, "reference": self.reference, "answer": self.answer}


@dataclass(frozen=True)
class AnswerResults:
    """The scores of a model's answers to a set of questions."""

    kind: str  # the key of METRICS by which answers are compared
    answers: list[ScoredAnswer]
    loss: dict[str, float | None]  # the metrics of `Objective.evaluate` on the same rows
    seconds: float  # that generating the answers took

    def result(self) -> dict[str, Any]:
        """Return the loss, the means of the scores, and how many answers are right and how many were cut, as JSON."""
        count = len(self.answers)
        means = {name: sum(answer.scores[name] for answer in self.answers) / count for name in METRICS[self.kind]}
        right = sum(answer.right for answer in self.answers)
        forward_passes = sum(answer.forward_passes for answer in self.answers) / count
        return {
            **self.loss,
            **means,
            "questions": count,
            "right": right,
            "cut": sum(not answer.ended for answer in self.answers),
            "answers_per_s": count / self.seconds,
            **({"forwards_per_answer": forward_passes} if forward_passes else {}),
        }

    @property
    def rule(self) -> str:
        """Which part of an answer is compared, and how."""
        if self.kind == "gsm8k":
            return RULE
        text = "its whole text, without case, articles and punctuation"
        return f"{text}; JSON objects and arrays as JSON" if self.kind == "match" else text

    def wrong(self, count: int) -> list[ScoredAnswer]:
        """Return the first `count` wrong answers."""
        return [answer for answer in self.answers if not answer.right][:count]


def score_answers(
    objective: Objective,
    kind: str,
    *,
    micro: int,
    count: int | None,
    tokens: int,
    where: str,
    progress: Progress = ignore_progress,
) -> AnswerResults:
    """Generate greedy answers of at most `tokens` to the first `count` held-out questions, and score them."""
    objective.select_questions(count)
    questions = objective.questions()
    if not questions:
        what = "no question is held out, so there is nothing to answer."
        raise UserError(what, where=where, fix="Name rows with questions and answers: --data FILE.")
    if kind == "gsm8k" and all(final_answer(question.reference) is None for question in questions):
        what = f"none of the {len(questions)} reference answers has a number, and gsm8k compares only numbers."
        raise UserError(what, where="--answers", fix="Use --answers match or f1.")
    loss = objective.evaluate(micro)
    progress(0, len(questions))
    start = time.monotonic()
    answers = objective.answer(questions, tokens, lambda done: progress(done, len(questions)))
    seconds = max(1e-6, time.monotonic() - start)
    scored = [_scored(kind, question, answer) for question, answer in zip(questions, answers, strict=True)]
    return AnswerResults(kind, scored, loss, seconds)


def _scored(kind: str, question: Question, answer: Answer) -> ScoredAnswer:
    compared = answer.text if kind == "gsm8k" else answer_text(answer.text)
    scores = {name: score([compared], [question.reference]) for name, score in METRICS[kind].items()}
    return ScoredAnswer(question.text, question.reference, answer.text, answer.ended, scores, answer.forward_passes)


# ----------------------------------------------------------------------------------------------------
# Generative perplexity: the perplexity of a model's texts under another model.


_BATCH_TEXTS = 16  # that are generated together


def generative_perplexity(
    objective: Objective,
    score: Callable[[Path], dict[str, float | None]],
    *,
    count: int,
    tokens: int,
    seed: int = 0,
    where: str,
    progress: Progress = ignore_progress,
) -> dict[str, Any]:
    """Sample `count` texts without a prompt, at temperature 1, and return their perplexity.

    `score` evaluates another model on a file with the texts.
    """
    from redline.jobs.objective import Sampling

    start, texts = time.monotonic(), []
    progress(0, count)
    for first in range(0, count, _BATCH_TEXTS):
        size = min(_BATCH_TEXTS, count - first)
        how = Sampling(count=size, tokens=tokens, seed=seed + first, temperature=1.0, top_p=None)
        texts += [sample.text for sample in objective.sample("", how)]
        progress(len(texts), count)
    seconds = max(1e-6, time.monotonic() - start)
    readable = [text for text in texts if text.strip() and is_clean(text)]
    if 2 * len(readable) < len(texts):
        what = f"only {len(readable)} of the {len(texts)} texts that it generated are readable text."
        raise UserError(what, where=where, fix="Train it for longer.")
    with tempfile.TemporaryDirectory(prefix="redline-texts-") as folder:
        file = Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in readable), encoding="utf-8")
        metrics = score(file)
    return {
        "generative_perplexity": metrics["perplexity"],
        "texts": len(texts),
        "texts_read": len(readable),
        "characters": sum(map(len, texts)),
        "texts_per_s": len(texts) / seconds,
    }


# ----------------------------------------------------------------------------------------------------
# What a score was measured on: how many rows, and how many of them the run was trained on.


_MOST_BYTES = 256 << 20  # of training rows that are read again, to be compared with the evaluated ones

Keys = Collection[Any]


@dataclass(frozen=True)
class HeldOut:
    """What a score was measured on."""

    size: int
    unit: str  # "rows", or "sequences" of text
    shared: int | None = None  # rows or documents that the run was also trained on; None: unknown
    compared: bool = False  # with the training data: only data that `--data` names

    def as_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "unit": self.unit,
            "few": self.few,
            "shared_with_training": self.shared,
            "warnings": self.lines(),
        }

    @property
    def few(self) -> bool:
        return self.size < FEW_ROWS

    def lines(self) -> list[str]:
        """Return the warnings that belong beside the score."""
        warnings = []
        if self.few:
            warnings.append(f"only {self.size} {self.unit}, fewer than {FEW_ROWS}: a rough estimate")
        if self.shared:
            what = "row" if self.unit == "rows" else "document"
            many = f"{self.shared:,} {what}{'s are' if self.shared > 1 else ' is'}"
            warnings.append(f"{many} in the training data as well: this is not a score on unseen data")
        elif self.compared and self.shared is None:
            warnings.append("the run may have been trained on some of it: its training data cannot be read here")
        return warnings


def held_out_of(objective: Objective, training: Recipe | None) -> HeldOut | None:
    """Describe what the objective evaluates; None if that is not known.

    `training` is the run's own recipe, if other data than its own are evaluated.
    """
    data: JobData = objective.data
    recipe = objective.recipe
    keys, sequences = data.row_keys(trained=False), data.held_out_sequences(recipe.data.seq_len)
    text = sequences is not None
    if sequences is not None:
        size = min(sequences, recipe.eval.sequences)
    elif keys is not None:
        size = len(keys)
    else:
        return None
    if training is None:
        return HeldOut(size, "sequences" if text else "rows")
    known = None if keys is None else _training_keys(training, text=text)
    shared = None if keys is None or known is None else len(set(keys) & set(known))
    return HeldOut(size, "sequences" if text else "rows", shared, compared=True)


def _training_keys(recipe: Recipe, *, text: bool) -> Keys | None:
    """Return the keys of the rows or documents that the run was trained on; None if they are missing or too many."""
    from redline.jobs.objective import job_runtime

    sources = [part.source for part in recipe.data.parts]
    try:
        if recipe.data.stream or not all(_exists(source) for source in sources):
            return None
        if text and expected_facts(recipe.data, int(none_if_auto(recipe.model.vocab) or 0)).estimated:
            return None  # the prepared tokens are gone: reading the keys would prepare them again
        if not text and sum(0 if is_problems(one) else source_bytes(one) or 0 for one in sources) > _MOST_BYTES:
            return None
        keys: Keys | None = job_runtime(recipe.objective).load_data(recipe).row_keys(trained=True)
    except UserError:  # the training data were moved, changed or damaged; the score itself does not need them
        return None
    return keys


def _exists(source: str) -> bool:
    try:
        generated = source == "embedded" or is_problems(source) or is_facts(source)
        return generated or is_url(source) or Path(source).expanduser().exists()
    except OSError:  # the name is too long for a file
        return False
