"""redline sample"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from redline.cli.evaluate import BaseOption, ModelArgument, open_model
from redline.cli.options import MOST_TOKENS, DeviceOption, JsonOption, SetOption, WeightsOption


def sample(
    run: ModelArgument = "latest",
    prompt: Annotated[str, typer.Option(help="What to continue, or to answer.")] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue the prompt as it stands, not as a question.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="How many tokens at most.")] = 200,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="How many continuations.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Only the likeliest, up to this total.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    settings: SetOption = None,
    base: BaseOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Let a model write: continue a text, or answer a question where it was fine-tuned to.

    Examples:
      redline sample latest --prompt "def "
      redline sample runs/quickstart-20261115-101500@best --count 3 --temperature 0.7
      redline sample HuggingFaceTB/SmolLM2-135M-Instruct --prompt "Why is the sky blue?"
    """
    from redline.errors import UsageError, UserError

    trained = open_model(run, weights=weights, base=base, device=device, writes_only=True, settings=settings or ())
    from redline.objectives.base import Sampling

    how = Sampling(count, tokens, seed, temperature, top_k, top_p)
    objective = trained.objective
    objective.tell = lambda text: typer.echo(text, err=True)
    prompt = os.fsencode(prompt).decode("utf-8", "replace")  # as a terminal would show it
    samples = objective.continuation(prompt, how) if plain else objective.sample(prompt, how)
    if not samples and objective.can_answer and not prompt:
        raise UsageError("there is nothing to answer.", where="--prompt", fix='Ask something: --prompt "…".')
    if not samples:
        fix = "Point REDLINE_GPT2 at a tokenizer.json, or put one beside the token files."
        raise UserError("the tokenizer's files are not here, so tokens cannot be turned into text.", fix=fix)
    if json_:
        import json

        rows = [{"prompt": s.prompt, "text": s.text} for s in samples]
        typer.echo(json.dumps({**trained.about(), "samples": rows}))
        return
    for one in samples:
        typer.secho(one.prompt, bold=True, nl=objective.can_answer and not plain)
        typer.echo(one.text)
        if count > 1:
            typer.echo("—" * 40)
