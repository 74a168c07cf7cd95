"""Progress bars on stderr: drawn on a terminal, and replaced by one last line everywhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from redline.units import format_count, format_seconds

if TYPE_CHECKING:
    from redline.data.sources import Progress

_REDRAW_S = 0.1


class PreparationBar:
    """The progress of preparing data: pass it as `progress` to `load_data`. Cached data show nothing."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seconds = 0.0  # duration of the last stage
        self._last: Progress | None = None
        self._drawn = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> PreparationBar:
        return self

    def __call__(self, progress: Progress) -> None:
        if self._last is None or progress.stage != self._last.stage:
            self._started, self._drawn = time.monotonic(), 0.0
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
            tokens = TextColumn("{task.fields[tokens]} tokens")
            self._bar = Bar(
                TextColumn("{task.description}"), *columns, tokens, console=Console(stderr=True), transient=True
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
        self.seconds = time.monotonic() - self._started
        if self._bar is not None:
            self._bar.stop()
        if error is None and self._last is not None and self._last.tokens:
            typer.echo(self._summary(self._last), err=True)

    def _summary(self, last: Progress) -> str:
        rate = last.done / 1e6 / max(self.seconds, 1e-9)
        speed = f", reading {rate:.1f} MB/s" if last.total else ""
        return f"{last.stage}: {format_count(last.tokens)} tokens in {format_seconds(self.seconds)}{speed}"


class GenerationBar:
    """The progress of generating answers or texts: call it with the number that is done and the total."""

    def __init__(self, what: str = "questions") -> None:
        self.what, self._started, self._done = what, time.monotonic(), 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> GenerationBar:
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
            self._task = self._bar.add_task("generating", total=total)
        self._bar.update(self._task, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None and self._done:
            seconds = format_seconds(time.monotonic() - self._started)
            verb = "answered" if self.what == "questions" else "generated"
            typer.echo(f"{verb} {self._done:,} {self.what} in {seconds}", err=True)
