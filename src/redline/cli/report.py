"""redline report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import JsonOption, RunsArgument
from redline.errors import UsageError


def report(
    runs: RunsArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page to write. Default: RUN/report.html; for several runs comparison.html beside the first.",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Write an HTML page about a run, or compare several on one page.

    The page is a single file that needs no network connection.

    Examples:
      redline report latest
      redline report latest --out /tmp/run.html
      redline report first second third
    """
    if json_ and out is not None:
        raise UsageError("--json writes no page.", where="--out", fix="Leave out --out or --json.")
    from redline.runs.summary import run_without_checkpoint

    paths = list(dict.fromkeys(run_without_checkpoint(run) for run in runs or ["latest"]))
    if len(paths) < len(runs or []):
        typer.echo("warning  a run is named more than once; it is shown once", err=True)
    if json_:
        import json

        from redline.runs.events import only_finite

        typer.echo(json.dumps(only_finite(_data(paths)), default=str, allow_nan=False))
        return
    from redline.runs.report.page import write_report

    if len(paths) == 1:
        typer.echo(str(write_report(paths[0], out)))
        return
    from redline.runs.report.compare import write_comparison

    typer.echo(str(write_comparison(paths, out)))


def _data(paths: list[Path]) -> object:
    if len(paths) == 1:
        from redline.runs.report.page import report_data

        return report_data(paths[0])
    from redline.runs.report.compare import comparison_data

    return comparison_data(paths)
