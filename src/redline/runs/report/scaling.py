"""What more cards would bring, as a figure that stands by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redline.runs.report.figures import drawing, ink
from redline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


_SIZE_INCHES = (7.6, 3.3)
# the report's light colours: outside of its page nothing else defines them
_COLOURS = {
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
    """Of a plan's `scaling`, as an SVG file."""
    svg = drawing(lambda canvas: _draw(canvas, scaling, title))
    for name, colour in _COLOURS.items():
        svg = svg.replace(f"var(--{name})", colour)
    return svg.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" style="background:{_COLOURS["card"]}"', 1)


def _draw(canvas: Canvas, scaling: Mapping[str, Any], title: str) -> None:
    canvas.set_size_inches(*_SIZE_INCHES)
    rows = scaling["rows"]
    speed, budget = canvas.subplots(1, 2)
    canvas.suptitle(f"{title}: estimates, not measurements", size=10, color=ink("ink"))
    _draw_speed(speed, rows, scaling["pays_up_to"])
    _draw_budget(budget, rows)
    for ax in (speed, budget):
        ax.set_xscale("log", base=2)
        ax.set_xticks([row["world"] for row in rows], [str(row["world"]) for row in rows])
        ax.set_xlabel("cards")


def _draw_speed(ax: Axes, rows: Sequence[Mapping[str, Any]], paid: int | None) -> None:
    cards, rates = _known(rows, "tokens_per_s")
    ideal = [rates[0] / cards[0] * count for count in cards]
    ax.plot(cards, ideal, color=ink("faint"), linestyle="--", label="if no card waited")
    ax.plot(cards, rates, color=ink("accent"), marker="o", markersize=4, label="tokens/s")
    if paid is not None and paid < cards[-1]:
        ax.axvline(paid, color=ink("second"), linewidth=1.0, linestyle=":", label=f"pays up to {paid}")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: format_count(value))
    ax.set_ylabel("tokens/s")
    ax.legend(loc="upper left")


def _draw_budget(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Hours, and dollars beside them where there is a price."""
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
