"""Limits on the processor time of code that comes with other people's files: chat templates and tokenizer patterns.

A chat template runs as Python code. `processor_seconds` interrupts one rendering by a signal, and `Budget` limits the
time of all renderings of a source. A tokenizer's regular expressions run in native code, which no signal interrupts;
`within_seconds` stops waiting for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class TookTooLongError(Exception):
    """The code was still running when its time was used up."""


@contextmanager
def processor_seconds(limit: float) -> Iterator[None]:
    """Raise TookTooLongError in the block once the process has used `limit` seconds of processor time in it.

    Python runs signal handlers in the main thread only; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit, 1.0)  # repeated, in case a template catches the first error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before if before is not None else signal.SIG_DFL)


class Budget:
    """Processor time for many calls together. It grows with the work done, so that large inputs are not refused."""

    def __init__(self, seconds: float, per_call: float, per_character: float) -> None:
        self.allowed, self._per_call, self._per_character = seconds, per_call, per_character
        self.spent, self.calls = 0.0, 0

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the block's processor time to the budget, whether or not it fails."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self.spent += time.thread_time() - begun
            self.calls += 1
            self.allowed += self._per_call

    def allow_characters(self, characters: int) -> None:
        """Add the allowance for so many characters of output."""
        self.allowed += self._per_character * characters

    @property
    def is_over(self) -> bool:
        return self.spent > self.allowed


def within_seconds(call: Callable[[], T], limit: float) -> T:
    """Return what `call` returns, or raise TookTooLongError after `limit` seconds.

    For native code that releases the interpreter's lock. It runs in a thread of its own, which cannot be stopped and
    keeps running after the limit. Both the wall clock and the processor time of this process must have passed the
    limit: on a busy machine the wall clock runs ahead of the work, and with other busy threads the processor time does.
    """
    returned: list[T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # raised again below, in the calling thread
            failed.append(error)
        finally:
            done.set()

    wall, processor = time.monotonic(), time.process_time()
    threading.Thread(target=work, name="redline-limited", daemon=True).start()
    while not done.wait(max(0.01, limit - min(time.monotonic() - wall, time.process_time() - processor))):
        if min(time.monotonic() - wall, time.process_time() - processor) >= limit:
            raise TookTooLongError
    if failed:
        raise failed[0]
    return returned[0]
