"""What `redline eval` and `redline sample` do, for the command line and for Python: measure a model, or sample it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError, UserError
from redline.evaluate.named_model import open_model
from redline.evaluate.questions import AnswerResults, HeldOut, Progress, held_out_of, ignore_progress
from redline.jobs.base import JOBS, is_job, job
from redline.metrics import METRICS
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.evaluate.opened_run import OpenedModel
    from redline.jobs.objective import AnswerEvaluation, Sample, Sampling

TOKENS = 256  # of a generated answer or text, unless a number is given
_ALL = 1 << 40  # more sequences than any data set has
_WRONG_SHOWN = 3  # wrong answers that a result lists

# Opens a progress bar over "questions" or "texts".
Bar = Callable[[str], AbstractContextManager[Progress]]
Log = Callable[[str], None]


def no_bar(what: str) -> AbstractContextManager[Progress]:
    return nullcontext(ignore_progress)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: figures by name, and what they were measured on."""

    opened: OpenedModel
    result: dict[str, Any]
    held_out: HeldOut | None
    answers: AnswerResults | None = None  # scored by the rules of METRICS
    report: AnswerEvaluation | None = None  # of a job that evaluates answers in its own way

    @property
    def wrong(self) -> list[Any]:
        return self.answers.wrong(_WRONG_SHOWN) if self.answers else []

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON, as `redline eval --json` prints it."""
        details: dict[str, Any] = {}
        if self.answers is not None:
            wrong = [answer.as_dict() for answer in self.wrong]
            details = {"answers": self.answers.kind, "rule": self.answers.rule, "wrong": wrong}
        context = {"held_out": self.held_out and self.held_out.as_dict(), "notes": self.opened.notes}
        return {**self.opened.as_dict(), **self.result, **details, **context}


def evaluate_model(
    name: str,
    *,
    log: Log,
    bar: Bar = no_bar,
    data: str | None = None,
    text_key: str | None = None,
    sequences: int | None = None,
    answers: str | None = None,
    questions: int | None = None,
    tokens: int | None = None,
    under: str | None = None,
    texts: int = 64,
    settings: Sequence[str] = (),
    base: str | None = None,
    weights: str | None = None,
    device: str = "auto",
) -> Evaluation:
    """Measure the loss of a run or model, its answers (`answers`), or its texts under another run (`under`)."""
    _check_options(data, text_key, answers, questions, tokens, under)
    opened = open_model(
        name,
        log=log,
        weights=weights,
        base=base,
        answers=answers is not None,
        settings=settings,
        text_key=text_key,
        device=device,
        source=data,
        sequences=sequences or _ALL,
    )
    objective = opened.objective
    results: AnswerResults | None = None
    if answers is not None:
        with bar("questions") as progress:
            report = objective.evaluate_answers(
                numbers=answers == "gsm8k",
                count=questions,
                tokens=tokens or job(objective.recipe.objective).answer_tokens,
                where=opened.name,
                progress=progress,
            )
        if report is not None:
            return Evaluation(opened, report.result(), held_out_of(objective, opened.training), report=report)
        from redline.evaluate.questions import score_answers

        with bar("questions") as progress:
            results = score_answers(
                objective,
                answers,
                micro=opened.micro,
                count=questions,
                tokens=tokens or TOKENS,
                where=opened.name,
                progress=progress,
            )
    if under is not None:
        result = _generative_perplexity(opened, under, texts, tokens or TOKENS, device, log, bar)
        return Evaluation(opened, result, None)
    result = results.result() if results else objective.evaluate(opened.micro)
    return Evaluation(opened, result, held_out_of(objective, opened.training), results)


def _check_options(
    data: str | None,
    text_key: str | None,
    answers: str | None,
    questions: int | None,
    tokens: int | None,
    under: str | None,
) -> None:
    if answers is not None and answers not in METRICS:
        raise UsageError(f"{answers!r} is not {' or '.join(METRICS)}.", where="--answers", fix="Use one of those.")
    if under is not None and (answers or data):
        option = "--answers" if answers else "--data"
        raise UsageError(f"--under and {option} cannot be combined.", fix="Leave out one of them.")
    if answers is None and under is None and (questions or tokens):
        option = "--questions" if questions else "--tokens"
        fix = f"Add --answers {'|'.join(METRICS)}, or leave out {option}."
        raise UsageError(f"{option} needs --answers.", fix=fix)
    if text_key is not None and data is None:
        raise UsageError("--text-key needs --data.", fix="Add --data FILE, or leave out --text-key.")


def _generative_perplexity(
    opened: OpenedModel, under: str, count: int, tokens: int, device: str, log: Log, bar: Bar
) -> dict[str, Any]:
    """Generate `count` texts and measure their perplexity under the run `under`."""
    from redline.evaluate.questions import generative_perplexity
    from redline.recipe.lock import read_lock
    from redline.runs.summary import resolve_run

    # Resolve the other run first: a mistyped name should not cost the time that generating the texts takes.
    reader, _ = resolve_run(under, RUNS)
    objective = read_lock(reader)["recipe"]["objective"]
    if not (is_job(objective) and job(objective).exact_likelihood):
        what = f"the loss of a {objective} run is not the likelihood of a text."
        suitable = " or ".join(name for name in JOBS if job(name).exact_likelihood)
        raise UsageError(what, where=under, fix=f"Name a {suitable} run with --under.")
    if opened.objective.can_answer:
        what = "the model answers questions and does not generate texts without one."
        raise UsageError(what, where=opened.name, fix="Use --answers instead of --under.")

    def score(file: Path) -> dict[str, float | None]:
        other = open_model(under, log=log, device=device, source=str(file), sequences=_ALL)
        return other.objective.evaluate(other.micro)

    with bar("texts") as progress:
        return generative_perplexity(
            opened.objective, score, count=count, tokens=tokens, where=opened.name, progress=progress
        )


def sample_model(opened: OpenedModel, prompt: str, how: Sampling, *, plain: bool = False) -> list[Sample]:
    """Return what the model writes after the prompt. With `plain` it continues the prompt without a chat template."""
    # Arguments that are not UTF-8 reach Python as lone surrogates, which no tokenizer accepts.
    prompt = os.fsencode(prompt).decode("utf-8", "replace")
    objective = opened.objective
    samples = objective.continuation(prompt, how) if plain else objective.sample(prompt, how)
    if not samples and objective.can_answer and not prompt:
        raise UsageError(
            "the prompt is empty, so there is no question to answer.", where="--prompt", fix='Add --prompt "TEXT".'
        )
    if not samples:
        fix = "Set REDLINE_GPT2 to the path of a tokenizer.json, or put one beside the token files."
        raise UserError("the tokenizer's files are missing, so tokens cannot be turned into text.", fix=fix)
    return samples
