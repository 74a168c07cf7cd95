"""Documents drawn with the borders of their tokens: by colour on a terminal, by bars elsewhere."""

from __future__ import annotations

import sys

import typer

from redline.data.preview import Preview, Span

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
    typer.secho(f"document {number}: {document.tokens:,} tokens{shown}", bold=True)
    Console(highlight=False, soft_wrap=not colour).print(text)
    if ids:
        typer.echo("  ".join(_labelled(span) for span in document.spans[:_IDS_SHOWN]))
    typer.echo()


def _visible(text: str) -> str:
    """A newline is shown, and still breaks the line; what would move the cursor does not."""
    return "".join("↵\n" if c == "\n" else "→" if c == "\t" else c if c.isprintable() else "·" for c in text)


def _labelled(span: Span) -> str:
    return f"{'+'.join(str(i) for i in span.ids)}={span.text!r}"
