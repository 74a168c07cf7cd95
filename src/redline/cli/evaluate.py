"""redline eval"""

from __future__ import annotations

from pathlib import Path
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
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.evaluate.opened_run import OpenedModel
    from redline.evaluate.questions import AnswerResults, HeldOut
    from redline.jobs.objective import AnswerEvaluation

_TOKENS = 256  # of a generated answer or text, unless --tokens is given
_ALL = 1 << 40  # more sequences than any data set has
_WRONG_SHOWN = 3  # wrong answers to print
_SHOWN = 120  # characters to print at either end of a long text


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
        raise UsageError(f"--under and {option} cannot be combined.", fix="Leave out one of them.")
    if answers is None and under is None and (questions or tokens):
        option = "--questions" if questions else "--tokens"
        fix = f"Add --answers {'|'.join(METRICS)}, or leave out {option}."
        raise UsageError(f"{option} needs --answers.", fix=fix)
    if text_key is not None and data is None:
        raise UsageError("--text-key needs --data.", fix="Add --data FILE, or leave out --text-key.")
    from redline.evaluate.named_model import open_model
    from redline.evaluate.questions import held_out_of

    trained = open_model(
        run,
        log=_log,
        weights=weights,
        base=base,
        answers=answers is not None,
        settings=settings or (),
        text_key=text_key,
        device=device,
        source=data,
        sequences=sequences or _ALL,
    )
    if answers is not None and (report := _evaluate_answers(trained, answers, questions, tokens)):
        _show_evaluation(trained, report, json_)
        return
    results = None if answers is None else _score_answers(trained, answers, questions, tokens or _TOKENS)
    if under is not None:
        result = _generative_perplexity(trained, under, texts, tokens or _TOKENS, device)
    else:
        result = results.result() if results else trained.objective.evaluate(trained.micro)
    held_out = None if under is not None else held_out_of(trained.objective, trained.training)
    if json_:
        import json

        wrong = [answer.as_dict() for answer in results.wrong(_WRONG_SHOWN)] if results else []
        details = {"answers": answers, "rule": results.rule, "wrong": wrong} if results else {}
        typer.echo(json.dumps({**trained.as_dict(), **result, **details, **_context(held_out, trained)}))
        return
    typer.echo(trained.title)
    for name, value in result.items():
        typer.echo(f"  {name:19s} {_formatted(value)}")
    for line in held_out.lines() if held_out else ():
        typer.echo(f"  {'held out':19s} {line}")
    if results is not None:
        typer.echo(f"  {'rule':19s} {results.rule}")
        _show_wrong(results)


def _log(text: str) -> None:
    typer.echo(text, err=True)


def _formatted(value: float | None) -> str:
    if value is None:
        return "unknown"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _context(held_out: HeldOut | None, trained: OpenedModel) -> dict[str, Any]:
    """Return what the score was measured on and the notes from opening the model, for JSON output."""
    return {"held_out": held_out and held_out.as_dict(), "notes": trained.notes}


def _generative_perplexity(trained: OpenedModel, under: str, count: int, tokens: int, device: str) -> dict[str, Any]:
    """Generate `count` texts and measure their perplexity under the run `under`."""
    from redline.cli.progress import GenerationBar
    from redline.evaluate.named_model import open_model
    from redline.evaluate.questions import generative_perplexity
    from redline.jobs.base import JOBS, is_job, job
    from redline.recipe.lock import read_lock
    from redline.runs.summary import resolve_run

    # Resolve the other run first: a mistyped name should not cost the time that generating the texts takes.
    reader, _ = resolve_run(under, RUNS)
    objective = read_lock(reader)["recipe"]["objective"]
    if not (is_job(objective) and job(objective).exact_likelihood):
        what = f"the loss of a {objective} run is not the likelihood of a text."
        suitable = " or ".join(name for name in JOBS if job(name).exact_likelihood)
        raise UsageError(what, where=under, fix=f"Name a {suitable} run with --under.")
    if trained.objective.can_answer:
        what = "the model answers questions and does not generate texts without one."
        raise UsageError(what, where=trained.name, fix="Use --answers instead of --under.")

    def score(file: Path) -> dict[str, float | None]:
        other = open_model(under, log=_log, device=device, source=str(file), sequences=_ALL)
        return other.objective.evaluate(other.micro)

    with GenerationBar("texts") as bar:
        return generative_perplexity(
            trained.objective, score, count=count, tokens=tokens, where=trained.name, progress=bar
        )


def _evaluate_answers(
    trained: OpenedModel, kind: str, count: int | None, tokens: int | None
) -> AnswerEvaluation | None:
    """Evaluate answers by the method of the model's job; return None if the job has none."""
    from redline.cli.progress import GenerationBar
    from redline.jobs.base import job

    objective = trained.objective
    default = job(objective.recipe.objective).answer_tokens
    with GenerationBar() as bar:
        return objective.evaluate_answers(
            numbers=kind == "gsm8k", count=count, tokens=tokens or default, where=trained.name, progress=bar
        )


def _show_evaluation(trained: OpenedModel, report: AnswerEvaluation, json_: bool) -> None:
    from redline.evaluate.questions import held_out_of

    held_out = held_out_of(trained.objective, trained.training)
    if json_:
        import json

        typer.echo(json.dumps({**trained.as_dict(), **report.result(), **_context(held_out, trained)}))
        return
    typer.echo(trained.title)
    for line in report.lines():
        typer.echo(f"  {line}")
    for line in held_out.lines() if held_out else ():
        typer.echo(f"  held out: {line}")


def _score_answers(trained: OpenedModel, kind: str, count: int | None, tokens: int) -> AnswerResults:
    from redline.cli.progress import GenerationBar
    from redline.evaluate.questions import score_answers

    with GenerationBar() as bar:
        return score_answers(
            trained.objective, kind, micro=trained.micro, count=count, tokens=tokens, where=trained.name, progress=bar
        )


def _show_wrong(results: AnswerResults) -> None:
    for answer in results.wrong(_WRONG_SHOWN):
        typer.echo()
        rows = (("question", answer.question), ("expected", answer.reference), ("answer", answer.answer))
        for label, text in rows:
            typer.echo(f"  {label:9s} {_on_one_line(text)}")


def _on_one_line(text: str) -> str:
    """Return the text on one line, shortened in the middle, without characters that would move the cursor."""
    line = "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
    return line if len(line) <= 2 * _SHOWN + 3 else f"{line[:_SHOWN]} … {line[-_SHOWN:]}"
