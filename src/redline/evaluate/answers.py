"""Questions put to a model, and how right its answers are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redline.errors import UserError
from redline.metrics.answers import RULE, answer_match, behind_mark, exact_match, f1, final_answer, gsm8k_exact_match
from redline.metrics.lm_eval import flexible_extract, strict_match

if TYPE_CHECKING:
    from redline.objectives.base import Answered, Asked, Objective

Score = Callable[[Sequence[str], Sequence[str]], float]
# By name, what is averaged; an answer is right if its exact_match is 1.
METRICS: dict[str, dict[str, Score]] = {
    "gsm8k": {
        "exact_match": gsm8k_exact_match,
        "strict_match": strict_match,
        "flexible_extract": flexible_extract,
    },
    "match": {"exact_match": answer_match},
    "f1": {"f1": f1, "exact_match": exact_match},
}


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
    objective.narrow(count)
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


def _marked(kind: str, asked: Asked, answer: Answered) -> Marked:
    said = answer.text if kind == "gsm8k" else behind_mark(answer.text)
    marks = {name: score([said], [asked.reference]) for name, score in METRICS[kind].items()}
    return Marked(asked.question, asked.reference, answer.text, answer.ended, marks, answer.looks)
