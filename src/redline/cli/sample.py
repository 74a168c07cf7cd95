"""redline sample"""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import CheckpointArgument, DeviceOption, JsonOption, WeightsOption
from redline.cli.paths import RUNS


def sample(
    run: CheckpointArgument = "latest",
    prompt: Annotated[str, typer.Option(help="What to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens at most.")] = 200,
    count: Annotated[int, typer.Option(min=1, help="How many continuations.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Only the likeliest, up to this total.")] = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Let a trained model write.

    Examples:
      redline sample latest --prompt "def "
      redline sample runs/quickstart-20261115-101500@best --count 3 --temperature 0.7
    """
    from redline.errors import UserError
    from redline.monitor.runs import resolve_run

    path, selector = resolve_run(run, RUNS)
    from redline.evaluate.trained import open_trained
    from redline.objectives.base import Sampling

    trained = open_trained(
        path,
        selector,
        weights=weights,
        device=device,
        writes_only=True,
        say=lambda text: typer.echo(text, err=True),
    )
    samples = trained.objective.sample(prompt, Sampling(count, tokens, seed, temperature, top_k, top_p))
    if not samples:
        fix = "Point REDLINE_GPT2 at a tokenizer.json, or put one beside the token files."
        raise UserError("the tokenizer's files are not here, so tokens cannot be turned into text.", fix=fix)
    if json_:
        import json

        rows = [{"prompt": s.prompt, "text": s.text} for s in samples]
        typer.echo(json.dumps({"run": str(path), "step": trained.step, "weights": trained.weights, "samples": rows}))
        return
    for one in samples:
        typer.secho(one.prompt, bold=True, nl=False)
        typer.echo(one.text)
        if count > 1:
            typer.echo("—" * 40)
