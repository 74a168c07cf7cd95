"""The report's figures: inline SVG that follows the page's colours, so one drawing serves light and dark.

matplotlib wants real colours. Each ink is drawn in a stand-in of its own and becomes a CSS variable afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from redline.runs.events import Event, number
from redline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


MAX_POINTS = 800
_CROWDED = 300

RUN_INKS = tuple(f"run-{number}" for number in range(6))
_NAMES = ("ink", "faint", "grid", "accent", "second", "good", "warn", "card", *RUN_INKS)  # as the page's style has them
_STAND_INS = {name: f"#0102{number:02x}" for number, name in enumerate(_NAMES, 3)}
_SIZE_INCHES = (5.2, 3.1)
_RC: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _STAND_INS["ink"],
    "axes.edgecolor": _STAND_INS["grid"],
    "axes.labelcolor": _STAND_INS["faint"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _STAND_INS["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": _STAND_INS["faint"],
    "ytick.color": _STAND_INS["faint"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "axes.xmargin": 0.015,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Panel:
    """One axis of a figure: fields of the step events that share a unit."""

    title: str
    fields: tuple[tuple[str, str], ...]  # (key, name in the legend)
    show: Callable[[float], str]


@dataclass(frozen=True)
class Figure:
    title: str
    svg: str


_STACKS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Throughput",
        (
            Panel("tokens/s", (("tokens_per_s", "tokens/s"),), format_count),
            Panel("MFU", (("mfu", "MFU"), ("mfu_causal", "mask-exact")), "{:.0%}".format),
        ),
    ),
    (
        "Learning rate and gradient norm",
        (
            Panel(
                "learning rate", (("lr", "learning rate"),), lambda lr: f"{lr:.1e}".replace("e-0", "e-") if lr else "0"
            ),
            Panel("gradient norm", (("grad_norm", "gradient norm"),), "{:.3g}".format),
        ),
    ),
    ("Step time", (Panel("ms", (("step_ms", "step"), ("data_wait_ms", "waiting for data")), "{:,.0f}".format),)),
)


def draw_figures(steps: Sequence[Event], evals: Sequence[Event]) -> list[Figure]:
    """Every figure that the events have numbers for."""
    steps = sorted(steps, key=lambda event: number(event, "step") or 0)
    axis = TokenAxis(steps)
    figures = [_loss_figure(steps, evals, axis)]
    figures += [_stacked_figure(title, panels, steps, axis) for title, panels in _STACKS]
    return [figure for figure in figures if figure is not None]


class TokenAxis:
    """Where an event stands: at its tokens if steps log them, else at its step. Evaluations only know their step."""

    def __init__(self, steps: Sequence[Event]) -> None:
        step, tokens = series(steps, "step", "tokens")
        self.label = "tokens" if len(tokens) else "step"
        self._step = np.concatenate([[0.0], step])
        self._tokens = np.concatenate([[0.0], tokens])
        # Once a run is a thousand times longer than its first step, early learning only shows on a logarithmic axis.
        self.long = len(tokens) > 1 and tokens[0] > 0 and tokens[-1] / tokens[0] >= 1000

    def __call__(self, step: Array) -> Array:
        return np.interp(step, self._step, self._tokens) if self.label == "tokens" else step


def series(events: Sequence[Event], *keys: str) -> list[Array]:
    """The given fields of the events that have all of them, as arrays."""
    rows = [[number(event, key) for key in keys] for event in events]
    whole = np.array([row for row in rows if None not in row], dtype=np.float64).reshape(-1, len(keys))
    return list(whole.T)


def thin(x: Array, y: Array, points: int = MAX_POINTS, logarithmic: bool = False) -> tuple[Array, Array]:
    """At most `points` of a curve: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(x) <= points:
        return x, y
    keep = {0, len(x) - 1}
    for stretch in _stretches(x, points // 2 - 1, logarithmic):
        keep |= {int(stretch[np.argmin(y[stretch])]), int(stretch[np.argmax(y[stretch])])}
    chosen = sorted(keep)
    return x[chosen], y[chosen]


def _stretches(x: Array, count: int, logarithmic: bool) -> list[NDArray[np.intp]]:
    """The indices of `x` in stretches of equal width on the page; empty ones are left out."""
    place = np.log(np.maximum(x, 1.0)) if logarithmic else x
    edges = np.linspace(place[0], place[-1], count + 1)[1:-1]
    parts = np.split(np.arange(len(x)), np.searchsorted(place, edges))
    return [part for part in parts if len(part)]


def draw_curve(ax: Axes, x: Array, y: Array, ink: str, label: str, logarithmic: bool = False, dash: Any = "-") -> None:
    """A line; when it has too many points to follow, its mean over a band of everything it touched."""
    colour = _STAND_INS[ink]
    if len(x) > _CROWDED:
        ax.plot(*thin(x, y, logarithmic=logarithmic), color=colour, alpha=0.3, linewidth=0.7)
        stretches = _stretches(x, _CROWDED // 3, logarithmic)
        x, y = (np.array([values[stretch].mean() for stretch in stretches]) for values in (x, y))
    ax.plot(x, y, color=colour, label=label, linestyle=dash, marker="." if len(x) == 1 else "")


def _loss_figure(steps: Sequence[Event], evals: Sequence[Event], axis: TokenAxis) -> Figure | None:
    train_step, train_loss = series(steps, "step", "loss")
    val_step, val_loss = series(evals, "step", "loss")
    if not len(train_loss) and not len(val_loss):
        return None

    def draw(axes: Sequence[Axes]) -> None:
        (ax,) = axes
        if len(train_loss):
            draw_curve(ax, axis(train_step), train_loss, "accent", "train", axis.long)
        if len(val_loss):
            x, y = thin(axis(val_step), val_loss, 200, axis.long)
            ax.plot(
                x, y, "o", zorder=3, markersize=4.5, markeredgewidth=0, color=_STAND_INS["second"], label="validation"
            )
        ax.legend(loc="upper right")
        ax.set_ylabel("loss")
        if axis.long:
            ax.set_xscale("log")

    return Figure("Loss", _svg(1, draw, axis))


def _stacked_figure(title: str, panels: Sequence[Panel], steps: Sequence[Event], axis: TokenAxis) -> Figure | None:
    shown = [panel for panel in panels if any(len(series(steps, key)[0]) for key, _ in panel.fields)]
    if not shown:
        return None

    def draw(axes: Sequence[Axes]) -> None:
        for ax, panel in zip(axes, shown, strict=True):
            _draw_panel(ax, panel, steps, axis)

    return Figure(title, _svg(len(shown), draw, axis))


def _draw_panel(ax: Axes, panel: Panel, steps: Sequence[Event], axis: TokenAxis) -> None:
    drawn = []
    for (key, name), (ink, dash) in zip(panel.fields, (("accent", "-"), ("second", "--")), strict=False):
        step, value = series(steps, "step", key)
        if len(value):
            draw_curve(ax, axis(step), value, ink, name, dash=dash)
            drawn.append(value)
    _from_zero(ax, np.concatenate(drawn), panel.show, "right" if len(drawn) == 1 else "left")  # beside the legend
    ax.yaxis.set_major_formatter(lambda value, _: panel.show(value))
    ax.yaxis.set_major_locator(_few_ticks())
    if len(drawn) > 1:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 0.97), borderaxespad=0, ncols=2)
    ax.set_ylabel(panel.title)


def _from_zero(ax: Axes, values: Array, show: Callable[[float], str], side: Literal["left", "right"]) -> None:
    """Rates start at zero. One compiling step must not flatten the rest: an outlier leaves the panel and is named."""
    top, usual = float(values.max()), float(np.quantile(values, 0.95))
    if usual > 0 and top > 3 * usual and len(values) >= 20:
        note = f"highest: {show(top)}"
        x = 0.01 if side == "left" else 0.99
        ax.text(x, 0.97, note, transform=ax.transAxes, ha=side, va="top", size=8, color=_STAND_INS["faint"])
        top = 1.5 * usual
    if top > 0:
        ax.set_ylim(0, 1.15 * top)


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10])


def _svg(panels: int, draw: Callable[[Sequence[Axes]], None], axis: TokenAxis) -> str:
    def panels_over_tokens(canvas: Canvas) -> None:
        axes = list(canvas.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
        draw(axes)
        canvas.align_ylabels(axes)
        axes[-1].xaxis.set_major_formatter(lambda value, _: format_count(value))
        axes[-1].set_xlabel(axis.label)

    return drawing(panels_over_tokens)


def ink(name: str) -> str:
    """The colour to draw with for one of the page's."""
    return _STAND_INS[name]


def drawing(draw: Callable[[Canvas], None], inches: tuple[float, float] = _SIZE_INCHES) -> str:
    """What `draw` puts on a canvas of the report's style, as SVG for the page."""
    return _inline(_drawn(draw, inches))


def _drawn(draw: Callable[[Canvas], None], inches: tuple[float, float]) -> str:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(_RC):
        canvas = Canvas(figsize=inches, layout="constrained", facecolor="none")
        draw(canvas)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _inline(svg: str) -> str:
    """Only the drawing: no prolog, no name spaces (HTML knows them), no fixed size, colours from the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure; an id stands once in a page
    svg = svg.replace("xlink:href", "href")
    for name, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)
