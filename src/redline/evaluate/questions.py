"""Questions put to a model, and how right its answers are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redline.errors import UserError
from redline.metrics import METRICS, RULE, behind_mark, final_answer

if TYPE_CHECKING:
    from redline.jobs.objective import Answer, JobData, Objective, Question
import json
import tempfile
from collections.abc import Collection
from pathlib import Path

from redline.data.estimate import expected_facts
from redline.data.problems import is_problems
from redline.data.rows import is_clean
from redline.data.sources import source_bytes
from redline.fields import none_if_auto
from redline.recipe.resolve import FEW_ROWS
from redline.recipe.schema import Recipe


@dataclass(frozen=True)
class Marked:
    """A question, its answer, and the marks for it."""

    question: str
    reference: str
    answer: str
    ended: bool
    marks: dict[str, float]
    looks: int = 0  # forwards, of a model that needs not one a token

    @property
    def right(self) -> bool:
        return self.marks["exact_match"] == 1.0

    def as_dict(self) -> dict[str, str]:
        return {"question": self.question, "reference": self.reference, "answer": self.answer}


@dataclass(frozen=True)
class Exam:
    kind: str
    marked: list[Marked]
    loss: dict[str, float | None]  # and what goes with it, of the same rows
    seconds: float  # that answering took

    def result(self) -> dict[str, Any]:
        """Loss, the marks' means, and counts: answers that are right, and those that came to no end."""
        count = len(self.marked)
        means = {name: sum(one.marks[name] for one in self.marked) / count for name in METRICS[self.kind]}
        right = sum(one.right for one in self.marked)
        looks = sum(one.looks for one in self.marked) / count
        return {
            **self.loss,
            **means,
            "questions": count,
            "right": right,
            "cut": sum(not one.ended for one in self.marked),
            "answers_per_s": count / self.seconds,
            **({"forwards_per_answer": looks} if looks else {}),
        }

    @property
    def rule(self) -> str:
        """How an answer is read."""
        if self.kind == "gsm8k":
            return RULE
        text = "its whole text, without case, articles and punctuation"
        return f"{text}; JSON objects and arrays as JSON" if self.kind == "match" else text

    def wrong(self, count: int) -> list[Marked]:
        return [one for one in self.marked if not one.right][:count]


def examine(
    objective: Objective,
    kind: str,
    *,
    micro: int,
    count: int | None,
    tokens: int,
    where: str,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Exam:
    """Greedy answers of at most `tokens` to the first `count` questions; `told` hears how many of them are there."""
    objective.select_questions(count)
    asked = objective.questions()
    if not asked:
        what = "no question is held out: there is nothing to answer."
        raise UserError(what, where=where, fix="Name rows with questions and answers: --data FILE.")
    if kind == "gsm8k" and all(final_answer(one.reference) is None for one in asked):
        what = f"none of {len(asked)} reference answers has a number, and gsm8k compares nothing else."
        raise UserError(what, where="--answers", fix="Use --answers match or f1.")
    loss = objective.evaluate(micro)
    told(0, len(asked))
    begun = time.monotonic()
    answers = objective.answer(asked, tokens, lambda done: told(done, len(asked)))
    seconds = max(1e-6, time.monotonic() - begun)
    return Exam(kind, [_marked(kind, one, answer) for one, answer in zip(asked, answers, strict=True)], loss, seconds)


def _marked(kind: str, asked: Question, answer: Answer) -> Marked:
    said = answer.text if kind == "gsm8k" else behind_mark(answer.text)
    marks = {name: score([said], [asked.reference]) for name, score in METRICS[kind].items()}
    return Marked(asked.text, asked.reference, answer.text, answer.ended, marks, answer.forward_passes)


# ----------------------------------------------------------------------------------------------------
# What a model writes, read by another one: generative perplexity.


_AT_ONCE = 16  # texts


def generative_perplexity(
    objective: Objective,
    score: Callable[[Path], dict[str, float | None]],
    *,
    count: int,
    tokens: int,
    seed: int = 0,
    where: str,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Of `count` texts drawn as they are likely, without a prompt; `score` has another model read a file of them."""
    begun, texts = time.monotonic(), []
    told(0, count)
    for first in range(0, count, _AT_ONCE):
        some = min(_AT_ONCE, count - first)
        from redline.jobs.objective import Sampling

        how = Sampling(count=some, tokens=tokens, seed=seed + first, temperature=1.0, top_p=None)
        texts += [sample.text for sample in objective.sample("", how)]
        told(len(texts), count)
    seconds = max(1e-6, time.monotonic() - begun)
    readable = [text for text in texts if text.strip() and is_clean(text)]
    if 2 * len(readable) < len(texts):
        what = f"of the {len(texts)} texts that it wrote, {len(readable)} are text that another model could read."
        raise UserError(what, where=where, fix="Train it for longer.")
    with tempfile.TemporaryDirectory(prefix="redline-texts-") as folder:
        file = Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in readable), encoding="utf-8")
        found = score(file)
    return {
        "generative_perplexity": found["perplexity"],
        "texts": len(texts),
        "texts_read": len(readable),
        "characters": sum(map(len, texts)),
        "texts_per_s": len(texts) / seconds,
    }


# ----------------------------------------------------------------------------------------------------
# What a score was measured on: how many rows, and how many of them the run was trained on.


_MOST_BYTES = 256 << 20  # of training rows that are read again to be compared

Keys = Collection[Any]


@dataclass(frozen=True)
class HeldOut:
    size: int
    unit: str  # rows, or sequences of text
    shared: int | None = None  # rows or documents that the run was trained on; None: not known
    looked: bool = False  # whether they were looked for: only with --data

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
        """Return what must stand beside the score."""
        told = []
        if self.few:
            told.append(f"only {self.size} {self.unit}, fewer than {FEW_ROWS}: a rough estimate")
        if self.shared:
            what = "row" if self.unit == "rows" else "document"
            many = f"{self.shared:,} {what}{'s are' if self.shared > 1 else ' is'}"
            told.append(f"{many} in the training data as well: this is not a score on unseen data")
        elif self.looked and self.shared is None:
            told.append("whether the run was trained on some of it is not known: its training data cannot be read here")
        return told


def held_out_of(objective: Objective, training: Recipe | None) -> HeldOut | None:
    """Describe what the objective evaluates; `training` is the run's own recipe, where other data are evaluated."""
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
    return HeldOut(size, "sequences" if text else "rows", shared, looked=True)


def _training_keys(recipe: Recipe, *, text: bool) -> Keys | None:
    """Return the keys of what the run was trained on; None where that is not at hand, or too much to read again."""
    from redline.jobs.objective import job_runtime

    sources = [part.source for part in recipe.data.parts]
    try:
        if recipe.data.stream or not all(_here(source) for source in sources):
            return None
        if text and expected_facts(recipe.data, int(none_if_auto(recipe.model.vocab) or 0)).estimated:
            return None  # it would have to be prepared again
        if not text and sum(0 if is_problems(one) else source_bytes(one) or 0 for one in sources) > _MOST_BYTES:
            return None
        keys: Keys | None = job_runtime(recipe.objective).load_data(recipe).row_keys(trained=True)
    except UserError:  # moved, changed or damaged since: the score itself does not need it
        return None
    return keys


def _here(source: str) -> bool:
    try:
        return source == "embedded" or is_problems(source) or Path(source).expanduser().exists()
    except OSError:  # a name too long for any file
        return False
