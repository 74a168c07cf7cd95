"""Limits on the processor time of code that comes with other people's files: chat templates and tokenizer patterns.

A template is Python code, which a signal interrupts (`processor_seconds`), and has a budget for a whole source
(`Budget`). A tokenizer's regular expressions run in native code, which no signal interrupts: the caller stops waiting
for it (`within_seconds`).
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
    """The block was still computing when its time was over."""


@contextmanager
def processor_seconds(most: float) -> Iterator[None]:
    """Ends the block by TookTooLongError once the process has computed for so long in it.

    Python runs signal handlers in the main thread alone: in others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, most, 1.0)  # again and again, in case something swallows the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before if before is not None else signal.SIG_DFL)


class Budget:
    """Processor time that many calls share. The allowance grows with the work, so large inputs are not refused."""

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

    def wrote(self, characters: int) -> None:
        self.allowed += self._per_character * characters

    @property
    def is_over(self) -> bool:
        return self.spent > self.allowed


def within_seconds(call: Callable[[], T], most: float) -> T:
    """Return what `call` returns, or raise TookTooLongError when it has computed for `most` seconds.

    For native code that releases the interpreter's lock: it runs in a thread of its own, which cannot be ended and is
    left behind when the time is over. Both clocks must have passed the limit: on a busy machine the wall clock runs
    ahead of the work, and beside other threads of this process its processor time does.
    """
    returned: list[T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # raised again below, in the thread that asked
            failed.append(error)
        finally:
            done.set()

    wall, processor = time.monotonic(), time.process_time()
    threading.Thread(target=work, name="redline-limited", daemon=True).start()
    while not done.wait(max(0.01, most - min(time.monotonic() - wall, time.process_time() - processor))):
        if min(time.monotonic() - wall, time.process_time() - processor) >= most:
            raise TookTooLongError
    if failed:
        raise failed[0]
    return returned[0]
