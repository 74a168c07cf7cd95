"""redline eval"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.completion import complete_runs, complete_words
from redline.cli.options import (
    MOST_TOKENS,
    BaseOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    SetOption,
    WeightsOption,
    one_of,
)
from redline.errors import UsageError
from redline.metrics import METRICS
from redline.runs.summary import RUNS
from redline.units import format_seconds

if TYPE_CHECKING:
    from redline.evaluate.opened_run import Trained
    from redline.evaluate.questions import Exam, HeldOut
    from redline.jobs.objective import AnswerReport

_HUB_ID = re.compile(r"([\w.-]+)/[\w.-]+")
_TOKENS = 256
_WRONG_SHOWN, _SHOWN = 3, 120  # answers; characters at either end of one


def evaluate(
    run: ModelArgument = "latest",
    data: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Text, tokens or rows to evaluate on. Default: what the run held out."),
    ] = None,
    text_key: Annotated[
        str | None, typer.Option("--text-key", metavar="KEY", help="With --data: the key of rows that holds the text.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of sequences to evaluate. Default: all.")
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(METRICS),
            callback=one_of("--answers", *METRICS),
            autocompletion=complete_words(*METRICS),
            help="Generate answers to questions and compare them with the references: by their final number (gsm8k), "
            "by their text (match), or by their words (f1).",
        ),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --answers: number of questions. Default: all.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help=f"With --answers or --under: most tokens of an answer or text. Default: {_TOKENS}.",
        ),
    ] = None,
    under: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            autocompletion=complete_runs,
            help="Generate texts and measure their perplexity under the model of another run.",
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, metavar="N", help="With --under: number of texts.")] = 64,
    settings: SetOption = None,
    base: BaseOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Measure the loss of a model, or how well it answers questions.

    Examples:
      redline eval latest
      redline eval latest@best --data ./held-out.txt --json
      redline eval latest --answers gsm8k --data ./test.jsonl --questions 100
      redline eval HuggingFaceTB/SmolLM2-135M-Instruct --answers gsm8k --data ./test.jsonl
      redline eval my-diffusion --answers gsm8k --set sampler=ancestral --set sampler_steps=4
      redline eval my-diffusion --under my-causal-run --texts 64
    """
    if under is not None and (answers or data):
        option = "--answers" if answers else "--data"
        raise UsageError(f"--under and {option} do not go together.", fix="Leave out one of them.")
    if answers is None and under is None and (questions or tokens):
        option = "--questions" if questions else "--tokens"
        raise UsageError(f"{option} goes with --answers.", fix=f"Give --answers {', '.join(METRICS)}, or leave it out.")
    if text_key is not None and data is None:
        raise UsageError("--text-key goes with --data.", fix="Name the rows: --data FILE; or leave it out.")
    from redline.evaluate.questions import held_out_of

    trained = open_model(
        run,
        weights=weights,
        base=base,
        answers=answers is not None,
        device=device,
        source=data,
        text_key=text_key,
        sequences=sequences or 1 << 40,
        settings=settings or (),
    )
    if answers is not None and (report := _answer_report(trained, answers, questions, tokens)):
        _show_report(trained, report, json_)
        return
    exam = None if answers is None else _examine(trained, answers, questions, tokens or _TOKENS)
    if under is not None:
        result = _written(trained, under, texts, tokens or _TOKENS, device)
    else:
        result = exam.result() if exam else trained.objective.evaluate(trained.micro)
    held = None if under is not None else held_out_of(trained.objective, trained.training)
    if json_:
        import json

        wrong = [one.as_dict() for one in exam.wrong(_WRONG_SHOWN)] if exam else []
        marked = {"answers": answers, "rule": exam.rule, "wrong": wrong} if exam else {}
        typer.echo(json.dumps({**trained.about(), **result, **marked, **_beside(held, trained)}))
        return
    typer.echo(trained.title)
    for name, value in result.items():
        typer.echo(
            f"  {name:19s} {'unknown' if value is None else value if isinstance(value, int) else f'{value:.4f}'}"
        )
    for line in held.lines() if held else ():
        typer.echo(f"  {'held out':19s} {line}")
    if exam is not None:
        typer.echo(f"  {'rule':19s} {exam.rule}")
        _show_wrong(exam)


def _beside(held: HeldOut | None, trained: Trained) -> dict[str, Any]:
    """For programs: what the score was measured on, and what was said when the model was opened."""
    return {"held_out": held and held.as_dict(), "notes": trained.notes}


def _written(trained: Trained, under: str, count: int, tokens: int, device: str) -> dict[str, Any]:
    from redline.evaluate.questions import generative_perplexity
    from redline.jobs.base import JOBS, is_job, job
    from redline.recipe.lock import read_lock
    from redline.runs.summary import resolve_run

    reader, _ = resolve_run(under, RUNS)  # a slip is answered before anything is written
    objective = read_lock(reader)["recipe"]["objective"]
    if not (is_job(objective) and job(objective).exact_likelihood):
        what = f"is a {objective} run, whose loss is not the likelihood of any text."
        suitable = " or ".join(name for name in JOBS if job(name).exact_likelihood)
        raise UsageError(what, where=under, fix=f"Name a {suitable} run with --under.")
    if trained.objective.can_answer:
        what = "answers questions, and writes no texts of its own."
        raise UsageError(what, where=trained.name, fix="Leave out --under; --answers marks what it says.")

    def score(file: Path) -> dict[str, float | None]:
        other = open_model(under, weights=None, base=None, device=device, source=str(file), sequences=1 << 40)
        return other.objective.evaluate(other.micro)

    with _AnswerBar("texts") as bar:
        return generative_perplexity(trained.objective, score, count=count, tokens=tokens, where=trained.name, told=bar)


def _answer_report(trained: Trained, kind: str, count: int | None, tokens: int | None) -> AnswerReport | None:
    """Evaluate answers in the way of the model's job; None if it has no way of its own."""
    from redline.jobs.base import job

    objective = trained.objective
    default = job(objective.recipe.objective).answer_tokens
    with _AnswerBar() as bar:
        return objective.answer_report(
            numbers=kind == "gsm8k", count=count, tokens=tokens or default, where=trained.name, progress=bar
        )


def _show_report(trained: Trained, found: AnswerReport, json_: bool) -> None:
    from redline.evaluate.questions import held_out_of

    held = held_out_of(trained.objective, trained.training)
    if json_:
        import json

        typer.echo(json.dumps({**trained.about(), **found.result(), **_beside(held, trained)}))
        return
    typer.echo(trained.title)
    for line in found.lines():
        typer.echo(f"  {line}")
    for line in held.lines() if held else ():
        typer.echo(f"  held out: {line}")


def _examine(trained: Trained, kind: str, count: int | None, tokens: int) -> Exam:
    from redline.evaluate.questions import examine

    with _AnswerBar() as bar:
        return examine(
            trained.objective, kind, micro=trained.micro, count=count, tokens=tokens, where=trained.name, told=bar
        )


def open_model(
    name: str,
    *,
    weights: str | None,
    base: str | None,
    answers: bool = False,
    writes_only: bool = False,
    settings: Sequence[str] = (),
    text_key: str | None = None,
    **how: Any,
) -> Trained:
    """A run; where there is none of that name, a model that lies in files or on a hub."""
    from redline.runs.summary import resolve_run

    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        typer.echo(text, err=True)

    how |= {"writes_only": writes_only, "say": say}
    try:
        path, selector = resolve_run(name, RUNS)
    except UsageError:
        if not _may_be_model(name):
            raise
        if weights is not None:
            raise UsageError("--weights picks from a run.", where=name, fix="Leave it out for a model.") from None
        if settings:
            raise UsageError("--set is for a run.", where=name, fix="Leave it out for a model.") from None
        if text_key is not None:
            raise UsageError("--text-key is for a run that reads texts.", where=name, fix="Leave it out.") from None
        from redline.evaluate.opened_run import open_folder

        return replace(open_folder(name, base=base, **how), notes=notes)
    from redline.evaluate.opened_run import open_trained

    trained = open_trained(
        path, selector, weights=weights, base=base, text_key=text_key, answers=answers, settings=settings, **how
    )
    return replace(trained, notes=notes)


def _may_be_model(name: str) -> bool:
    """It lies here, or is spelt like a hub's owner/name. A slip in runs/NAME, or in another folder's, is none."""
    from redline.runs.summary import is_sweep

    if not name or is_sweep(Path(name)):
        return False
    spelt = _HUB_ID.fullmatch(name)
    elsewhere = spelt is not None and spelt[1] != RUNS.name and not Path(spelt[1]).exists()
    return elsewhere or Path(name).expanduser().exists()


def _show_wrong(exam: Exam) -> None:
    for one in exam.wrong(_WRONG_SHOWN):
        typer.echo()
        for word, text in (("asked", one.question), ("expected", one.reference), ("answered", one.answer)):
            typer.echo(f"  {word:9s} {_shortened(text)}")


def _shortened(text: str) -> str:
    """One line, without what would move the cursor."""
    line = "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
    return line if len(line) <= 2 * _SHOWN + 3 else f"{line[:_SHOWN]} … {line[-_SHOWN:]}"


class _AnswerBar:
    """How many questions are answered: a bar on a terminal, and a last line anywhere."""

    def __init__(self, what: str = "questions") -> None:
        self.what, self._begun, self._done = what, time.monotonic(), 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _AnswerBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        self._done = done
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("writing", total=total)
        self._bar.update(self._task, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None and self._done:
            took = format_seconds(time.monotonic() - self._begun)
            done = "answered" if self.what == "questions" else "wrote"
            typer.echo(f"{done} {self._done:,} {self.what} in {took}", err=True)
