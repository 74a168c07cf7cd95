"""The loss of each arm over the seconds it trained, and where it passes the baseline's last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redline.bench.arms import BASELINE
from redline.bench.passing import best_entries
from redline.bench.style import ACCENT, FAINT, INK, SECOND, headed
from redline.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

_COLOURS = {BASELINE: SECOND, "pretrain-350m": INK, "speedrun-350m": ACCENT}
_ABOVE = 2.2  # of the way from the target to the lowest loss of all, or of a nat: what is shown of the steep beginning


def draw_time_to_loss(canvas: Figure, result: dict[str, Any]) -> None:
    """A panel for each table, with every arm at its best overrides; without a baseline all curves in one."""
    rows = {row["name"]: row for row in result["rows"]}
    tables = result["comparison"]
    canvas.set_size_inches(max(9.0, 6.2 * len(tables)), 4.6)
    panels = canvas.subplots(1, max(1, len(tables)), squeeze=False)[0]
    several = len({table["data"]["fingerprint"] for table in tables}) > 1
    for ax, table in zip(panels, tables, strict=False):
        text = f", text of {format_count(table['data']['train_tokens'])} tokens" if several else ""
        _draw_table(ax, table, rows, f"{table['budget_s']:g} s{text}")
    if not tables:
        for row in rows.values():
            _draw_curve(panels[0], row, _colour(row["arm"]), row["arm"])
    for ax in panels:
        ax.set_xlabel("seconds of training")
        ax.set_ylabel("validation loss")
        ax.grid(visible=True)
        ax.set_xlim(left=0)
        ax.legend(frameon=False, loc="upper right", fontsize=9)
    headed(canvas, result, f"Time to loss on one {result['machine']['name']}")


def _draw_table(ax: Axes, table: dict[str, Any], rows: dict[str, Row], budget: str) -> None:
    target, lowest = table["baseline"]["final_loss"], table["baseline"]["final_loss"]
    for entry in best_entries(table):
        colour, lowest = _colour(entry["arm"]), min(lowest, entry["final_loss"])
        for number, name in enumerate(entry["names"]):
            _draw_curve(ax, rows[name], colour, None if number else _label(entry))
        if entry["passes_s"] is not None and entry["arm"] != BASELINE:
            ax.plot(entry["passes_s"], target, "o", color=colour, markersize=7, zorder=5)
            ax.annotate(
                f"{entry['passes_s']:.0f} s",
                (entry["passes_s"], target),
                xytext=(4, 6),
                textcoords="offset points",
                color=colour,
                weight="bold",
            )
    ax.axhline(target, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    ax.set_ylim(lowest - 0.1, target + max(1.0, _ABOVE * (target - lowest)))
    ax.set_title(f"{budget}: {BASELINE} ends at {target:.3f}", loc="left", size=10.5, weight="bold")


def _draw_curve(ax: Axes, row: Row, colour: str, label: str | None) -> None:
    known = [point for point in row["evaluations"] if point["loss"] is not None]
    seconds, losses = ([point[key] for point in known] for key in ("seconds", "loss"))
    ax.plot(seconds, losses, "-o", color=colour, linewidth=1.6, markersize=2.8, label=label)


def _label(entry: dict[str, Any]) -> str:
    ratio = entry["ratio"]
    if entry["arm"] == BASELINE:
        return f"{entry['arm']}: {entry['seconds']:.0f} s"
    return f"{entry['arm']}: " + ("does not pass" if ratio is None else f"{ratio:.2f} of its time")


def _colour(arm: str) -> str:
    return _COLOURS.get(arm, FAINT)
