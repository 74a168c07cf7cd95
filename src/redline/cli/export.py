"""redline export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redline.cli.completion import complete_words
from redline.cli.options import BaseOption, CheckpointArgument, JsonOption, WeightsOption, one_of
from redline.vocabulary import RUNS


def export(
    run: CheckpointArgument = "latest",
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must be new or empty.")],
    weights: WeightsOption = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="fp32|bf16|fp16",
            callback=one_of("--dtype", "fp32", "bf16", "fp16"),
            autocompletion=complete_words("fp32", "bf16", "fp16"),
            help="The data type of the weights.",
        ),
    ] = "fp32",
    merged: Annotated[bool, typer.Option("--merged", help="Merge adapters into their base model.")] = False,
    onto: Annotated[
        str | None,
        typer.Option(
            metavar="trained|original",
            callback=one_of("--onto", "trained", "original"),
            autocompletion=complete_words("trained", "original"),
            help="With --merged: merge into the (dequantised) base that was trained against, or into the original.",
        ),
    ] = None,
    base: BaseOption = None,
    json_: JsonOption = False,
) -> None:
    """Export a trained model for transformers, or an adapter for peft.

    Examples:
      redline export latest --out ./my-model
      redline export latest@best --out ./my-model-bf16 --dtype bf16
      redline export my-tuning --out ./my-merged --merged
    """
    from redline.runs.summary import resolve_run
    from redline.units import format_bytes, format_count

    path, selector = resolve_run(run, RUNS)
    from redline.export.folder import export_run

    done = export_run(
        path,
        selector,
        out,
        weights=weights,
        dtype=dtype,
        merged=merged,
        onto=onto,
        base=base,
        log=lambda text: typer.echo(f"warning  {text}", err=True),
    )
    if json_:
        import json

        typer.echo(json.dumps({"run": str(path), "dtype": dtype, **vars(done), "out": str(out)}))
        return
    kind = f"adapter for {done.architecture}" if done.form == "adapter" else done.architecture
    size = f"{format_count(done.parameters)} parameters, {format_bytes(sum(done.files.values()))}"
    typer.echo(f"{path} at step {done.step} ({done.weights} weights, {dtype}) → {out}: {kind}, {size}")
    width = max(24, *map(len, done.files))
    for name, length in done.files.items():
        typer.echo(f"  {name:{width}s} {format_bytes(length)}")
    if done.quantisation_difference is not None:
        difference = f"{done.quantisation_difference:.2%}"
        typer.echo(
            f"merged onto the original base, which differs by {difference} from the base that was trained against"
        )
    if done.form == "adapter":  # the code names the base, its revision and the stop tokens: too much for one line
        typer.echo(f"load it with peft: the code is in {out / 'README.md'}")
    else:
        from redline.export.card import auto_class

        typer.echo(f"load it with transformers: {auto_class(done.architecture)}.from_pretrained({str(out)!r})")
