"""The terminal's side of the console: lines that scroll above one live area, drawn with rich.

Everything is a `Text`, never markup, so that brackets in a model's sample stay brackets.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

ACCENT = "#e5484d"


class Screen:
    """The live area holds a spinner while waiting and the bar while training; a thread of rich's redraws it."""

    def __init__(self, file: TextIO) -> None:
        self._rich = _PatientConsole(file=file, force_terminal=True, markup=False, highlight=False, emoji=False)
        self._waiting: Spinner | None = None
        self._bar: tuple[float | None, str, str] | None = None
        self.facts: list[str] = []
        self._live = Live(console=self._rich, get_renderable=self._draw, refresh_per_second=8, transient=True)

    def move(self, progress: float | None, step: str, eta: str) -> None:
        self._waiting, self._bar = None, (progress, step, eta)
        self._begin()

    def wait(self, message: str) -> None:
        self._waiting, self.facts = Spinner("dots", Text(message, style="dim"), style=ACCENT), []
        self._begin()

    def settle(self) -> None:
        """Clear the live area and give the cursor back."""
        self._waiting = self._bar = None
        self._live.stop()

    def line(self, text: str, style: str = "") -> None:
        self._rich.print(Text(text, style=style), soft_wrap=True)

    def plan(self, rows: list[tuple[str, str]], choices: list[tuple[str, str, str]]) -> None:
        self._rich.print(_labelled(rows))
        if not choices:
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for title in ("chosen", "value", "because"):
            table.add_column(title)
        for key, value, reason in choices:
            table.add_row(Text(key), Text(value, style="bold"), Text(reason, style="dim"))
        self._rich.print(table)

    def sample(self, title: str, prompt: str, text: str) -> None:
        body = Text.assemble((prompt, "bold"), text)
        self._rich.print(Panel(body, title=Text(title), title_align="left", border_style="dim"))

    def finish(self, rows: list[tuple[str, str]]) -> None:
        self.settle()
        self._rich.print(Panel(_labelled(rows), border_style=ACCENT, expand=False))

    def _begin(self) -> None:
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


class _PatientConsole(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process; a terminal that went away must not end a training run."""
        self.quiet = True


def _labelled(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        table.add_row(Text(label, style=f"bold {ACCENT}"), Text(text))
    return table
