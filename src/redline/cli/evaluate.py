"""redline eval"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

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
from redline.metrics import METRICS

if TYPE_CHECKING:
    from redline.evaluate.questions import ScoredAnswer

_TOKENS = 256  # of a generated answer or text, unless --tokens is given
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
    from redline.cli.progress import GenerationBar
    from redline.evaluate.measure import evaluate_model

    done = evaluate_model(
        run,
        log=_log,
        bar=GenerationBar,
        data=data,
        text_key=text_key,
        sequences=sequences,
        answers=answers,
        questions=questions,
        tokens=tokens,
        under=under,
        texts=texts,
        settings=settings or (),
        base=base,
        weights=weights,
        device=device,
    )
    if json_:
        import json

        typer.echo(json.dumps(done.as_dict()))
        return
    typer.echo(done.opened.title)
    if done.report is not None:
        for line in done.report.lines():
            typer.echo(f"  {line}")
        for line in done.held_out.lines() if done.held_out else ():
            typer.echo(f"  held out: {line}")
        return
    for name, value in done.result.items():
        typer.echo(f"  {name:19s} {_formatted(value)}")
    for line in done.held_out.lines() if done.held_out else ():
        typer.echo(f"  {'held out':19s} {line}")
    if done.answers is not None:
        typer.echo(f"  {'rule':19s} {done.answers.rule}")
    _show_wrong(done.wrong)


def _log(text: str) -> None:
    typer.echo(text, err=True)


def _formatted(value: float | None) -> str:
    if value is None:
        return "unknown"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _show_wrong(answers: Sequence[ScoredAnswer]) -> None:
    for answer in answers:
        typer.echo()
        rows = (("question", answer.question), ("expected", answer.reference), ("answer", answer.answer))
        for label, text in rows:
            typer.echo(f"  {label:9s} {_on_one_line(text)}")


def _on_one_line(text: str) -> str:
    """Return the text on one line, shortened in the middle, without characters that would move the cursor."""
    line = "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
    return line if len(line) <= 2 * _SHOWN + 3 else f"{line[:_SHOWN]} … {line[-_SHOWN:]}"
