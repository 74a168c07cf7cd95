"""One page about several runs: who won, what differs in their recipes, and their curves over each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redline.monitor.aligned_curves import aligned_views, legend_of
from redline.monitor.pages import render, write_page
from redline.monitor.side_by_side import Side, other_differences, read_sides, recipe_differences
from redline.monitor.verdict import dollars
from redline.monitor.winner import losses_compare, winner, winner_name
from redline.units import format_count, format_seconds


@dataclass(frozen=True)
class Column:
    """A figure of the headline. `best` picks the one to stress; None where less or more is neither."""

    title: str
    key: str
    show: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


_COLUMNS = (
    Column("best validation loss", "best_val_loss", "{:.4f}".format, min),
    Column("training loss", "train_loss", "{:.4f}".format),
    Column("bits per byte", "bits_per_byte", "{:.4f}".format, min),
    Column("steps", "step", "{:,.0f}".format),
    Column("tokens", "tokens", format_count),
    Column("time", "hours", lambda hours: format_seconds(3600 * hours)),
    Column("cost", "cost_usd", dollars),
    Column("tokens/s", "tokens_per_s_median", format_count, max),
    Column("MFU", "mfu_median", "{:.1%}".format, max),
    Column("peak memory", "peak_memory_gib", "{:.2f} GiB".format, min),
)
_LOSSES = ("best_val_loss", "bits_per_byte")


def write_comparison(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page (comparison.html beside the first run unless told otherwise) and return where it is."""
    sides = read_sides(runs)
    page = render("comparison.html.j2", _words(sides))
    place = runs[0].parent / "comparison.html" if out is None else Path(out)
    return write_page(place, page, named=out is not None)


def comparison_data(runs: Sequence[Path]) -> dict[str, Any]:
    """What the page says, as plain data."""
    sides = read_sides(runs)
    return {
        "schema": 1,
        "verdict": winner(sides),
        "winner": winner_name(sides),
        "recipe_differences": [asdict(row) for row in recipe_differences(sides)],
        "other_differences": [asdict(row) for row in other_differences(sides)],
        "runs": [side.data | {"name": side.name} for side in sides],
    }


def _words(sides: Sequence[Side]) -> dict[str, Any]:
    views = aligned_views(sides)
    columns = [column for column in _COLUMNS if any(_value(side, column) is not None for side in sides)]
    if not losses_compare(sides):
        views = [replace(view, at_the_end="") for view in views]
        columns = [replace(column, best=None) if column.key in _LOSSES else column for column in columns]
    return {
        "names": [side.name for side in sides],
        "runs": [side.data for side in sides],
        "inks": legend_of(len(sides)),
        "verdict": winner(sides),
        "figure_rows": [(column.title, _cells(sides, column)) for column in columns],
        "recipe_rows": recipe_differences(sides),
        "other_rows": other_differences(sides),
        "views": views,
    }


def _value(side: Side, column: Column) -> float | None:
    value = side.data["headline"][column.key]
    return None if value is None else float(value)


def _cells(sides: Sequence[Side], column: Column) -> list[tuple[str, bool]]:
    """Each run's figure as text, and whether it is the best of them; what reads the same is not better."""
    values = [_value(side, column) for side in sides]
    texts = ["–" if value is None else column.show(value) for value in values]
    known = [value for value in values if value is not None]
    best = column.best(known) if column.best is not None else None
    differ = len({text for text in texts if text != "–"}) > 1
    return [(text, differ and best is not None and value == best) for text, value in zip(texts, values, strict=True)]
