"""One event goes to the log first, then to the eyes."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Protocol

from redline.monitor.events import Event, EventLog


class View(Protocol):
    def event(self, event: Event) -> None: ...
    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None: ...
    def close(self) -> None: ...


class Monitor:
    def __init__(self, log: EventLog, view: View, *, price_per_hour: float | None = None) -> None:
        self.log, self.view = log, view
        self.price = price_per_hour if price_per_hour is not None else _price_from_environment()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.view.close()
        self.log.close()

    def emit(self, type: str, **fields: Any) -> None:
        self.view.event(self.log.emit(type, **fields))

    def warn(self, message: str) -> None:
        self.emit("warning", message=message)

    def say(self, message: str) -> None:
        """What is going on now: for the eyes only."""
        self.view.event({"type": "warmup", "message": message})

    def tick(self, step: int, progress: float, eta_s: float | None) -> None:
        self.view.tick(step, progress, eta_s)

    def cost(self, hours: float) -> float | None:
        """Dollars, when a price is known."""
        return None if self.price is None else self.price * hours


def _price_from_environment() -> float | None:
    try:
        return float(os.environ["REDLINE_PRICE"])
    except (KeyError, ValueError):
        return None
