"""redline runs"""

from __future__ import annotations

import typer

from redline.cli.options import JsonOption
from redline.cli.paths import RUNS


def runs(json_: JsonOption = False) -> None:
    """List the runs in ./runs: status, step, loss, cost, disk.

    Examples:
      redline runs
      redline runs --json
    """
    from redline.monitor.runs import find_runs

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

    from redline.units import format_bytes, format_count, format_seconds, format_usd

    def show(value: float | None, form: object = "{:.4f}") -> str:
        if value is None:
            return "–"
        return form(value) if callable(form) else str(form).format(value)

    table = Table(box=None, header_style="dim")
    for name in ("run", "status", "step", "loss", "val loss", "tokens", "time", "cost", "disk"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=name == "run")
    for s in found:
        seconds = None if s.hours is None else s.hours * 3600
        table.add_row(
            s.name,
            s.status,
            show(s.step, "{:,}"),
            show(s.loss),
            show(s.val_loss),
            show(s.tokens, format_count),
            show(seconds, format_seconds),
            show(s.cost_usd, format_usd),
            format_bytes(s.disk_bytes),
        )
    Console().print(table)
