"""Show training samples: `redline train --preview` and `redline prepare --preview`.

Texts are shown with the boundaries of their tokens, in colour on a terminal and with bars elsewhere. Samples of jobs
that learn from rows are shown with the tokens that have a loss marked.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from redline.data.prepare import Preview, Span

if TYPE_CHECKING:
    from rich.console import Console

    from redline.jobs.preview import SampleView, TokenRun
    from redline.recipe.schema import Recipe

_SHADES = ("black on bright_cyan", "black on bright_yellow")
_MARK = "bold white on red"
_IDS_SHOWN = 40
# Styles of tokens with a loss, without one, and of special tokens.
_IN_LOSS, _READ, _SPECIAL, _SPECIAL_IN_LOSS = "bold green", "dim", "magenta", "bold black on green"


def show_document(document: Preview, number: int, *, ids: bool) -> None:
    """Print the beginning of a document, token by token; `ids` adds the ids of the first tokens."""
    from rich.console import Console
    from rich.text import Text

    colour = sys.stdout.isatty()
    text = Text()
    for place, span in enumerate(document.spans):
        style = _MARK if place == 0 else _SHADES[place % 2]
        text.append(_visible(span.text), style=style if colour else "")
        if not colour:
            text.append("│")
    shown = "" if document.complete else f", the first {len(document.ids):,} shown"
    at_least = "more than " if document.more else ""
    typer.secho(f"document {number}: {at_least}{document.tokens:,} tokens{shown}", bold=True)
    Console(highlight=False, soft_wrap=not colour).print(text)
    if ids:
        typer.echo("  ".join(_labelled(span) for span in document.spans[:_IDS_SHOWN]))
    typer.echo()


def _visible(text: str) -> str:
    """Show newlines and tabs as symbols, and replace other characters that would move the cursor."""
    return "".join("↵\n" if c == "\n" else "→" if c == "\t" else c if c.isprintable() else "·" for c in text)


def _labelled(span: Span) -> str:
    return f"{'+'.join(str(i) for i in span.ids)}={span.text!r}"


def preview_recipe(recipe: Recipe, count: int) -> None:
    """Show the first `count` training samples of a recipe."""
    from redline.cli.progress import PreparationBar
    from redline.jobs.objective import job_runtime

    with PreparationBar() as bar:
        preview = job_runtime(recipe.objective).preview(recipe, count, bar, lambda text: typer.echo(text, err=True))
    if preview is None:
        _preview_texts(recipe, count)
        return
    show_samples(preview.samples)
    for line in preview.lines:
        typer.echo(line)


def show_samples(samples: Sequence[SampleView], console: Console | None = None) -> None:
    """Print samples. Tokens with a loss are coloured on a terminal, and in [[ ]] elsewhere."""
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
        return _SPECIAL_IN_LOSS if run.in_loss else _SPECIAL
    return _IN_LOSS if run.in_loss else _READ


def _printable(text: str) -> str:
    """Replace characters that would move the cursor or set colours."""
    return "".join(c if c.isprintable() or c == "\n" else "→" if c == "\t" else "·" for c in text)


def _preview_texts(recipe: Recipe, count: int) -> None:
    """Show the first documents of each source, as `redline prepare --preview` does."""
    from redline.cli.progress import PreparationBar
    from redline.data.prepare import preview_data

    with PreparationBar() as bar:
        documents = list(preview_data(recipe.data, count, bar))
    numbers = Counter[str]()
    for source, document in documents:
        if not numbers[source] and len(recipe.data.parts) > 1:
            typer.secho(source, bold=True)
        numbers[source] += 1
        show_document(document, numbers[source], ids=False)
