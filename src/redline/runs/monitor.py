"""The monitor of a training run: each event goes to the log first, then to the console, then to the trackers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from redline.runs.events import Event, EventLog, number
from redline.units import price_problem


class View(Protocol):
    """What shows events to people: the console, or nothing on ranks other than rank 0."""

    def event(self, event: Event) -> None: ...
    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None: ...
    def close(self) -> None: ...


class Sink(Protocol):
    """A tracker. If it raises an error, the run continues without it."""

    def event(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Monitor:
    def __init__(
        self, log: EventLog, view: View, *, price_per_hour: float | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        self.log, self.view = log, view
        self._sinks = list(sinks)
        self.price = price_of(price_per_hour)
        # Hours and dollars before a resume. They were paid for other cards or at another price, maybe, so the price
        # of today counts only from there on.
        self.paid = (0.0, 0.0)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in list(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
        self.view.close()
        self.log.close()

    def emit(self, type: str, **fields: Any) -> None:
        event = self.log.emit(type, **fields)
        self.view.event(event)
        for sink in list(self._sinks):
            try:
                sink.event(event)
            except Exception as error:  # a full disk, a missing package, a service that is down
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        """Remove a tracker that failed, with one warning. The text of the error is left out: a service may repeat an
        API key in it."""
        self._sinks.remove(sink)
        with suppress(Exception):
            sink.close()
        reason = {OSError: getattr(error, "strerror", None), ImportError: f"no module {getattr(error, 'name', None)}"}
        detail = next((text for kind, text in reason.items() if isinstance(error, kind) and text), "")
        name = f"{type(error).__name__}{': ' if detail else ''}{detail}"
        self.warn(
            f"{type(sink).__name__} is switched off: it failed ({name}). Training continues; events.jsonl is complete"
        )

    def warn(self, message: str) -> None:
        self.emit("warning", message=message)

    def status(self, message: str) -> None:
        """Show what the run is doing now on the console; the log does not record it."""
        self.view.event({"type": "warmup", "message": message})

    def tick(self, step: int, progress: float, eta_s: float | None) -> None:
        self.view.tick(step, progress, eta_s)

    def cost(self, hours: float) -> float | None:
        """Return the dollars spent until now; None without a price."""
        paid_hours, paid_dollars = self.paid
        return None if self.price is None else paid_dollars + self.price * (hours - paid_hours)


def paid_until(events: Sequence[Event], hours: float) -> tuple[float, float]:
    """Return the last time before `hours` at which the log states a cost, and that cost."""
    known = [(number(event, "hours"), number(event, "cost_usd")) for event in events]
    return max(
        ((at, cost) for at, cost in known if at is not None and cost is not None and at <= hours), default=(0, 0)
    )


def price_notes(configured: float | None) -> list[str]:
    """Return a note if $REDLINE_PRICE is used and is no price."""
    value = os.environ.get("REDLINE_PRICE", "")
    problem = price_problem(value) if value and configured is None else ""
    return [f"REDLINE_PRICE={value!r} is {problem}, so no cost is shown; set dollars per hour"] if problem else []


def price_of(configured: float | None) -> float | None:
    """Return the dollars per hour of one card: the configured price, else $REDLINE_PRICE.

    Return None for anything that is not a price, including the empty string.
    """
    if configured is not None:
        return configured
    try:
        price = float(os.environ["REDLINE_PRICE"])
    except (KeyError, ValueError):
        return None
    return price if 0 < price < math.inf else None
