"""Signals ask; the loop answers between steps."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from redline.errors import EXIT_INTERRUPTED, UserError

_SHOW_CURSOR = "\x1b[?25h"  # the live bar hides it, and nobody tidies up after `os._exit`


def preemption_signals() -> tuple[signal.Signals, ...]:
    """Who asks for room: a scheduler; and a terminal that closes, unless `nohup` has said that it may."""
    closed = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGUSR1, *closed)


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """Raised out of long work that can be abandoned (compiling, preparing)."""


class Signals:
    """SIGTERM, SIGUSR1 and SIGHUP mean "preempted"; the first Ctrl-C means "interrupted", the second leaves at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._abandon = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (*preemption_signals(), signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.reason == "interrupted":
                _tell(f"{_SHOW_CURSOR if os.isatty(2) else ''}left at once; what was saved before stays valid")
                os._exit(EXIT_INTERRUPTED)
            _tell("finishing this step, saving and reporting; Ctrl-C again leaves at once")
        self.reason = "interrupted" if number == signal.SIGINT else self.reason or "preempted"
        if self._abandon:
            self._abandon = False  # once: a second signal must not interrupt the tidying up after the first
            raise StopRequested

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """A signal in here interrupts the work instead of waiting for its end."""
        self._abandon = True
        try:
            if self.reason:
                raise StopRequested
            yield
        finally:
            self._abandon = False


def _tell(text: str) -> None:
    """Straight to the descriptor: within a write to sys.stderr, where the signal may have come, another one raises."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


# ----------------------------------------------------------------------------------------------------
# When the scheduler ends the job: REDLINE_DEADLINE, in unix seconds, as the script of `redline launch` sets it.
#
# Not a goal of the run, as `train.hours` is: the schedule does not see it, and the run goes on in the next job.


DEADLINE = "REDLINE_DEADLINE"


class Deadline:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.end = _end(os.environ.get(DEADLINE, ""))

    def within(self, seconds: float) -> bool:
        """Whether it comes before `seconds` are over."""
        return self.clock() + seconds >= self.end


def _end(text: str) -> float:
    if not text:
        return math.inf
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if math.isnan(end):
        fix = "Leave it unset, or set it to unix seconds, such as $(($(date +%s) + 3600))."
        raise UserError(f"{text!r} is not a time.", where=DEADLINE, fix=fix)
    return end
