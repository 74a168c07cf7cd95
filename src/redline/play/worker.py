"""One thread that generates, one request after the other, and a queue of those that wait.

Two requests at a time would halve each other's speed. Each thread that computes also has a pool of OpenMP threads of
its own, so all requests are computed by the same one.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from redline.errors import UserError, redact
from redline.jobs.streaming import Event

MOST_WAITING = 16  # requests; further ones are refused
_BUFFERED = 256  # events of a reader that is slower than the model; then the model waits for it
_LOOK_S = 0.5  # between looks at whether a request was cancelled, while its reader is slow
HEARTBEAT_S = 1.0  # between messages to a reader for whom there is no event: writing shows whether it is still there


@dataclass(frozen=True)
class Waiting:
    """The request is in the queue behind `ahead` others; 0: it is being computed."""

    ahead: int


@dataclass(frozen=True)
class Failed:
    message: str


Message = Event | Waiting | Failed


class QueueFullError(Exception):
    """So many requests wait already that another one is refused."""


class Ticket:
    """A request: read its messages until they end, or cancel it."""

    def __init__(self, work: Callable[[], Iterator[Event]], worker: Worker) -> None:
        self.work, self._worker = work, worker
        self._messages: queue.Queue[Message | None] = queue.Queue(_BUFFERED)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop computing after the current token. A cancelled request that waits is never begun."""
        self._cancelled.set()
        self._worker.forget(self)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, message: Message | None) -> None:
        while not self.cancelled:
            with suppress(queue.Full):
                self._messages.put(message, timeout=_LOOK_S)
                return

    def messages(self) -> Iterator[Message]:
        """Yield what happens; `Waiting` at once, whenever the place in the queue changes, and at least every second."""
        yield Waiting(self._worker.ahead_of(self))
        while not self.cancelled:
            try:
                message = self._messages.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                yield Waiting(self._worker.ahead_of(self))
                continue
            if message is None:
                return
            yield message


class Worker:
    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()
        self._current: Ticket | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="generate", daemon=True).start()

    def submit(self, work: Callable[[], Iterator[Event]]) -> Ticket:
        """Put a request at the end of the queue. `work` is called, and its events are computed, in the worker."""
        ticket = Ticket(work, self)
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                raise QueueFullError
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def ahead_of(self, ticket: Ticket) -> int:
        with self._changed:
            if ticket not in self._waiting:
                return 0
            return self._waiting.index(ticket) + (self._current is not None)

    def forget(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.wait_for(lambda: self._waiting)
                ticket = self._current = self._waiting.popleft()
            try:
                self._compute(ticket)
            except UserError as error:
                ticket.put(Failed(redact(error.message())))
            except Exception as error:  # a bug ends this request, not the server
                sys.stderr.write(redact(traceback.format_exc()))
                ticket.put(Failed(f"Generating failed ({type(error).__name__}); the terminal shows where."))
            ticket.put(None)

    def _compute(self, ticket: Ticket) -> None:
        events = ticket.work()
        try:
            for event in events:
                if ticket.cancelled:
                    return
                ticket.put(event)
        finally:
            if close := getattr(events, "close", None):
                close()  # so that a cancelled generator frees its cache now
