"""redline export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import CheckpointArgument, JsonOption, WeightsOption, one_of
from redline.cli.paths import RUNS


def export(
    run: CheckpointArgument = "latest",
    *,
    out: Annotated[Path, typer.Option(help="The folder to make; it must be new or empty.")],
    weights: WeightsOption = None,
    dtype: Annotated[
        str, typer.Option(callback=one_of("--dtype", "fp32", "bf16", "fp16"), help="fp32, bf16 or fp16.")
    ] = "fp32",
    json_: JsonOption = False,
) -> None:
    """Write a trained model as a folder that transformers loads.

    Examples:
      redline export latest --out ./my-model
      redline export latest@best --out ./my-model-bf16 --dtype bf16
    """
    from redline.monitor.runs import resolve_run
    from redline.units import format_bytes, format_count

    path, selector = resolve_run(run, RUNS)
    from redline.export.folder import export_run

    done = export_run(
        path, selector, out, weights=weights, dtype=dtype, say=lambda text: typer.echo(f"warning  {text}", err=True)
    )
    if json_:
        import json

        typer.echo(json.dumps({"run": str(path), "dtype": dtype, **vars(done), "out": str(out)}))
        return
    size = f"{format_count(done.parameters)} parameters, {format_bytes(sum(done.files.values()))}"
    typer.echo(f"{path} at step {done.step} ({done.weights} weights, {dtype}) → {out}: {done.architecture}, {size}")
    for name, length in done.files.items():
        typer.echo(f"  {name:24s} {format_bytes(length)}")
    typer.echo(f"load it with transformers: AutoModelForCausalLM.from_pretrained({str(out)!r})")
