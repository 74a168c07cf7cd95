"""redline chat"""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import (
    MOST_TOKENS,
    BaseOption,
    DeviceOption,
    ModelArgument,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
)
from redline.errors import EXIT_FAILED


def chat(
    run: ModelArgument = "latest",
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The system prompt. Default: that of the training rows, else the chat template's."
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="base|RUN", help="Show another model's answers beside: the run's own base, a run or a model."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, metavar="N", help="Most tokens of one answer.")] = 1024,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    top_p: TopPOption = 0.95,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, metavar="N", help="The same seed and messages give the same answers.")
    ] = 0,
    base: BaseOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Chat with a run or a model in the terminal.

    Ctrl-C stops an answer, /help lists the commands. Without a terminal each line of the input is a message.

    Examples:
      redline chat latest --system "Answer in one sentence."
      redline chat runs/qlora-smollm2-20261115-101500@best --beside base
    """
    import sys

    def log(text: str) -> None:
        typer.echo(text, err=True)

    from redline.play.models import base_of, open_play_model

    model = open_play_model(run, run, log=log, base=base, weights=weights, device=device)
    from redline.jobs.objective import Sampling
    from redline.play.conversation import Conversation, Side, converse

    sides = [Side(model, run, system)]
    if beside is not None:
        other = (base or base_of(model)) if beside == "base" else beside
        sides.append(Side(open_play_model(other, other, log=log, device=device), other, system))
        if sides[1].system is None and sides[1].panel.system is None and model.panels:
            sides[1].system = sides[0].panel.system  # both answer under the prompt that the run was trained with
    conversation = Conversation(sides, Sampling(1, tokens, seed, temperature, top_k, top_p), sys.stdout)
    if not sys.stdin.isatty():
        if not converse(conversation, interactive=False):
            raise typer.Exit(EXIT_FAILED)
        return
    import readline  # noqa: F401  # gives `input` a history and line editing

    typer.echo(" beside ".join(side.model.opened.title for side in sides))
    if (used := sides[0].system or sides[0].panel.system) is not None:
        typer.echo(f"system: {used}")
    typer.echo("/help lists the commands, Ctrl-D leaves.\n")
    converse(conversation)
