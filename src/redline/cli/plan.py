"""redline plan"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from redline.cli.completion import complete_cards
from redline.cli.options import JsonOption, RecipeArgument, split_words
from redline.errors import UsageError, UserError
from redline.units import format_count, format_seconds, format_usd, parse_count


def _parse_rate(text: str) -> float:
    """Parse tokens/s, with or without a unit: 700000 or 700k."""
    try:
        rate = float(text) if text.replace(".", "", 1).isdecimal() else float(parse_count(text))
    except (ValueError, OverflowError):
        rate = 0.0
    if not 1.0 <= rate <= 1e15:
        raise typer.BadParameter(f"{text!r} is not a number of tokens per second. Use, for example, 700000 or 700k.")
    return rate


def plan(
    recipe: RecipeArgument = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_cards,
            help="The card to plan for: h100, h200, a100-80gb, ...; auto for this machine, or cpu.",
        ),
    ] = "auto",
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs per node.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1,
    price: Annotated[
        float | None, typer.Option(min=0.0, max=1e6, metavar="USD", help="Price of one GPU per hour, in dollars.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target-tokens-per-s",
            metavar="N",
            parser=_parse_rate,
            help="Check whether a speed is possible, for example 700k; exit with 1 if it is not.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure memory and speed with a few real steps on this machine.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="With several GPUs: draw speed, time and cost against their number."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compute memory, speed, time and cost of a run before it starts.

    Examples:
      redline plan pretrain-350m --gpu h100 --price 2.5
      redline plan pretrain-350m --gpu h100 --target-tokens-per-s 700000
      redline plan quickstart --probe --json
      redline plan pretrain-350m --gpu h100 --gpus 8 --nodes 4 --price 2.5 --figure scaling.svg
    """
    from redline.bench.child import run_trial
    from redline.launch.plan import plan_recipe
    from redline.recipe.load import load

    _check_figure(figure, gpus * nodes)
    name, overrides = split_words(recipe, "plan")
    loaded = load(name or "quickstart", overrides)
    result = plan_recipe(
        loaded,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        price=price,
        target=target,
        probe=run_trial if probe else None,
        log=lambda text: typer.echo(text, err=True),
    )
    table = result.event["scaling"]
    if figure is not None and table is not None:
        _write_figure(figure, table, f"{loaded.name} on {result.machine}")
    if json_:
        import json

        typer.echo(json.dumps(result.event, allow_nan=False))
        raise typer.Exit(result.refusal.exit_code if result.refusal else 0)
    if result.refusal:
        raise result.refusal
    _show(result.event)
    if table is not None:
        typer.echo("\n".join(_table_lines(table)))


def _show(event: dict[str, Any]) -> None:
    from redline.runs.console import Console

    console = Console(file=sys.stdout)
    console.event({"type": "plan", **event})
    console.close()


# ----------------------------------------------------------------------------------------------------
# The table of several cards, and its figure.


_HEAD = ("cards", "mode", "micro × acc.", "ms/step", "exposed", "tokens/s", "efficiency", "time", "cost", "")
_UNKNOWN = "?"


def _table_lines(scaling: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table, the verdict, what was left out, and the assumptions."""
    table = [_HEAD, *(_cells(row) for row in scaling["rows"])]
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  " + "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in zip(*columns, strict=True)]
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


def _check_figure(path: Path | None, world: int) -> None:
    """Refuse an impossible --figure before anything is planned."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise UsageError("the figure can only be an SVG file.", where="--figure", fix="Use a name that ends in .svg.")
    if world == 1:
        raise UsageError(
            "the figure compares numbers of cards, and there is only one.",
            where="--figure",
            fix="Add --gpus N or --nodes N.",
        )


def _write_figure(path: Path, scaling: Mapping[str, Any], title: str) -> None:
    if scaling["pays_up_to"] is None:
        raise UserError(f"there is nothing to draw: {scaling['verdict']}.", where="--figure")
    from redline.runs.report.figures import scaling_svg

    try:
        path.write_text(scaling_svg(scaling, title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}.", where=str(path), fix="Choose another path.") from None
