"""redline bench"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.options import JsonOption, split_words
from redline.errors import EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from redline.bench.record import Record, Row

app = typer.Typer(rich_markup_mode="rich", add_completion=False, no_args_is_help=True)
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE …]", help="Another recipe than the benchmark's own, and overrides."),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Write the JSON to this new file too, row by row.")]


@app.callback()
def bench() -> None:
    """Measure this machine: [bold]throughput[/bold], [bold]plan-accuracy[/bold] or [bold]startup[/bold].

    Examples:
      redline bench throughput
      redline bench plan-accuracy --out plan.json
      redline bench startup --json
    """


@app.command("throughput")
def throughput(words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None) -> None:
    """Tokens a second of the real loop, beside the plain compiled step and transformers' Llama.

    Examples:
      redline bench throughput
      redline bench throughput data.source=./tokens train.steps=100 --out throughput.json
    """
    from redline.bench.setting import choose_setting
    from redline.bench.throughput import DEFAULTS, run_throughput, with_ratios

    _refuse_existing(out)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, DEFAULTS)
    record = _record("throughput", setting.machine, out, recipe=setting.name, overrides=list(setting.overrides))
    _collect(record, run_throughput(setting))
    record.rows = with_ratios(record.rows)
    _show(record, json_, _throughput_line)
    if "error" in record.rows[0]:
        raise typer.Exit(EXIT_FAILED)  # a peer may be missing, redline itself may not


@app.command("plan-accuracy")
def plan_accuracy(words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None) -> None:
    """Planned against measured memory and tokens/s, by a few real steps of each configuration.

    Examples:
      redline bench plan-accuracy
      redline bench plan-accuracy pretrain-350m train.micro_batch=32 --json
    """
    _refuse_existing(out)
    name, overrides = split_words(words)
    from redline.recipe.load import load

    device = load(name or "pretrain-350m", overrides).recipe.train.device
    from redline.bench.plan_accuracy import cases, run_plan_accuracy
    from redline.hardware.detect import detect

    machine = detect(device)
    record = _record("plan-accuracy", machine, out)
    _collect(record, run_plan_accuracy(cases(name, overrides, machine.device), machine))
    _show(record, json_, _accuracy_line)
    if all("error" in row for row in record.rows):
        raise typer.Exit(EXIT_FAILED)


@app.command("startup")
def startup(words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None) -> None:
    """Seconds from the command to the first step: caches empty, then warm.

    Examples:
      redline bench startup
      redline bench startup quickstart train.compile=false --json
    """
    from redline.bench.setting import choose_setting
    from redline.bench.startup import COMPILED_TINY, DEFAULTS, run_startup

    _refuse_existing(out)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, DEFAULTS, COMPILED_TINY)
    record = _record("startup", setting.machine, out, recipe=setting.name, overrides=list(setting.overrides))
    _collect(record, run_startup(setting))
    _show(record, json_, _startup_line)
    if any("error" in row for row in record.rows):
        raise typer.Exit(EXIT_FAILED)


def _refuse_existing(out: Path | None) -> None:
    """Before anything is measured: nothing is overwritten, and nothing is measured that cannot be kept."""
    if out is not None and out.exists():
        raise UsageError("is there already.", where=str(out), fix="Choose another --out, or remove it.")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError("there is no such folder.", where=str(out.parent), fix="Make it, or choose another --out.")


def _record(benchmark: str, machine: Any, out: Path | None, **about: Any) -> Record:
    from redline.bench.record import Record

    typer.echo(f"redline bench {benchmark} · {machine.name}", err=True)
    for key, value in about.items():
        typer.echo(f"  {key:10} {' '.join(value) if isinstance(value, list) else value}", err=True)
    if machine.device == "cpu":
        typer.echo("  without a GPU this shows that the benchmark works, and no speed to speak of", err=True)
    return Record(benchmark, machine, about, out)


def _collect(record: Record, rows: Iterator[Row]) -> None:
    for row in rows:
        record.add(row)
        why = f": {row['error']}" if "error" in row else ""
        typer.echo(f"  {'no figure' if why else 'done':10} {row.get('name', row.get('case'))}{why}", err=True)


def _show(record: Record, json_: bool, line: Callable[[Row], str]) -> None:
    record.save()
    if json_:
        import json

        typer.echo(json.dumps(record.result()))
        return
    for row in record.rows:
        typer.echo(line(row))


def _throughput_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:14} no figure: {row['error']}"
    share = f"{row['mfu']:7.1%} MFU" if row["mfu"] is not None else ""
    memory = f"{row['memory_gib']:7.1f} GiB" if row["memory_gib"] is not None else ""
    ratio = f"redline is {row['redline_is']:.2f}×" if "redline_is" in row else ""
    return (
        f"{row['name']:14}{row['tokens_per_s']:11,.0f} tok/s {share}{row['step_ms']:9.1f} ms a step {memory}"
        f"   micro-batch {row['micro_batch']}   {ratio}"
    )


def _accuracy_line(row: Row) -> str:
    if "error" in row:
        return f"{row['case']:60} {row['error']}"
    planned, measured = row["planned"], row["measured"]
    memory, rate = (
        "" if row[key] is None else f"({row[key]:+.1%})" for key in ("memory_gib_error", "tokens_per_s_error")
    )
    speed = f"{planned['tokens_per_s']:,.0f} → " if planned["tokens_per_s"] else ""
    there = measured["memory_gib"] or 0.0
    return (
        f"{row['case']:60} {planned['memory_gib']:.1f} → {there:.1f} GiB {memory}   "
        f"{speed}{measured['tokens_per_s']:,.0f} tok/s {rate}"
    )


def _startup_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:6} {row['error']}"
    return (
        f"{row['name']:6}{row['to_first_step_s']:7.1f} s to the first step: {row['imports_data_model_s']:.1f} imports, "
        f"data and model, {row['warmup_s']:.1f} warm-up, {row['evaluation_and_step_s']:.1f} evaluation and step"
    )
