"""How far a preparation is: a bar on a terminal, and one last line where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from redline.units import format_count, format_seconds

if TYPE_CHECKING:
    from redline.data.read_stats import Progress

_REDRAW_S = 0.1


class PreparationBar:
    """Give it to `load_data` as `progress`. Nothing is shown of what was prepared before."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.seconds = 0.0  # of the last stage
        self._last: Progress | None = None
        self._drawn = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> PreparationBar:
        return self

    def __call__(self, progress: Progress) -> None:
        if self._last is None or progress.stage != self._last.stage:
            self._begun, self._drawn = time.monotonic(), 0.0
        self._last = progress
        if sys.stderr.isatty() and time.monotonic() - self._drawn >= _REDRAW_S:
            self._drawn = time.monotonic()
            self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            counted = TextColumn("{task.fields[tokens]} tokens")
            self._bar = Bar(
                TextColumn("{task.description}"), *columns, counted, console=Console(stderr=True), transient=True
            )
            self._bar.start()
        if self._task is None or self._bar.tasks[-1].description != progress.stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(progress.stage, total=progress.total, tokens="0")
        self._bar.update(self._task, completed=progress.done, tokens=format_count(progress.tokens))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._begun
        if self._bar is not None:
            self._bar.stop()
        if error is None and self._last is not None and self._last.tokens:
            typer.echo(self._summary(self._last), err=True)

    def _summary(self, last: Progress) -> str:
        rate = last.done / 1e6 / max(self.seconds, 1e-9)
        speed = f", reading {rate:.1f} MB/s" if last.total else ""
        return f"{last.stage}: {format_count(last.tokens)} tokens in {format_seconds(self.seconds)}{speed}"
