"""redline play"""

from __future__ import annotations

import typer

from redline.cli.options import (
    BaseOption,
    DeviceOption,
    HostOption,
    PortOption,
    RunsArgument,
    TokenOption,
    WeightsOption,
)
from redline.errors import EXIT_INTERRUPTED


def play(
    runs: RunsArgument = None,
    port: PortOption = None,
    host: HostOption = "127.0.0.1",
    token: TokenOption = False,
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

    from redline.runs.live.local_server import check_address, serve_until_interrupted, ssh_line

    check_address(host, port)  # loading a model may take minutes
    from redline.play.models import open_models

    options = {"base": base, "weights": weights, "device": device}
    names = list(dict.fromkeys(runs or ["latest"]))
    models = open_models(names, log=log, **options)
    from redline.play.app import open_play_server

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
