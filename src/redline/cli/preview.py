"""A look at what a model will learn from: texts with the borders of their tokens, by colour on a terminal and by bars
elsewhere; or questions with the answers that are learnt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from redline.data.prepare import Preview, Span
from redline.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from redline.jobs.preview import SampleView, TokenRun
    from redline.recipe.schema import Recipe

_SHADES = ("black on bright_cyan", "black on bright_yellow")
_MARK = "bold white on red"
_IDS_SHOWN = 40
_LEARNT, _READ, _SPECIAL, _SPECIAL_LEARNT = "bold green", "dim", "magenta", "bold black on green"


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
    """`redline train … --preview N`: show what would be learnt, and train nothing."""
    from redline.cli.progress import PreparationBar
    from redline.jobs.objective import job_runtime

    with PreparationBar() as bar:
        preview = job_runtime(recipe.objective).preview(recipe, count, bar, lambda text: typer.echo(text, err=True))
    if preview is None:
        _texts(recipe, count)
        return
    show_samples(preview.samples)
    for line in preview.lines:
        typer.echo(line)


def show_samples(samples: Sequence[SampleView], console: Console | None = None) -> None:
    """Print samples: with what is learnt in colour on a terminal, and in [[ ]] elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    for sample in samples:
        if not console.is_terminal:
            text = f"--- {sample.title}\n{_printable(sample.plain())}\n"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            continue
        console.rule(sample.title, align="left")
        styled = Text()
        for run in sample.runs:
            styled.append(_printable(run.text), style=_style(run))
        console.print(styled)


def _style(run: TokenRun) -> str:
    if run.special:
        return _SPECIAL_LEARNT if run.learnt else _SPECIAL
    return _LEARNT if run.learnt else _READ


def _printable(text: str) -> str:
    """Replace what would move the cursor or set colours by a dot."""
    return "".join(c if c.isprintable() or c == "\n" else "→" if c == "\t" else "·" for c in text)


def _texts(recipe: Recipe, count: int) -> None:
    """The first documents of each source, as `redline prepare --preview` shows them."""
    from redline.cli.progress import PreparationBar
    from redline.data.prepare import preview, tokenizer_for
    from redline.data.sources import Reading, holds_tokens, source_bytes
    from redline.data.text import EMBEDDED

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
