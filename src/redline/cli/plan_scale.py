"""redline plan --gpus N --nodes M: the table of world sizes, and its figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.errors import UsageError, UserError
from redline.units import format_count, format_seconds, format_usd

_HEAD = ("cards", "shared by", "micro × acc.", "ms a step", "waiting", "tokens/s", "of ideal", "time", "cost", "")
_UNKNOWN = "?"


def scale_lines(scaling: Mapping[str, Any]) -> list[str]:
    """The rows under their heads, then when it stops paying, and what all that rests on."""
    table = [_HEAD, *(_cells(row) for row in scaling["rows"])]
    shown = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in shown]
    lines = ["  " + "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in zip(*shown, strict=True)]
    notes = [scaling["verdict"], *(f"left out: {what}" for what in scaling["left_out"])]
    if scaling["pays_up_to"] is not None:
        notes.append("estimates, not measurements: " + ", ".join(scaling["assumptions"]))
    return ["", *lines, *(f"  {note}" for note in notes)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    several = f" ({row['gpus']} × {row['nodes']} nodes)" if row["nodes"] > 1 else ""
    known = row["tokens_per_s"] is not None
    return (
        f"{row['world']}{several}",
        "" if row["mode"] == "single" else row["mode"],
        f"{row['micro']} × {row['accumulation']}",
        f"{row['step_ms']:,.1f}" if known else _UNKNOWN,
        f"{row['exposed_ms']:,.1f}" if known else _UNKNOWN,
        format_count(row["tokens_per_s"]) if known else _UNKNOWN,
        _UNKNOWN if not known else "" if row["efficiency"] is None else f"{row['efficiency']:.0%}",
        "" if row["hours"] is None else format_seconds(3600 * row["hours"]),
        "" if row["cost_usd"] is None else format_usd(row["cost_usd"]),
        "" if row["fits"] else "does not fit by estimate",
    )


def check_figure(path: Path | None, world: int) -> None:
    """Before anything is planned."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise UsageError("the figure is an SVG file.", where="--figure", fix="Give it a name that ends in .svg.")
    if world == 1:
        raise UsageError("one card has nothing to scale.", where="--figure", fix="Add --gpus N or --nodes N.")


def write_figure(path: Path, scaling: Mapping[str, Any], title: str) -> None:
    if scaling["pays_up_to"] is None:
        raise UserError(f"there is nothing to draw: {scaling['verdict']}.", where="--figure")
    from redline.monitor.scaling_figure import scaling_svg

    try:
        path.write_text(scaling_svg(scaling, title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}.", where=str(path), fix="Choose another place.") from None
