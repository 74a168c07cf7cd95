"""redline report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import JsonOption, RunArgument
from redline.cli.paths import RUNS


def report(
    run: RunArgument = "latest",
    out: Annotated[Path | None, typer.Option(help="The HTML file; RUN/report.html if not given.")] = None,
    json_: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a run.

    Examples:
      redline report latest
      redline report latest --out /tmp/run.html
    """
    from redline.monitor.report import report_data, write_report
    from redline.monitor.runs import resolve_run

    path, _ = resolve_run(run, RUNS)
    if json_:
        import json

        typer.echo(json.dumps(report_data(path), default=str))
        return
    typer.echo(str(write_report(path, out)))
