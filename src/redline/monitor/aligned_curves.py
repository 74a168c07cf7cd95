"""The losses of several runs over each other: by step, by tokens, by time, by dollars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.monitor.figures import RUN_INKS, Figure, draw_curve, drawing, ink, series
from redline.monitor.side_by_side import Side
from redline.monitor.timeline import time_unit
from redline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))
MARKS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class View:
    """Figures over one axis; `name` is the tab's."""

    key: str
    name: str
    figures: list[Figure]
    without: list[str]  # runs that have no number for this axis
    at_the_end: str  # of the shortest: where each stood then


_AXES = (("step", "steps"), ("tokens", "tokens"), ("hours", "time"), ("cost_usd", "dollars"))


def aligned_views(sides: Sequence[Side]) -> list[View]:
    """One view for each axis that some run has numbers for."""
    views = []
    for key, name in _AXES:
        without = [side.name for side in sides if not len(series(side.steps, key, "loss")[0])]
        if len(without) < len(sides):
            views.append(View(key, name, _figures(sides, key), without, _at_the_end(sides, key)))
    return views


def _at_the_end(sides: Sequence[Side], key: str) -> str:
    """The validation losses where the shortest run was evaluated last: the fair comparison on this axis."""
    curves = [(side.name, *_held_out(side, key)) for side in sides]
    known = [(name, x, y) for name, x, y in curves if len(x) and x[-1] > 0]
    if len(known) < 2:
        return ""
    unit, label = _unit(sides, key)
    end = min(float(x[-1]) for _, x, _ in known)
    losses = sorted((float(np.interp(end, x, y)), name) for name, x, y in known)
    place = f"${end:.2g}" if key == "cost_usd" else f"{format_count(end / unit)} {label}"
    return f"At {place}, where the shortest ends: {', '.join(f'{name} {loss:.4g}' for loss, name in losses)}."


def _figures(sides: Sequence[Side], key: str) -> list[Figure]:
    unit, label = _unit(sides, key)
    curves = [_train(side, key) for side in sides], [_held_out(side, key) for side in sides]
    figures = []
    for title, marked, found in zip(("Training loss", "Validation loss"), (False, True), curves, strict=True):
        if any(len(y) for _, y in found):
            shown = [(x / unit, y) for x, y in found]
            svg = drawing(partial(_draw, sides=sides, curves=shown, label=label, marked=marked))
            figures.append(Figure(f"{title} by {label}", svg))
    return figures


def _unit(sides: Sequence[Side], key: str) -> tuple[float, str]:
    """What the axis is divided by, and its name."""
    if key != "hours":
        return 1.0, {"step": "steps", "tokens": "tokens", "cost_usd": "dollars"}[key]
    longest = max((float(hours.max()) for side in sides if len(hours := series(side.steps, key)[0])), default=0.0)
    seconds, name = time_unit(3600 * longest)
    return seconds / 3600, f"{name} of training"


def _train(side: Side, key: str) -> tuple[Array, Array]:
    x, loss = series(side.steps, key, "loss")
    return x, loss


def _held_out(side: Side, key: str) -> tuple[Array, Array]:
    """Evaluations only know their step; the steps around them know the rest."""
    step, loss = series(side.evals, "step", "loss")
    at, value = series(side.steps, "step", key) if key != "step" else (step, step)
    if not len(at):
        return step[:0], loss[:0]
    return np.interp(step, np.concatenate([[0.0], at]), np.concatenate([[0.0], value])), loss


def _draw(
    canvas: Canvas, sides: Sequence[Side], curves: Sequence[tuple[Array, Array]], label: str, marked: bool
) -> None:
    ax = canvas.subplots()
    for place, (side, (x, y)) in enumerate(zip(sides, curves, strict=True)):
        if len(y):
            _draw_run(ax, place, side.name, x, y, marked)
    ax.set_xlabel(label)
    ax.set_ylabel("loss")
    ax.xaxis.set_major_formatter(lambda value, _: f"${value:.3g}" if label == "dollars" else format_count(value))
    first = [y[0] for _, y in curves if len(y)]
    lowest = min(float(y.min()) for _, y in curves if len(y))
    ax.set_ylim(lowest - 0.03 * (max(first) - lowest or 1.0), None)
    for text in ax.legend(loc="upper right").get_texts():
        text.set_parse_math(False)  # a run's name may hold dollars


def _draw_run(ax: Axes, place: int, name: str, x: Array, y: Array, marked: bool) -> None:
    """A colour and a dash for each run, so that neither alone has to tell it from the others."""
    colour, dash = RUN_INKS[place % len(RUN_INKS)], DASHES[place % len(DASHES)]
    label = name if len(name) <= 32 else f"…{name[-31:]}"
    label = f" {label}" if label.startswith("_") else label  # such lines have no place in a legend otherwise
    if not marked:
        draw_curve(ax, x, y, colour, label, dash=dash)
        return
    mark = MARKS[place % len(MARKS)] if len(x) <= 60 else ""
    ax.plot(x, y, color=ink(colour), linestyle=dash, marker=mark, markersize=4, label=label)


def legend_of(count: int) -> list[dict[str, str]]:
    """For the page's own tables: each run's colour, and its dash as SVG writes it."""
    dashes = ["none" if dash == "-" else " ".join(f"{part:g}" for part in dash[1]) for dash in DASHES]
    return [{"ink": RUN_INKS[i % len(RUN_INKS)], "dash": dashes[i % len(DASHES)]} for i in range(count)]
