"""redline report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import JsonOption
from redline.errors import UsageError
from redline.runs.summary import whole_run


def report(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs: path, name or latest. Several are compared.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page; RUN/report.html, or comparison.html beside the first run, if not given."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several side by side.

    Examples:
      redline report latest
      redline report latest --out /tmp/run.html
      redline report first second third
    """
    if json_ and out is not None:
        raise UsageError("--json writes no page.", where="--out", fix="Leave one of them out.")
    paths = list(dict.fromkeys(whole_run(run) for run in runs or ["latest"]))
    if len(paths) < len(runs or []):
        typer.echo("a run that is named twice is one: it is shown once", err=True)
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
