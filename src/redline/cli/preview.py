"""A look at what a model will learn from: texts with the borders of their tokens, by colour on a terminal and by bars
elsewhere; or questions with the answers that are learnt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from redline.data.preview import Preview, Span
from redline.errors import UsageError

if TYPE_CHECKING:
    from redline.jobs.finetune.data import AnswerReport
    from redline.recipe.schema import Recipe

_SHADES = ("black on bright_cyan", "black on bright_yellow")
_MARK = "bold white on red"
_IDS_SHOWN = 40


def draw(document: Preview, number: int, *, ids: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    colour = sys.stdout.isatty()
    text = Text()
    for place, span in enumerate(document.spans):
        style = _MARK if place == 0 else _SHADES[place % 2]
        text.append(_visible(span.text), style=style if colour else "")
        if not colour:
            text.append("│")
    shown = "" if document.whole else f", the first {len(document.ids):,} shown"
    least = "more than " if document.more else ""
    typer.secho(f"document {number}: {least}{document.tokens:,} tokens{shown}", bold=True)
    Console(highlight=False, soft_wrap=not colour).print(text)
    if ids:
        typer.echo("  ".join(_labelled(span) for span in document.spans[:_IDS_SHOWN]))
    typer.echo()


def _visible(text: str) -> str:
    """A newline is shown, and still breaks the line; what would move the cursor does not."""
    return "".join("↵\n" if c == "\n" else "→" if c == "\t" else c if c.isprintable() else "·" for c in text)


def _labelled(span: Span) -> str:
    return f"{'+'.join(str(i) for i in span.ids)}={span.text!r}"


def preview_recipe(recipe: Recipe, count: int) -> None:
    """`redline train … --preview N`."""
    from redline.jobs.base import objective_module

    if recipe.objective == "finetune":
        return _answers(recipe, count)
    if recipe.objective == "latent_prefix":
        return _pairs(recipe, count)
    return _records(recipe, count) if objective_module(recipe.objective).can_answer(recipe) else _texts(recipe, count)


def _records(recipe: Recipe, count: int) -> None:
    from redline.cli.progress import PreparationBar
    from redline.evaluate.preview import preview_records, show_answers
    from redline.jobs.base import objective_module

    with PreparationBar() as bar:
        data = objective_module(recipe.objective).load_data(recipe, progress=bar)
    show_answers(preview_records(data.records, count))
    for line in data.told:
        typer.echo(line)


def _pairs(recipe: Recipe, count: int) -> None:
    """Texts with the answers that are learnt, and what becomes of too long ones."""
    import numpy as np

    from redline.cli.progress import PreparationBar
    from redline.jobs.base import objective_module
    from redline.jobs.latent_prefix.data import cut_bytes

    job = objective_module(recipe.objective)
    with PreparationBar() as bar:
        data = job.load_data(job.complete(recipe, lambda text: typer.echo(text, err=True)), progress=bar)
    rows = data.pairs.train
    for number, row in enumerate(data.pairs.index.sequences(np.arange(min(count, len(rows)))).tolist(), start=1):
        pair = rows.pairs[row]
        kept, size = cut_bytes(pair.text, rows.lengths.bytes), len(pair.text.encode("utf-8", "replace"))
        shown = "" if len(kept) == size else f", of which the first {len(kept):,} are read"
        typer.secho(f"text {number}: {size:,} bytes{shown}", bold=True)
        typer.echo(_visible(kept.decode("utf-8", "replace")).rstrip())
        typer.echo(f"→ {_visible(pair.answers[0])}\n")
    for line in data.told:
        typer.echo(line)


def _answers(recipe: Recipe, count: int) -> None:
    from redline.cli.progress import PreparationBar
    from redline.evaluate.preview import preview_answers, show_answers
    from redline.jobs.base import objective_module

    job = objective_module(recipe.objective)
    with PreparationBar() as bar:
        data = job.load_data(job.complete(recipe, lambda text: typer.echo(text, err=True)), progress=bar)
    show_answers(preview_answers(data.answers, count))
    _report(data.answers.report)


def _report(report: AnswerReport) -> None:
    for part in report.sources:
        share = f" ({part.share:.1%} of the sequences)" if len(report.sources) > 1 else ""
        typer.secho(f"{part.source}{share}", bold=True)
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in part.reasons.items())
        overlong = f"{part.overlong:,} overlong: {part.cut:,} cut, {part.overlong - part.cut:,} dropped"
        lines = {
            "rows": f"{part.rows:,}, {part.bad:,} of them bad" + (f" ({reasons})" if reasons else ""),
            "samples": f"{part.train_samples:,} to train on, {part.val_samples:,} held out; {overlong}"
            + (f"; {part.duplicates:,} duplicates left out" if part.duplicates else ""),
            "tokens": f"{part.tokens:,}, {part.learnt:,} of them learnt ({_share(part.learnt, part.tokens)})",
            "sequences": f"{part.sequences:,}, filled to {part.fill:.1%}",
        }
        for name, line in lines.items():
            typer.echo(f"  {name:10s} {line}")
        for example in part.examples:
            typer.echo(f"  {'bad':10s} {example}")
    typer.echo(f"template     {report.template or 'none: a prompt is a line, and its completion follows'}")


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.1%}"


def _texts(recipe: Recipe, count: int) -> None:
    """The first documents of each source, as `redline prepare --preview` shows them."""
    from redline.cli.progress import PreparationBar
    from redline.data.origin import EMBEDDED, Reading, holds_tokens
    from redline.data.prepare import tokenizer_for
    from redline.data.preview import preview
    from redline.data.sources import source_bytes

    data = recipe.data
    sources = [part.source for part in data.parts]
    for source in sources:
        if source != EMBEDDED and holds_tokens(Path(source).expanduser()):
            fix = "Look at the text that they were made of: redline prepare TEXT --preview N."
            raise UsageError("these are tokens already.", where=source, fix=fix)
        source_bytes(source)  # a slip in a name is answered before a tokenizer is trained
    reading = Reading(data.val_fraction, data.text_key, data.dedup)
    with PreparationBar() as bar:
        tokenizer = tokenizer_for(sources, data.tokenizer, reading, bar)
    for source in sources:
        if len(sources) > 1:
            typer.secho(source, bold=True)
        for number, document in enumerate(preview(source, tokenizer, reading, count), start=1):
            draw(document, number, ids=False)
