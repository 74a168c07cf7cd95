"""One event goes to the log first, then to the eyes, then to the trackers."""

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
    def event(self, event: Event) -> None: ...
    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None: ...
    def close(self) -> None: ...


class Sink(Protocol):
    """A tracker. What it raises costs the run that tracker, and nothing else."""

    def event(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Monitor:
    def __init__(
        self, log: EventLog, view: View, *, price_per_hour: float | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        self.log, self.view = log, view
        self._sinks = list(sinks)
        self.price = price_of(price_per_hour)
        self.paid = (0.0, 0.0)  # hours, and dollars for them, of before a resume: other cards, or another price

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
            except Exception as error:  # a full disk, a missing package, a service that is down: training goes on
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        """Said once, without the error's own words (a service may repeat a key in them); the log has everything."""
        self._sinks.remove(sink)
        with suppress(Exception):
            sink.close()
        reason = {OSError: getattr(error, "strerror", None), ImportError: f"no module {getattr(error, 'name', None)}"}
        detail = next((text for kind, text in reason.items() if isinstance(error, kind) and text), "")
        name = f"{type(error).__name__}{': ' if detail else ''}{detail}"
        self.warn(f"{type(sink).__name__} is off from here ({name}); training goes on, and events.jsonl has everything")

    def warn(self, message: str) -> None:
        self.emit("warning", message=message)

    def say(self, message: str) -> None:
        """What is going on now: for the eyes only."""
        self.view.event({"type": "warmup", "message": message})

    def tick(self, step: int, progress: float, eta_s: float | None) -> None:
        self.view.tick(step, progress, eta_s)

    def cost(self, hours: float) -> float | None:
        """Dollars, when a price is known."""
        then, dollars = self.paid
        return None if self.price is None else dollars + self.price * (hours - then)


def paid_until(events: Sequence[Event], hours: float) -> tuple[float, float]:
    """The last of these hours whose price a log knows, and the dollars until then."""
    known = [(number(event, "hours"), number(event, "cost_usd")) for event in events]
    return max(
        ((at, cost) for at, cost in known if at is not None and cost is not None and at <= hours), default=(0, 0)
    )


def price_notes(given: float | None) -> list[str]:
    """That $REDLINE_PRICE is no price, where it is what counts."""
    value = os.environ.get("REDLINE_PRICE", "")
    wrong = price_problem(value) if value and given is None else ""
    return [f"REDLINE_PRICE={value!r} is {wrong}, so no cost is shown; write dollars per hour"] if wrong else []


def price_of(given: float | None) -> float | None:
    """Dollars an hour for one card: as given, else by $REDLINE_PRICE; what is no price, nothing among it, is None."""
    if given is not None:
        return given
    try:
        price = float(os.environ["REDLINE_PRICE"])
    except (KeyError, ValueError):
        return None
    return price if 0 < price < math.inf else None
