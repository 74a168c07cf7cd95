"""The live chart of a run in a notebook: loss over steps as SVG, and the newest figures, updated in place."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from redline.runs.console import plan_rows, step_facts
from redline.runs.events import Event, clean, number, one_line
from redline.runs.summary import ending, totals
from redline.units import format_seconds
from redline.vocabulary import status_of_stop

_EVERY_S = 0.5  # a browser redraws the chart no more often
_MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 220, 46, 22
_TRAIN, _VALIDATION = "#4878a8", "#c77f2b"

# Shows HTML in the place of what it showed before.
Display = Callable[[str], None]


def notebook_display() -> Display | None:
    """Return what shows HTML in the current cell of a notebook; None outside of one."""
    if "IPython" not in sys.modules:
        return None
    import IPython

    shell = IPython.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import HTML, display

    handle: Any = None

    def show(page: str) -> None:
        nonlocal handle
        if handle is None:
            handle = display(HTML(page), display_id=True)
        else:
            handle.update(HTML(page))

    return show


class LiveChart:
    """A view of a run for a notebook. It never raises: the log has every event."""

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._shown_at = -math.inf
        self._title, self._status, self._facts = "redline", "starting", ""
        self._plan: list[tuple[str, str]] = []
        self._messages: list[str] = []
        self._train: list[tuple[float, float]] = []
        self._validation: list[tuple[float, float]] = []

    @classmethod
    def drawn(cls, events: Iterable[Event]) -> str:
        """Return the chart of a run that is read from its log."""
        page = ""

        def keep(text: str) -> None:
            nonlocal page
            page = text

        chart = cls(keep)
        for event in events:
            chart._add(event)
        chart._show()
        return page

    def event(self, event: Event) -> None:
        try:
            self._add(event)
            due = event.get("type") in ("plan", "eval", "stop", "warning")
            if due or self._clock() - self._shown_at >= _EVERY_S:
                self._show()
        except Exception as error:  # a closed kernel or an event of another version must not stop training
            self._messages = [f"the chart could not be drawn ({type(error).__name__})"]

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        left = "" if eta_s is None or not math.isfinite(eta_s) else f" · {format_seconds(eta_s)} left"
        share = "" if progress is None or not math.isfinite(progress) else f" · {progress:.0%}"
        self._status = f"step {step:,}{share}{left}"
        if self._clock() - self._shown_at >= _EVERY_S:
            try:
                self._show()
            except Exception:
                self._shown_at = self._clock()

    def close(self) -> None:
        return

    def _add(self, event: Event) -> None:
        kind = event.get("type")
        step, loss = number(event, "step"), number(event, "loss")
        if kind == "start":
            self._title = " · ".join(
                filter(None, (one_line(event.get(key)) for key in ("run_dir", "recipe", "device")))
            )
            if (resumed := number(event, "resumed_from")) is not None:
                self._train = [point for point in self._train if point[0] <= resumed]
                self._validation = [point for point in self._validation if point[0] <= resumed]
        elif kind == "plan":
            self._plan = list(plan_rows(event))
        elif kind == "warmup":
            self._status = one_line(event.get("message"))
        elif kind == "step" and step is not None:
            self._facts = " · ".join(step_facts(event))
            if loss is not None:
                self._train.append((step, loss))
        elif kind == "eval" and step is not None and loss is not None:
            self._validation.append((step, loss))
        elif kind in ("warning", "recovery"):
            self._messages.append(one_line(event.get("message")))
        elif kind == "stop":
            self._status = " · ".join(filter(None, (ending(status_of_stop(event), event), totals(event))))

    def _show(self) -> None:
        self._shown_at = self._clock()
        validation = f" · validation loss {self._validation[-1][1]:.4f}" if self._validation else ""
        rows = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in self._plan)
        plan = f"<details><summary>plan</summary><table>{rows}</table></details>" if rows else ""
        messages = "".join(f"<div>⚠ {html.escape(clean(text))}</div>" for text in self._messages[-3:])
        self._display(
            f'<div style="font:13px sans-serif"><div><b>{html.escape(self._title)}</b></div>'
            f"<div>{html.escape(self._status)}{validation}</div>{self._svg()}"
            f"<div>{html.escape(self._facts)}</div>{messages}{plan}</div>"
        )

    def _svg(self) -> str:
        points = [*self._train, *self._validation]
        if len(points) < 2:
            return ""
        right = max(step for step, _ in points) or 1.0
        low, high = _range([loss for _, loss in points])

        def place(point: tuple[float, float]) -> str:
            x = _LEFT + point[0] / right * (_WIDTH - _LEFT - 8)
            y = 8 + (high - min(point[1], high)) / (high - low) * (_HEIGHT - _BOTTOM - 8)
            return f"{x:.1f},{y:.1f}"

        def line(curve: list[tuple[float, float]], colour: str) -> str:
            every = max(1, len(curve) // _MOST_POINTS)
            drawn = [*curve[::every], *curve[-1:]]
            return (
                f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(map(place, drawn))}"/>'
            )

        marks = "".join(
            f'<text x="{_LEFT - 6}" y="{8 + share * (_HEIGHT - _BOTTOM - 8) + 4:.0f}" text-anchor="end">'
            f"{high - share * (high - low):.2f}</text>"
            for share in (0.0, 0.5, 1.0)
        )
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:{_WIDTH}px;width:100%" role="img" '
            f'aria-label="loss over steps" font-size="11" fill="currentColor">{marks}'
            f'<text x="{_LEFT}" y="{_HEIGHT - 6}">0</text>'
            f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">step {right:,.0f}</text>'
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
            f'<tspan fill="{_TRAIN}">training loss</tspan> <tspan fill="{_VALIDATION}">validation loss</tspan></text>'
            f"{line(self._train, _TRAIN) if len(self._train) > 1 else ''}"
            f"{line(self._validation, _VALIDATION) if len(self._validation) > 1 else ''}"
            + "".join(
                f'<circle r="3" fill="{_VALIDATION}" cx="{x}" cy="{y}"/>'
                for x, y in (place(point).split(",") for point in self._validation)
            )
            + "</svg>"
        )


def _range(losses: list[float]) -> tuple[float, float]:
    """Return the range of the axis. Outliers, such as the first steps, may leave it at the top."""
    ordered = sorted(losses)
    low, high = ordered[0], ordered[min(len(ordered) - 1, math.ceil(0.98 * len(ordered)))]
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin
