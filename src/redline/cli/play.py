"""redline play"""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import BaseOption, DeviceOption, RunsArgument, WeightsOption
from redline.errors import EXIT_INTERRUPTED


def play(
    runs: RunsArgument = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="The port of the page. Default: the first free one from 8770."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The address to listen on. Any other than loopback requires the token in the printed URL.",
        ),
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Require the token on loopback too, on a machine that others use.")
    ] = False,
    base: BaseOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Try models in the browser, and serve them in the form of OpenAI's API.

    RUN is a run, a checkpoint of one (RUN@STEP), or a model as for `redline sample`. With several, any two answer the
    same prompt side by side.

    Examples:
      redline play latest
      redline play first@100 first@best HuggingFaceTB/SmolLM2-135M-Instruct --port 9000
    """

    def log(text: str) -> None:
        typer.echo(text, err=True)

    from redline.play.models import open_models

    options = {"base": base, "weights": weights, "device": device}
    names = list(dict.fromkeys(runs or ["latest"]))
    models = open_models(names, log=log, **options)
    from redline.play.app import open_play_server
    from redline.runs.live.local_server import serve_until_interrupted, ssh_line

    server, address = open_play_server(models, host, port, token)
    for model in models:
        typer.echo(f"model     {model.name}: {model.opened.title}")
    typer.echo(f"page      {address}")
    typer.echo(
        f"API       {address.partition('?')[0]}v1" + ("  (its key is the token)" if "?token=" in address else "")
    )
    if line := ssh_line(host, server.port):
        typer.echo(f"first run on your own machine:  {line}")
    typer.echo("Ctrl-C stops the page and the API.")
    serve_until_interrupted(server)
    raise typer.Exit(EXIT_INTERRUPTED)
