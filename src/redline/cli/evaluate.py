"""redline eval"""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import CheckpointArgument, DeviceOption, JsonOption, WeightsOption
from redline.cli.paths import RUNS


def evaluate(
    run: CheckpointArgument = "latest",
    data: Annotated[str | None, typer.Option(help="Other text or tokens than the run's validation split.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="How many sequences; all if not given.")] = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Loss, perplexity and bits per byte of a trained model.

    Examples:
      redline eval latest
      redline eval latest@best --data ./held-out.txt --json
    """
    from redline.monitor.runs import resolve_run

    path, selector = resolve_run(run, RUNS)
    from redline.evaluate.trained import open_trained

    trained = open_trained(
        path,
        selector,
        weights=weights,
        device=device,
        source=data,
        sequences=sequences or 1 << 40,
        say=lambda text: typer.echo(text, err=True),
    )
    metrics = trained.objective.evaluate(trained.micro)
    if json_:
        import json

        typer.echo(json.dumps({"run": str(path), "step": trained.step, "weights": trained.weights, **metrics}))
        return
    typer.echo(f"{path} at step {trained.step} ({trained.weights} weights)")
    for name, value in metrics.items():
        typer.echo(f"  {name:14s} {'unknown' if value is None else f'{value:.4f}'}")
