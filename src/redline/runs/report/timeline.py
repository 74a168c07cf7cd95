"""What happened when: every event of a run that is no step, along the time that it worked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from redline.runs.console import one_line
from redline.runs.events import Event, number
from redline.runs.report.figures import Figure, drawing, ink
from redline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


_LANES = ("begin", "warm-up", "evaluation", "checkpoint", "sample", "re-plan", "warning", "skipped", "recovery", "stop")
_INKS = {"warning": "warn", "skipped": "warn", "recovery": "accent", "begin": "ink", "stop": "ink", "re-plan": "faint"}
_MARKS = {"warning": "^", "skipped": "v", "recovery": "X", "begin": ">", "stop": "s", "evaluation": "o"}
_MOST_MARKS = 200  # in a lane: more stand on each other


@dataclass(frozen=True)
class Moment:
    """`seconds` of work before it: the time between attempts does not count."""

    kind: str
    seconds: float
    step: float | None
    message: str

    def data(self) -> dict[str, Any]:
        return asdict(self)


def timeline(events: Sequence[Event]) -> list[Moment]:
    """In order; empty for a log without times."""
    moments: list[Moment] = []
    worked, before, step = 0.0, None, None
    for event in events:
        now = number(event, "time")
        if event["type"] == "start":
            before = None
            step = number(event, "resumed_from")
        if now is not None:
            worked += max(0.0, now - before) if before is not None else 0.0  # clocks are set back, too
            before = now
        step = number(event, "step") if number(event, "step") is not None else step
        told = _told(event)
        if told is not None and before is not None:
            moments.append(Moment(told[0], worked, step, told[1]))
        if event["type"] == "stop":
            before = None  # who goes on may warn before it says so
    return moments


def _told(event: Event) -> tuple[str, str] | None:
    """The lane of an event and a sentence about it."""
    if event["type"] == "step":
        skipped = number(event, "skipped")
        return ("skipped", f"{skipped:.0f} not finite") if skipped else None
    teller = _TELLERS.get(event["type"])
    return None if teller is None else teller(event)


def _start(event: Event) -> tuple[str, str]:
    step = number(event, "resumed_from")
    return "begin", "begun" if step is None else f"resumed from step {step:,.0f}"


def _eval(event: Event) -> tuple[str, str]:
    loss = number(event, "loss")
    return "evaluation", "" if loss is None else f"validation loss {loss:.4f}"


def _checkpoint(event: Event) -> tuple[str, str]:
    size, seconds = number(event, "bytes"), number(event, "seconds")
    parts = ["" if size is None else format_bytes(size), "" if seconds is None else f"in {format_seconds(seconds)}"]
    return "checkpoint", " ".join(filter(None, parts))


def _message(lane: str) -> Callable[[Event], tuple[str, str]]:
    return lambda event: (lane, one_line(event.get("message")))


_TELLERS: dict[str, Callable[[Event], tuple[str, str]]] = {
    "start": _start,
    "warmup": _message("warm-up"),
    "eval": _eval,
    "checkpoint": _checkpoint,
    "sample": lambda event: ("sample", one_line(event.get("label"))),
    "replan": _message("re-plan"),
    "warning": _message("warning"),
    "recovery": _message("recovery"),
    "stop": lambda event: ("stop", one_line(event.get("reason"))),
}


def draw_timeline(moments: Sequence[Moment]) -> Figure | None:
    """One lane for each kind that there is; nothing to draw before anything but the beginning happened."""
    lanes = [lane for lane in _LANES if any(moment.kind == lane for moment in moments)]
    if len(lanes) < 2 or moments[-1].seconds <= 0:
        return None
    return Figure("When", drawing(lambda canvas: _draw(canvas, lanes, moments), (5.2, 0.8 + 0.26 * len(lanes))))


def _draw(canvas: Canvas, lanes: Sequence[str], moments: Sequence[Moment]) -> None:
    ax = canvas.subplots()
    unit, name = time_unit(moments[-1].seconds)
    for row, lane in enumerate(lanes):
        at = [moment.seconds / unit for moment in moments if moment.kind == lane]
        few = at[:: -(-len(at) // _MOST_MARKS)]
        mark, colour = _MARKS.get(lane, "|"), ink(_INKS.get(lane, "second"))
        ax.plot(few, [row] * len(few), mark, color=colour, markersize=9 if mark == "|" else 5.5, clip_on=False)
    for moment in moments:
        if moment.kind == "begin" and moment.step is not None:
            ax.axvline(moment.seconds / unit, color=ink("faint"), linewidth=0.8, linestyle="--")
    counts = [sum(moment.kind == lane for moment in moments) for lane in lanes]
    ax.set_yticks(
        range(len(lanes)), [f"{lane} × {n}" if n > 1 else lane for lane, n in zip(lanes, counts, strict=True)]
    )
    for label in ax.get_yticklabels():
        label.set_color(ink("ink"))
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, moments[-1].seconds / unit)
    ax.grid(visible=False, axis="x")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"{name} at work")


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which so long a time is told, in seconds, and its name."""
    for limit, unit, name in ((180, 1, "seconds"), (3 * 3600, 60, "minutes"), (3 * 86400, 3600, "hours")):
        if seconds < limit:
            return unit, name
    return 86400, "days"
