"""What the console draws on a terminal, with rich: lines that scroll above one live area.

A module of its own because rich takes a tenth of a second to import and only a terminal needs it. All text is a rich
`Text` and never markup, so that brackets in a sample of a model stay brackets.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

ACCENT = "#e5484d"


class Screen:
    """A live area with a spinner during warm-up and a bar during training. A thread of rich redraws it."""

    def __init__(self, file: TextIO) -> None:
        self._rich = _Console(file=file, force_terminal=True, markup=False, highlight=False, emoji=False)
        self._waiting: Spinner | None = None
        self._bar: tuple[float | None, str, str] | None = None
        self.facts: list[str] = []
        self._live = Live(console=self._rich, get_renderable=self._draw, refresh_per_second=8, transient=True)

    def move(self, progress: float | None, step: str, eta: str) -> None:
        self._waiting, self._bar = None, (progress, step, eta)
        self._show()

    def wait(self, message: str) -> None:
        self._waiting, self.facts = Spinner("dots", Text(message, style="dim"), style=ACCENT), []
        self._show()

    def close(self) -> None:
        """Clear the live area and show the cursor again."""
        self._waiting = self._bar = None
        self._live.stop()

    def line(self, text: str, style: str = "") -> None:
        self._rich.print(Text(text, style=style), soft_wrap=True)

    def plan(self, rows: list[tuple[str, str]], choices: list[tuple[str, str, str]]) -> None:
        self._rich.print(_labelled(rows))
        if not choices:
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for title in ("choice", "value", "reason"):
            table.add_column(title)
        for key, value, reason in choices:
            table.add_row(Text(key), Text(value, style="bold"), Text(reason, style="dim"))
        self._rich.print(table)

    def sample(self, title: str, prompt: str, text: str) -> None:
        body = Text.assemble((prompt, "bold"), text)
        self._rich.print(Panel(body, title=Text(title), title_align="left", border_style="dim"))

    def finish(self, lines: list[str]) -> None:
        self.close()
        first, *rest = lines
        body = Text("\n").join([Text(first, style=f"bold {ACCENT}"), *map(Text, rest)])
        self._rich.print(Panel(body, border_style=ACCENT, expand=False))

    def _show(self) -> None:
        if not self._live.is_started:
            self._live.start()

    def _draw(self) -> RenderableType:
        if self._waiting is not None:
            return self._waiting
        if self._bar is None:
            return Text()
        progress, step, eta = self._bar
        done = min(max(progress or 0.0, 0.0), 1.0)
        percent = "" if progress is None else f"{done:.0%}"
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(step, style="bold"),
            ProgressBar(
                total=1.0, completed=done, pulse=progress is None, complete_style=ACCENT, finished_style=ACCENT
            ),
            Text("  ".join(filter(None, [percent, eta]))),
        )
        return Group(row, Text(" · ".join(self.facts), style="dim", no_wrap=True, overflow="ellipsis"))


class _Console(RichConsole):
    def on_broken_pipe(self) -> None:
        """Stop printing. rich would end the process, but a closed terminal must not end a training run."""
        self.quiet = True


def _labelled(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(Text(label, style=f"bold {ACCENT}"), Text(text))
    return table
