"""redline watch"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import JsonOption
from redline.errors import EXIT_INTERRUPTED, UsageError
from redline.runs.summary import RUNS, whole_run

if TYPE_CHECKING:
    from pathlib import Path


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs: path, name or latest. None: those in ./runs, as they begin."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The page's port; the first free one from 8770 if not given.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="An address of this machine. Any but loopback asks for the token in the printed URL.")
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token on loopback, too: others work on this machine.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot as text and leave.")] = False,
    json_: JsonOption = False,
) -> None:
    """Look at runs while they train: a live page for the browser, or one snapshot.

    Examples:
      redline watch
      redline watch first second --port 9000
      redline watch latest --once
    """
    if json_ and not once:
        raise UsageError("is for a snapshot.", where="--json", fix="Write --once --json.")
    named = list(dict.fromkeys(whole_run(run) for run in runs or (["latest"] if once else [])))
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
    from redline.runs.live.server import open_server, ssh_line
    from redline.runs.live.watch import Watch

    server, address = open_server(Watch(RUNS, named), host, port, token)
    typer.echo(f"watching  {' '.join(map(str, named)) or f'{RUNS}/, also what begins later'}")
    typer.echo(f"page      {address}")
    if line := ssh_line(host, server.port):
        typer.echo(f"from your own machine first:  {line}")
    typer.echo("Ctrl-C ends the page; runs go on.")
    server.serve_forever()  # comes back after Ctrl-C, with its socket closed
    raise typer.Exit(EXIT_INTERRUPTED)
