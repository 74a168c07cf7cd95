"""redline runs"""

from __future__ import annotations

from collections.abc import Callable

import typer

from redline.cli.options import JsonOption
from redline.cli.paths import RUNS
from redline.monitor.runs import RunSummary, find_runs
from redline.units import format_bytes, format_seconds, format_usd


def runs(json_: JsonOption = False) -> None:
    """List the runs in ./runs: status, step, loss, cost, disk.

    Examples:
      redline runs
      redline runs --json
    """
    found = find_runs(RUNS)
    if json_:
        import json

        typer.echo(json.dumps([summary.as_dict() for summary in found]))
        return
    if not found:
        typer.echo("No runs in ./runs yet; `redline train` makes one.")
        return
    from rich.console import Console
    from rich.table import Table

    columns = {name: show for name, show in _COLUMNS.items() if any(show(run) != MISSING for run in found)}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
    for run in found:
        table.add_row(*(show(run) for show in columns.values()))
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=200)).print(table)


MISSING = "–"


def _or_missing(value: float | None, form: Callable[[float], str]) -> str:
    return MISSING if value is None else form(value)


_COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "status": lambda run: run.status,
    "step": lambda run: _or_missing(run.step, "{:,}".format),
    "loss": lambda run: _or_missing(run.loss, "{:.3f}".format),
    "val": lambda run: _or_missing(run.val_loss, "{:.3f}".format),
    "time": lambda run: _or_missing(run.hours, lambda hours: format_seconds(3600 * hours)),
    "cost": lambda run: _or_missing(run.cost_usd, format_usd),
    "disk": lambda run: format_bytes(run.disk_bytes),
}
