"""redline watch"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import HostOption, JsonOption, PortOption, RunsArgument, TokenOption
from redline.errors import EXIT_INTERRUPTED, UsageError
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from pathlib import Path


def watch(
    runs: RunsArgument = None,
    port: PortOption = None,
    host: HostOption = "127.0.0.1",
    token: TokenOption = False,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot as text and exit.")] = False,
    json_: JsonOption = False,
) -> None:
    """Show runs while they train, in the browser or as text.

    Without RUN, the page shows all runs in ./runs, including those that start later.

    Examples:
      redline watch
      redline watch first second --port 9000
      redline watch latest --once
    """
    if json_ and not once:
        raise UsageError("--json prints a snapshot and needs --once.", where="--json", fix="Add --once.")
    from redline.runs.summary import run_without_checkpoint

    named = list(dict.fromkeys(run_without_checkpoint(run) for run in runs or (["latest"] if once else [])))
    if once:
        _snapshots(named, json_)
    else:
        _serve(named, host, port, token)


def _snapshots(named: list[Path], json_: bool) -> None:
    import time

    from redline.runs.live.watch import WatchedRun, snapshot

    taken = [snapshot(WatchedRun(path, path.name), time.time()) for path in named]
    if json_:
        import json

        typer.echo(json.dumps([summary for summary, _ in taken], default=str))
    else:
        typer.echo("\n\n".join("\n".join(lines) for _, lines in taken))


def _serve(named: list[Path], host: str, port: int | None, token: bool) -> None:
    from redline.runs.live.local_server import serve_until_interrupted, ssh_line
    from redline.runs.live.server import open_server
    from redline.runs.live.watch import Watch

    server, address = open_server(Watch(RUNS, named), host, port, token)
    typer.echo(f"watching  {' '.join(map(str, named)) or f'{RUNS}/, and runs that start later'}")
    typer.echo(f"page      {address}")
    if line := ssh_line(host, server.port):
        typer.echo(f"first run on your own machine:  {line}")
    typer.echo("Ctrl-C stops the page; the runs continue.")
    serve_until_interrupted(server)
    raise typer.Exit(EXIT_INTERRUPTED)
