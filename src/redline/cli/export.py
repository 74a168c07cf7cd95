"""redline export"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.completion import complete_words
from redline.cli.options import BaseOption, CheckpointArgument, JsonOption, WeightsOption, one_of
from redline.errors import UsageError
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.export.folder import Exported

QUANTS = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")


def export(
    run: CheckpointArgument = "latest",
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must be new or empty.")],
    weights: WeightsOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|bf16|fp16",
            callback=one_of("--dtype", "fp32", "bf16", "fp16"),
            autocompletion=complete_words("fp32", "bf16", "fp16"),
            help="The data type of the weights.  [default: fp32]",
        ),
    ] = None,
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
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="transformers|gguf",
            callback=one_of("--format", "transformers", "gguf"),
            autocompletion=complete_words("transformers", "gguf"),
            help="gguf: one file for llama.cpp, Ollama and LM Studio.",
        ),
    ] = "transformers",
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(QUANTS),
            callback=one_of("--quant", *QUANTS),
            autocompletion=complete_words(*QUANTS),
            help="With --format gguf: the type of the matrices.  [default: f16]",
        ),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="With --format gguf: compare the file in llama.cpp with the run.  [default: if it is installed]",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Also push the folder to the Hugging Face hub, as one commit."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is public.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --push: write the folder and list its files, but send nothing.")
    ] = False,
    base: BaseOption = None,
    json_: JsonOption = False,
) -> None:
    """Export a trained model for transformers, for llama.cpp, or an adapter for peft.

    Examples:
      redline export latest --out ./my-model
      redline export latest@best --out ./my-model-bf16 --dtype bf16
      redline export my-tuning --out ./my-merged --merged
      redline export my-tuning --out ./my-gguf --format gguf --quant q8_0
      redline export my-tuning --out ./my-model --merged --push me/my-model
    """
    gguf = format_ == "gguf"
    if not gguf and (quant is not None or verify is not None):
        name = "--quant" if quant is not None else "--verify"
        raise UsageError("is for a GGUF file.", where=name, fix="Add --format gguf.")
    if gguf and dtype is not None:
        raise UsageError("is not for a GGUF file.", where="--dtype", fix=f"Use --quant {' or '.join(QUANTS[:3])}.")
    if push is None and (public or dry_run):
        raise UsageError("goes with --push.", where="--public" if public else "--dry-run", fix="Add --push OWNER/NAME.")
    if push is not None:
        from redline.export.push import check_push

        check_push(push, dry_run=dry_run)
    from redline.runs.summary import resolve_run
    from redline.units import format_bytes, format_count

    path, selector = resolve_run(run, RUNS)
    from redline.export.folder import export_run

    def warn(text: str) -> None:
        typer.echo(f"warning  {text}", err=True)

    done = export_run(
        path,
        selector,
        out,
        weights=weights,
        dtype=dtype or "fp32",
        merged=merged,
        onto=onto,
        base=base,
        quant=(quant or "f16") if gguf else None,
        verify=verify,
        reuse=push is not None,
        log=warn,
    )
    sent = None if push is None else _push(done, push, path, public=public, dry_run=dry_run, log=warn)
    stored = done.quant or dtype or "fp32"
    if json_:
        import json

        typer.echo(json.dumps({"run": str(path), "dtype": stored, **vars(done), "out": str(out), "pushed": sent}))
        return
    kind = f"adapter for {done.architecture}" if done.form == "adapter" else done.architecture
    size = f"{format_count(done.parameters)} parameters, {format_bytes(sum(done.files.values()))}"
    typer.echo(f"{path} at step {done.step} ({done.weights} weights, {stored}) → {out}: {kind}, {size}")
    width = max(24, *map(len, done.files))
    for name, length in done.files.items():
        typer.echo(f"  {name:{width}s} {format_bytes(length)}")
    if done.quantisation_difference is not None:
        difference = f"{done.quantisation_difference:.2%}"
        typer.echo(
            f"merged onto the original base, which differs by {difference} from the base that was trained against"
        )
    if done.quant is not None:
        for line in _verified(done.verified):
            typer.echo(line)
        typer.echo(f"load it with llama.cpp, LM Studio, or Ollama: ollama create my-model -f {out / 'Modelfile'}")
    elif any(name.startswith("modeling_") for name in done.files):
        typer.echo(f"load it with transformers and the code beside it: {out / 'README.md'} shows how")
    elif done.form == "adapter":  # the code names the base, its revision and the stop tokens: too much for one line
        typer.echo(f"load it with peft: the code is in {out / 'README.md'}")
    else:
        from redline.export.card import auto_class

        typer.echo(f"load it with transformers: {auto_class(done.architecture)}.from_pretrained({str(out)!r})")
    if sent is not None:
        kind = "private" if sent["private"] else "public"
        where = f"{len(sent['files'])} files to {sent['repository']} ({kind})"
        typer.echo(f"would push {where}" if dry_run else f"pushed {where}, commit {sent['commit'][:12]}: {sent['url']}")


def _push(
    done: Exported, repository: str, run: Path, *, public: bool, dry_run: bool, log: Callable[[str], None]
) -> dict[str, Any]:
    """Push the exported folder, or list its files; return what `--json` prints about it."""
    from redline.export.push import files_to_push, push

    if dry_run:
        listed = {"repository": repository, "private": not public, "files": files_to_push(done.out)}
        return {**listed, "url": None, "commit": None, "dry_run": True}
    message = f"{run.name}, step {done.step} ({done.quant or done.form})"
    return {**vars(push(done.out, repository, public=public, message=message, log=log)), "dry_run": False}


def _of_probabilities(found: Mapping[str, Any]) -> str:
    """Return the largest difference of a probability, which older exports do not record."""
    largest = found.get("probability_difference_max")
    return "" if largest is None else f"; of their probabilities: largest {largest:.2g}"


def _verified(found: Mapping[str, Any] | None) -> list[str]:
    """Return what the check in llama.cpp found, as lines."""
    if found is None:
        return ["not compared with the run"]
    prompts, parted = found["prompts"], found["prompts"] - found["greedy_equal"]
    lines = [
        f"in llama.cpp ({found['package']}), {prompts} prompts, {found['tokens']} tokens: the greedy text is the run's "
        f"for {prompts - parted} of {prompts}",
        f"difference of the top {found['top_tokens']} log-probabilities: mean {found['logprob_difference_mean']:.2g}, "
        f"99th percentile {found['logprob_difference_p99']:.2g}, largest {found['logprob_difference_max']:.2g}"
        f"{_of_probabilities(found)}",
    ]
    if found["chats_equal"] is not None:
        lines.append(
            f"chat template: the run's tokens for {found['chats_equal']} of {prompts} questions; "
            f"{found['ended']} answers ended by themselves, where the run ends {found['ended_by_run']} of them"
        )
    return lines
