"""Requests to stop: signals, which the training loop answers between steps, and the deadline of a scheduled job."""

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
from redline.vocabulary import StopReason

_SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides the cursor, and `os._exit` runs no cleanup that shows it again


def preemption_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that preempt a run: from a scheduler, or (except under `nohup`) from a closed terminal."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGUSR1, *hangup)


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """Raised by a signal during long work that can be abandoned (compiling, preparing data)."""


class Signals:
    """Handles signals while a run trains.

    SIGTERM, SIGUSR1 and SIGHUP mean "preempted". The first Ctrl-C means "interrupted"; the second exits at once.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
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
            if self.reason is StopReason.INTERRUPTED:
                _write_stderr(f"{_SHOW_CURSOR if os.isatty(2) else ''}exiting at once; saved checkpoints stay valid")
                os._exit(EXIT_INTERRUPTED)
            _write_stderr("finishing this step, saving and writing the report; press Ctrl-C again to exit at once")
        self.reason = StopReason.INTERRUPTED if number == signal.SIGINT else self.reason or StopReason.PREEMPTED
        if self._abandon:
            self._abandon = False  # raise only once: a second signal must not interrupt the cleanup after the first
            raise StopRequested

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Return a context in which a signal raises StopRequested at once."""
        self._abandon = True
        try:
            if self.reason:
                raise StopRequested
            yield
        finally:
            self._abandon = False


def _write_stderr(text: str) -> None:
    """Write directly to the file descriptor.

    The signal may have arrived during a write to sys.stderr, and a second write in its handler would raise.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


# ----------------------------------------------------------------------------------------------------
# The deadline: when the scheduler ends the job, in unix seconds. The script of `redline launch` sets it.
#
# Unlike `train.hours` it does not end the schedule: the run continues in the next job.


DEADLINE = "REDLINE_DEADLINE"


class Deadline:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.end = _parse_deadline(os.environ.get(DEADLINE, ""))

    def within(self, seconds: float) -> bool:
        """Return whether the deadline is less than `seconds` away."""
        return self.clock() + seconds >= self.end


def _parse_deadline(text: str) -> float:
    if not text:
        return math.inf
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if math.isnan(end):
        fix = "Unset it, or set it to unix seconds, for example $(($(date +%s) + 3600))."
        raise UserError(f"{text!r} is not a time in unix seconds.", where=DEADLINE, fix=fix)
    return end
