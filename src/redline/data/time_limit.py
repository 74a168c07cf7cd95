"""A limit on the processor time of what a stranger wrote and we compute: a chat template may loop for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
