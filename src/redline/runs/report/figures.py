"""Every figure of the reports: curves of a run, its timeline, its roofline, and the scaling estimate of a plan.

Figures are inline SVG that takes its colours from the page, so that one drawing serves light and dark. matplotlib needs
real colours: each ink is drawn in a placeholder colour, which is replaced by a CSS variable afterwards.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from redline.runs.events import Event, number
from redline.runs.roofline import THIS_RUN, Bar, Point, Roof, Roofline
from redline.runs.summary import describe_event
from redline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


MAX_POINTS = 800  # of a curve
_CROWDED = 300  # points; with more, a curve is drawn as its mean over a band

RUN_INKS = tuple(f"run-{number}" for number in range(6))
_INK_NAMES = ("ink", "faint", "grid", "accent", "second", "good", "warn", "card", *RUN_INKS)  # as in report.html.j2
_PLACEHOLDERS = {name: f"#0102{number:02x}" for number, name in enumerate(_INK_NAMES, 3)}
_SIZE_INCHES = (4.4, 2.75)  # on a phone, where a figure is about 340 pixels wide, text is 10 pixels high
_RC: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _PLACEHOLDERS["ink"],
    "axes.edgecolor": _PLACEHOLDERS["grid"],
    "axes.labelcolor": _PLACEHOLDERS["faint"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _PLACEHOLDERS["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": _PLACEHOLDERS["faint"],
    "ytick.color": _PLACEHOLDERS["faint"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.2,
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
    """Return every figure that the events have numbers for."""
    steps = sorted(steps, key=lambda event: number(event, "step") or 0)
    axis = TokenAxis(steps)
    figures = [_loss_figure(steps, evals, axis)]
    figures += [_stacked_figure(title, panels, steps, axis) for title, panels in _STACKS]
    return [figure for figure in figures if figure is not None]


class TokenAxis:
    """The horizontal axis: tokens if steps log them, otherwise steps. Evaluations log only their step, so their tokens
    are interpolated."""

    def __init__(self, steps: Sequence[Event]) -> None:
        step, tokens = series(steps, "step", "tokens")
        self.label = "tokens" if len(tokens) else "step"
        self._step = np.concatenate([[0.0], step])
        self._tokens = np.concatenate([[0.0], tokens])
        # Once a run is a thousand times longer than its first step, early learning shows only on a logarithmic axis.
        self.logarithmic = len(tokens) > 1 and tokens[0] > 0 and tokens[-1] / tokens[0] >= 1000

    def __call__(self, step: Array) -> Array:
        return np.interp(step, self._step, self._tokens) if self.label == "tokens" else step


def series(events: Sequence[Event], *keys: str) -> list[Array]:
    """Return the fields of those events that have all of them, one array per field."""
    rows = [[number(event, key) for key in keys] for event in events]
    complete = np.array([row for row in rows if None not in row], dtype=np.float64).reshape(-1, len(keys))
    return list(complete.T)


def thin(x: Array, y: Array, points: int = MAX_POINTS, logarithmic: bool = False) -> tuple[Array, Array]:
    """Return at most `points` points of a curve: the lowest and highest of each stretch, so that no spike is lost."""
    if len(x) <= points:
        return x, y
    keep = {0, len(x) - 1}
    for stretch in _stretches(x, points // 2 - 1, logarithmic):
        keep |= {int(stretch[np.argmin(y[stretch])]), int(stretch[np.argmax(y[stretch])])}
    chosen = sorted(keep)
    return x[chosen], y[chosen]


def _stretches(x: Array, count: int, logarithmic: bool) -> list[NDArray[np.intp]]:
    """Return the indices of `x` in stretches of equal width on the page, without empty ones."""
    place = np.log(np.maximum(x, 1.0)) if logarithmic else x
    edges = np.linspace(place[0], place[-1], count + 1)[1:-1]
    parts = np.split(np.arange(len(x)), np.searchsorted(place, edges))
    return [part for part in parts if len(part)]


def draw_curve(ax: Axes, x: Array, y: Array, ink: str, label: str, logarithmic: bool = False, dash: Any = "-") -> None:
    """Draw a line. If it has too many points to follow, draw its mean over a band of all its values."""
    colour = _PLACEHOLDERS[ink]
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
            draw_curve(ax, axis(train_step), train_loss, "run-0", "train", axis.logarithmic)
        if len(val_loss):
            x, y = thin(axis(val_step), val_loss, 200, axis.logarithmic)
            ax.plot(
                x,
                y,
                "o",
                zorder=3,
                markersize=4.5,
                markeredgewidth=0,
                color=_PLACEHOLDERS["ink"],
                label="validation",
            )
        ax.legend(loc="upper right")
        ax.set_ylabel("loss")
        if axis.logarithmic:
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
    for (key, name), (ink, dash) in zip(panel.fields, (("run-0", "-"), ("run-1", "--")), strict=False):
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
    """Start the axis at zero. A lone outlier, such as a step that compiles, would flatten the rest: it is left outside
    the panel and its value is noted."""
    top, usual = float(values.max()), float(np.quantile(values, 0.95))
    if usual > 0 and top > 3 * usual and len(values) >= 20:
        note = f"highest: {show(top)}"
        x = 0.01 if side == "left" else 0.99
        ax.text(x, 0.97, note, transform=ax.transAxes, ha=side, va="top", size=9.5, color=_PLACEHOLDERS["faint"])
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
    """Return the placeholder colour for one of the page's colours."""
    return _PLACEHOLDERS[name]


def drawing(draw: Callable[[Canvas], None], inches: tuple[float, float] = _SIZE_INCHES) -> str:
    """Return what `draw` puts on a canvas in the style of the report, as SVG for the page."""
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
    """Return the drawing alone: no prolog, no name spaces (HTML has them), no fixed size, colours from the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(
        r'<g id="[^"]*"', "<g", svg
    )  # matplotlib's ids repeat in every figure, and an id must be unique in a page
    svg = svg.replace("xlink:href", "href")
    for name, placeholder in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)


# ----------------------------------------------------------------------------------------------------
# The timeline: every event of a run that is not a plain step, along the time spent working.


_LANES = ("begin", "warm-up", "evaluation", "checkpoint", "sample", "re-plan", "warning", "skipped", "recovery", "stop")
_LANE_OF_TYPE = {
    "start": "begin",
    "warmup": "warm-up",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "sample": "sample",
    "replan": "re-plan",
    "warning": "warning",
    "step": "skipped",  # only steps with skipped updates
    "recovery": "recovery",
    "stop": "stop",
}
_LANE_INKS = {
    "begin": "ink",
    "re-plan": "faint",
    "warning": "warn",
    "skipped": "warn",
    "recovery": "accent",
    "stop": "ink",
}
_LANE_MARKS = {"warning": "^", "skipped": "v", "recovery": "X", "begin": ">", "stop": "s", "evaluation": "o"}
_MAX_MARKS = 200  # in a lane; more would cover each other


@dataclass(frozen=True)
class Moment:
    """Something that happened after `seconds` of work. The time between attempts does not count as work."""

    kind: str
    seconds: float
    step: float | None
    message: str

    def data(self) -> dict[str, Any]:
        return asdict(self)


def timeline(events: Sequence[Event]) -> list[Moment]:
    """Return the moments of a run in order; none for a log without times."""
    moments: list[Moment] = []
    worked, before, step = 0.0, None, None
    for event in events:
        now = number(event, "time")
        if event["type"] == "start":
            before = None
            step = number(event, "resumed_from")
        if now is not None:
            worked += max(0.0, now - before) if before is not None else 0.0  # a clock may be set back
            before = now
        step = number(event, "step") if number(event, "step") is not None else step
        lane = _LANE_OF_TYPE.get(event["type"])
        if lane is not None and before is not None and (lane != "skipped" or number(event, "skipped")):
            moments.append(Moment(lane, worked, step, describe_event(event)))
        if event["type"] == "stop":
            before = None  # a resumed run may warn before its start event: the time since the stop is no work
    return moments


def draw_timeline(moments: Sequence[Moment]) -> Figure | None:
    """Return a figure with one lane for each kind of moment; None if nothing but the start has happened."""
    lanes = [lane for lane in _LANES if any(moment.kind == lane for moment in moments)]
    if len(lanes) < 2 or moments[-1].seconds <= 0:
        return None
    return Figure(
        "Timeline",
        drawing(lambda canvas: _draw_lanes(canvas, lanes, moments), (_SIZE_INCHES[0], 0.7 + 0.25 * len(lanes))),
    )


def _draw_lanes(canvas: Canvas, lanes: Sequence[str], moments: Sequence[Moment]) -> None:
    ax = canvas.subplots()
    unit, name = time_unit(moments[-1].seconds)
    for row, lane in enumerate(lanes):
        at = [moment.seconds / unit for moment in moments if moment.kind == lane]
        few = at[:: -(-len(at) // _MAX_MARKS)]
        mark, colour = _LANE_MARKS.get(lane, "|"), ink(_LANE_INKS.get(lane, "second"))
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
    ax.set_xlabel(f"{name} of work")


def time_unit(seconds: float) -> tuple[float, str]:
    """Return a unit that suits this time, in seconds, and its name."""
    for limit, unit, name in ((180, 1, "seconds"), (3 * 3600, 60, "minutes"), (3 * 86400, 3600, "hours")):
        if seconds < limit:
            return unit, name
    return 86400, "days"


# ----------------------------------------------------------------------------------------------------
# The roofline: the time of a step beside its ceilings, and the classical diagram.


_PART_INKS = {"matmul": "second", "attention": "warn", "memory-bound": "faint", "optimizer": "good"}
_OTHER_INKS = ("second", "warn", "good", "faint")


def draw_roofline(roofline: Roofline) -> list[Figure]:
    """Return at most two figures; none without a measured step and a ceiling."""
    figures = []
    if roofline.bars and roofline.step_ms:
        svg = drawing(lambda canvas: _draw_bars(canvas, roofline))
        figures.append(Figure("A step against its ceilings", svg))
    if roofline.points:
        svg = drawing(lambda canvas: _draw_roofline(canvas, roofline))
        figures.append(Figure("Roofline, by the plan's counts of FLOPs and bytes", svg))
    return figures


def _draw_bars(canvas: Canvas, roofline: Roofline) -> None:
    ax = canvas.subplots()
    bars, step_ms = roofline.bars, roofline.step_ms or 0.0
    inks = _inks(part for bar in bars for part in (*bar.ms, *bar.may_hide))
    most = max([step_ms, *(bar.total + sum(bar.may_hide.values()) for bar in bars)])
    for row, bar in enumerate(bars):
        _draw_bar(ax, row, bar, inks, most)
    ax.barh(len(bars), step_ms, height=0.56, color=ink("ink"))
    share = "" if roofline.mfu is None else f" · {roofline.mfu:.1%} MFU"
    _inside_or_beside(ax, len(bars), step_ms, f"{_format_ms(step_ms)} ms{share}", most)
    if roofline.planned_ms is not None and roofline.planned_ms < 1.25 * most:
        ax.plot([roofline.planned_ms] * 2, [len(bars) - 0.4, len(bars) + 0.4], color=ink("warn"), linewidth=1.6)
        _note(ax, roofline.planned_ms, len(bars) + 0.46, f"planned: {_format_ms(roofline.planned_ms)}", "center", "top")
    ax.set_yticks(range(len(bars) + 1), [*(bar.name for bar in bars), THIS_RUN])
    for label in ax.get_yticklabels():
        label.set_color(ink("ink"))
    ax.set_ylim(len(bars) + 0.85, -0.55)
    ax.set_xlim(0, 1.12 * most)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("ms per step")
    _legend(canvas, inks)


def _draw_bar(ax: Axes, row: int, bar: Bar, inks: dict[str, str], most: float) -> None:
    """Draw the parts that run one after the other, then, paler, those that may overlap them."""
    left = 0.0
    for part, ms in bar.ms.items():
        ax.barh(row, ms, left=left, height=0.56, color=ink(inks[part]))
        if ms > 0.09 * most:
            ax.text(left + ms / 2, row, _format_ms(ms), ha="center", va="center", color=ink("card"), size=9.5)
        left += ms
    for part, ms in bar.may_hide.items():
        ax.barh(row, ms, left=left, height=0.56, color=ink(inks[part]), alpha=0.25)
        if ms > 0.09 * most:
            ax.text(left + ms / 2, row, _format_ms(ms), ha="center", va="center", color=ink("ink"), size=9.5)
        left += ms
    _note(ax, left + 0.012 * most, row, f"{_format_ms(bar.total)} ms", "left", "center", "ink")


def _inside_or_beside(ax: Axes, row: int, ms: float, text: str, most: float) -> None:
    inside = ms > 0.45 * most
    x = 0.02 * most if inside else ms + 0.02 * most
    ax.text(x, row, text, ha="left", va="center", color=ink("card" if inside else "ink"), size=9.5, weight="bold")


def _legend(canvas: Canvas, inks: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    hides = {"memory-bound": "memory-bound (may overlap)"}
    patches = [
        Patch(color=ink(name), alpha=0.25 if part in hides else 1.0, label=hides.get(part, part))
        for part, name in inks.items()
    ]
    canvas.legend(handles=patches, loc="outside upper right", ncols=len(patches), handlelength=1.0, columnspacing=1.2)


def _draw_roofline(canvas: Canvas, roofline: Roofline) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    ax = canvas.subplots()
    bandwidth, *peaks = roofline.roofs
    low, high = _span(roofline.points, bandwidth, peaks)
    top = max(peak.rate for peak in peaks)
    for peak in peaks:
        ridge = peak.rate / bandwidth.rate
        ax.plot([ridge, high], [peak.rate / 1e12] * 2, color=ink("faint"))
        known = f"{peak.name} {_rate(peak.rate / 1e12)} TFLOP/s{', measured' if peak.measured else ''}"
        above = peak.rate == top  # the label of a lower roof goes below it, clear of points above
        _note(ax, high, (1.06 if above else 0.94) * peak.rate / 1e12, known, "right", "bottom" if above else "top")
    ax.plot([low, top / bandwidth.rate], [low * bandwidth.rate / 1e12, top / 1e12], color=ink("faint"))
    for point in roofline.points:
        at_a_roof = any(0.9 < 1e12 * point.tflops / peak.rate < 1.1 for peak in peaks)
        _draw_point(ax, point, below=9 if at_a_roof else 0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(min([low * bandwidth.rate / 1e12, *(0.6 * p.tflops for p in roofline.points)]), 1.8 * top / 1e12)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("FLOP per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")
    _along_the_slope(ax, low, bandwidth, top)


def _span(points: list[Point], bandwidth: Roof, peaks: list[Roof]) -> tuple[float, float]:
    """Return the limits of the horizontal axis: from left of the first ridge to right of all labels."""
    ridges = [peak.rate / bandwidth.rate for peak in peaks]
    places = [*ridges, *(point.flops_per_byte for point in points)]
    return min(places) / 6, max(places) * 10  # names are written to the right


def _draw_point(ax: Axes, point: Point, below: float) -> None:
    """Draw a point with its name to the right, `below` points lower where a roof would cross the name out."""
    name = "ink" if point.measured else _PART_INKS.get(point.name, "second")
    label = f"{point.name if point.measured else f'{point.name} at best'}: {_rate(point.tflops)}"
    ax.plot(point.flops_per_byte, point.tflops, "o", color=ink(name), markersize=8 if point.measured else 6, zorder=3)
    ax.annotate(
        label,
        (point.flops_per_byte, point.tflops),
        xytext=(9, -below),
        textcoords="offset points",
        va="center",
        size=9.5,
        color=ink(name),
        weight="bold" if point.measured else "normal",
    )


def _along_the_slope(ax: Axes, low: float, bandwidth: Roof, top: float) -> None:
    """Write the bandwidth along its roof."""
    place = math.sqrt(low * top / bandwidth.rate)
    rate = f"{bandwidth.rate / 1e12:.3g} TB/s" if bandwidth.rate >= 1e12 else f"{bandwidth.rate / 1e9:.3g} GB/s"
    ax.text(
        place,
        1.08 * place * bandwidth.rate / 1e12,
        rate,
        rotation=math.degrees(
            math.atan(bandwidth.rate / 1e12)
        ),  # in data coordinates; transform_rotates_text turns it to the screen's
        rotation_mode="anchor",
        transform_rotates_text=True,
        ha="center",
        va="bottom",
        size=9.5,
        color=ink("faint"),
    )


def _note(ax: Axes, x: float, y: float, text: str, ha: str, va: str, name: str = "faint") -> None:
    ax.text(x, y, text, ha=ha, va=va, size=9.5, color=ink(name))


def _inks(parts: Iterable[str]) -> dict[str, str]:
    names = list(dict.fromkeys(parts))
    return {part: _PART_INKS.get(part, _OTHER_INKS[i % len(_OTHER_INKS)]) for i, part in enumerate(names)}


def _rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _format_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# ----------------------------------------------------------------------------------------------------
# What more GPUs would bring, as an SVG file of its own (`redline plan --scaling`).


_SCALING_INCHES = (7.6, 3.3)
# The light colours of report.html.j2: outside of its page nothing else defines them.
_LIGHT_COLOURS = {
    "card": "#ffffff",
    "ink": "#1d1b1a",
    "faint": "#6d6763",
    "grid": "#e7e3df",
    "accent": "#c8281f",
    "second": "#2f5d8a",
    "good": "#2e7d4f",
    "warn": "#a15c00",
}


def scaling_svg(scaling: Mapping[str, Any], title: str) -> str:
    """Return the speed and price for several numbers of GPUs, from a plan's `scaling`, as an SVG file."""
    svg = drawing(lambda canvas: _draw_scaling(canvas, scaling, title))
    for name, colour in _LIGHT_COLOURS.items():
        svg = svg.replace(f"var(--{name})", colour)
    return svg.replace(
        "<svg", f'<svg xmlns="http://www.w3.org/2000/svg" style="background:{_LIGHT_COLOURS["card"]}"', 1
    )


def _draw_scaling(canvas: Canvas, scaling: Mapping[str, Any], title: str) -> None:
    canvas.set_size_inches(*_SCALING_INCHES)
    rows = scaling["rows"]
    speed, budget = canvas.subplots(1, 2)
    canvas.suptitle(f"{title}: estimates, not measurements", size=10, color=ink("ink"))
    _draw_speed(speed, rows, scaling["pays_up_to"])
    _draw_budget(budget, rows)
    for ax in (speed, budget):
        ax.set_xscale("log", base=2)
        ax.set_xticks([row["world"] for row in rows], [str(row["world"]) for row in rows])
        ax.set_xlabel("GPUs")


def _draw_speed(ax: Axes, rows: Sequence[Mapping[str, Any]], paid: int | None) -> None:
    cards, rates = _known(rows, "tokens_per_s")
    ideal = [rates[0] / cards[0] * count for count in cards]
    ax.plot(cards, ideal, color=ink("faint"), linestyle="--", label="ideal")
    ax.plot(cards, rates, color=ink("accent"), marker="o", markersize=4, label="tokens/s")
    if paid is not None and paid < cards[-1]:
        ax.axvline(paid, color=ink("second"), linewidth=1.0, linestyle=":", label=f"worth it up to {paid}")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: format_count(value))
    ax.set_ylabel("tokens/s")
    ax.legend(loc="upper left")


def _draw_budget(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the hours and, if there is a price, the dollars."""
    cards, hours = _known(rows, "hours")
    ax.plot(cards, hours, color=ink("accent"), marker="o", markersize=4)
    ax.set_ylim(0, 1.15 * max(hours, default=1.0))
    ax.set_ylabel("hours", color=ink("accent"))
    priced, dollars = _known(rows, "cost_usd")
    if priced:
        other = ax.twinx()
        other.plot(priced, dollars, color=ink("second"), marker="s", markersize=4)
        other.set_ylim(0, 1.15 * max(dollars))
        other.set_ylabel("dollars", color=ink("second"))
        other.grid(visible=False)


def _known(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    known = [row for row in rows if row[key] is not None]
    return [row["world"] for row in known], [row[key] for row in known]
