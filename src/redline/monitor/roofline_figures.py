"""The roofline of a run: its step's time beside what ceilings leave of it, and the classical diagram."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from redline.monitor.counts import Point, Roof
from redline.monitor.figures import Figure, drawing, ink
from redline.monitor.roofline import Bar, Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_PART_INKS = {"matmul": "second", "attention": "warn", "memory-bound": "faint", "optimizer": "good"}
_OTHER_INKS = ("second", "warn", "good", "faint")
_MEASURED = "this run"


def draw_roofline(standing: Standing) -> list[Figure]:
    """At most two figures; none without a measured step and a ceiling to hold it against."""
    figures = []
    if standing.bars and standing.step_ms:
        svg = drawing(lambda canvas: _draw_bars(canvas, standing))
        figures.append(Figure("A step against its ceilings", svg))
    if standing.points:
        svg = drawing(lambda canvas: _draw_roofline(canvas, standing))
        figures.append(Figure("Roofline, by the plan's counts of FLOPs and bytes", svg))
    return figures


def _draw_bars(canvas: Canvas, standing: Standing) -> None:
    ax = canvas.subplots()
    bars, step_ms = standing.bars, standing.step_ms or 0.0
    inks = _inks(part for bar in bars for part in (*bar.ms, *bar.may_hide))
    most = max([step_ms, *(bar.total + sum(bar.may_hide.values()) for bar in bars)])
    for row, bar in enumerate(bars):
        _draw_bar(ax, row, bar, inks, most)
    ax.barh(len(bars), step_ms, height=0.56, color=ink("accent"))
    share = "" if standing.mfu is None else f" · {standing.mfu:.1%} MFU"
    _inside_or_beside(ax, len(bars), step_ms, f"{_ms(step_ms)} ms{share}", most)
    if standing.planned_ms is not None and standing.planned_ms < 1.25 * most:
        ax.plot([standing.planned_ms] * 2, [len(bars) - 0.4, len(bars) + 0.4], color=ink("ink"), linewidth=1.2)
        _note(ax, standing.planned_ms, len(bars) + 0.46, f"planned: {_ms(standing.planned_ms)}", "center", "top")
    ax.set_yticks(range(len(bars) + 1), [*(bar.name for bar in bars), _MEASURED])
    for label in ax.get_yticklabels():
        label.set_color(ink("ink"))
    ax.set_ylim(len(bars) + 0.85, -0.55)
    ax.set_xlim(0, 1.12 * most)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("ms per step")
    _legend(canvas, inks)


def _draw_bar(ax: Axes, row: int, bar: Bar, inks: dict[str, str], most: float) -> None:
    """The parts that cannot hide behind each other, then outlined what may."""
    left = 0.0
    for part, ms in bar.ms.items():
        ax.barh(row, ms, left=left, height=0.56, color=ink(inks[part]))
        if ms > 0.09 * most:
            ax.text(left + ms / 2, row, _ms(ms), ha="center", va="center", color=ink("card"), size=8.5)
        left += ms
    for part, ms in bar.may_hide.items():
        ax.barh(row, ms, left=left, height=0.56, color=ink(inks[part]), alpha=0.25)
        if ms > 0.09 * most:
            ax.text(left + ms / 2, row, _ms(ms), ha="center", va="center", color=ink("ink"), size=8.5)
        left += ms
    _note(ax, left + 0.012 * most, row, f"{_ms(bar.total)} ms", "left", "center", "ink")


def _inside_or_beside(ax: Axes, row: int, ms: float, text: str, most: float) -> None:
    inside = ms > 0.45 * most
    x = 0.02 * most if inside else ms + 0.02 * most
    ax.text(x, row, text, ha="left", va="center", color=ink("card" if inside else "accent"), size=8.5, weight="bold")


def _legend(canvas: Canvas, inks: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    hides = {"memory-bound": "memory-bound (may hide)"}
    patches = [
        Patch(color=ink(name), alpha=0.25 if part in hides else 1.0, label=hides.get(part, part))
        for part, name in inks.items()
    ]
    canvas.legend(handles=patches, loc="outside upper right", ncols=len(patches), handlelength=1.0, columnspacing=1.2)


def _draw_roofline(canvas: Canvas, standing: Standing) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    ax = canvas.subplots()
    bandwidth, *peaks = standing.roofs
    low, high = _span(standing.points, bandwidth, peaks)
    top = max(peak.rate for peak in peaks)
    for peak in peaks:
        ridge = peak.rate / bandwidth.rate
        ax.plot([ridge, high], [peak.rate / 1e12] * 2, color=ink("faint"))
        known = f"{peak.name} {_rate(peak.rate / 1e12)} TFLOP/s{', measured' if peak.measured else ''}"
        above = peak.rate == top  # below the others, whose points stand above them
        _note(ax, high, (1.06 if above else 0.94) * peak.rate / 1e12, known, "right", "bottom" if above else "top")
    ax.plot([low, top / bandwidth.rate], [low * bandwidth.rate / 1e12, top / 1e12], color=ink("faint"))
    for point in standing.points:
        at_a_roof = any(0.9 < 1e12 * point.tflops / peak.rate < 1.1 for peak in peaks)
        _draw_point(ax, point, below=9 if at_a_roof else 0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(min([low * bandwidth.rate / 1e12, *(0.6 * p.tflops for p in standing.points)]), 1.8 * top / 1e12)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("FLOP per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")
    _along_the_slope(ax, low, bandwidth, top)


def _span(points: list[Point], bandwidth: Roof, peaks: list[Roof]) -> tuple[float, float]:
    """From well left of the first ridge to right of everything."""
    ridges = [peak.rate / bandwidth.rate for peak in peaks]
    places = [*ridges, *(point.flops_per_byte for point in points)]
    return min(places) / 6, max(places) * 10  # names stand to the right


def _draw_point(ax: Axes, point: Point, below: float) -> None:
    """With its name beside it, `below` the roof that would cross it out."""
    name = "accent" if point.measured else _PART_INKS.get(point.name, "second")
    label = f"{point.name if point.measured else f'{point.name} at best'}: {_rate(point.tflops)}"
    ax.plot(point.flops_per_byte, point.tflops, "o", color=ink(name), markersize=8 if point.measured else 6, zorder=3)
    ax.annotate(
        label,
        (point.flops_per_byte, point.tflops),
        xytext=(9, -below),
        textcoords="offset points",
        va="center",
        size=8.5,
        color=ink(name),
        weight="bold" if point.measured else "normal",
    )


def _along_the_slope(ax: Axes, low: float, bandwidth: Roof, top: float) -> None:
    """The bandwidth's figure, written along its roof."""
    place = math.sqrt(low * top / bandwidth.rate)
    rate = f"{bandwidth.rate / 1e12:.3g} TB/s" if bandwidth.rate >= 1e12 else f"{bandwidth.rate / 1e9:.3g} GB/s"
    ax.text(
        place,
        1.08 * place * bandwidth.rate / 1e12,
        rate,
        rotation=math.degrees(math.atan(bandwidth.rate / 1e12)),  # as data go; the axes turn it with them
        rotation_mode="anchor",
        transform_rotates_text=True,
        ha="center",
        va="bottom",
        size=8.5,
        color=ink("faint"),
    )


def _note(ax: Axes, x: float, y: float, text: str, ha: str, va: str, name: str = "faint") -> None:
    ax.text(x, y, text, ha=ha, va=va, size=8.5, color=ink(name))


def _inks(parts: Iterable[str]) -> dict[str, str]:
    names = list(dict.fromkeys(parts))
    return {part: _PART_INKS.get(part, _OTHER_INKS[i % len(_OTHER_INKS)]) for i, part in enumerate(names)}


def _rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
