"""redline bench: throughput and start-up time of this machine.

Comparisons with other trainers are not part of the package; `benchmarks/` in the source checkout has them
(`make bench`). That package reuses the helpers below.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from redline.cli.completion import complete_recipes
from redline.cli.help import VerbCommand, VerbGroup
from redline.cli.options import JsonOption, split_words
from redline.errors import EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from redline.bench.record import Record, Row
    from redline.bench.setting import Setting

app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False, no_args_is_help=True)
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [key=value ...]",
        autocompletion=complete_recipes,
        help="RECIPE: A shipped recipe or a YAML file. Default: the benchmark's own.\n"
        "key=value: Recipe keys to change, for example train.steps=100.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="Write the result to a folder or to a new FILE.json.")
]
OnlyOption = Annotated[
    str | None, typer.Option("--only", metavar="WORD[,WORD]", help="Run only the rows whose name contains a word.")
]


@app.callback()
def bench() -> None:
    """Measure training throughput or start-up time on this machine.

    Examples:
      redline bench throughput
      redline bench startup --json
    """


@app.command("throughput", cls=VerbCommand)
def throughput(
    words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: OnlyOption = None
) -> None:
    """Measure tokens per second of the training loop: as shipped, in fp8, and with torch.compile alone.

    Examples:
      redline bench throughput
      redline bench throughput data.source=./tokens train.steps=100 --out throughput.json
    """
    from redline.bench.record import check_out
    from redline.bench.setting import choose_setting
    from redline.bench.throughput import DEFAULTS, add_ratios, contenders, run_throughput, select

    check_out(out)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, DEFAULTS)
    chosen = select(contenders(setting.recipe), only)
    record = open_record("throughput", setting, out)
    collect(record, run_throughput(setting, chosen))
    record.rows = add_ratios(record.rows)
    show_rows(record, json_, throughput_line)
    if "error" in record.rows[0]:
        raise typer.Exit(EXIT_FAILED)


@app.command("startup", cls=VerbCommand)
def startup(words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None) -> None:
    """Measure the seconds from the command to the first step, with empty and with warm caches.

    Examples:
      redline bench startup
      redline bench startup quickstart train.compile=false --json
    """
    from redline.bench.record import check_out
    from redline.bench.setting import choose_setting
    from redline.bench.startup import COMPILED_TINY, DEFAULTS, run_startup

    check_out(out)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, DEFAULTS, COMPILED_TINY)
    record = open_record("startup", setting, out)
    collect(record, run_startup(setting))
    show_rows(record, json_, startup_line)
    if any("error" in row for row in record.rows):
        raise typer.Exit(EXIT_FAILED)


def _add_moved_command(name: str) -> None:
    """Register a verb of earlier versions; it answers with the command that replaces it."""

    @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def moved() -> None:
        what = f"`redline bench {name}` is not part of the package any more: it compares redline with other programs."
        raise UsageError(what, fix=f'Run `make bench ARGS="{name} …"` in a checkout of redline\'s source.')


for _name in ("finetune", "latent", "plan-accuracy", "time-to-loss"):
    _add_moved_command(_name)


# --- shared with benchmarks/


def start_record(record: Record) -> Record:
    """Print what is about to be measured, and on which machine."""
    typer.echo(f"bench {record.benchmark} · {record.machine.name}", err=True)
    for key, value in record.about.items():
        typer.echo(f"  {key:10} {' '.join(value) if isinstance(value, list) else value}", err=True)
    return record


def open_record(
    benchmark: str, setting: Setting, out: Path | None, make: Callable[..., Record] | None = None
) -> Record:
    """Return an empty record of the benchmark for this recipe; `make` is a subclass of Record."""
    from redline.bench.record import Record, file_for

    file = file_for(out, benchmark, setting.machine)
    about = {"recipe": setting.name, "overrides": list(setting.overrides)}
    record = start_record((make or Record)(benchmark, setting.machine, about, file))
    if setting.machine.device == "cpu":
        typer.echo("  no GPU: this run shows that the benchmark works; its speed is that of a tiny model", err=True)
    return record


def collect(record: Record, rows: Iterator[Row]) -> None:
    """Add each row as it is measured, and print one line for it."""
    with _exit_on_signals():
        for row in rows:
            record.add(row)
            reason = f": {row['error']}" if "error" in row else ""
            typer.echo(f"  {'failed' if reason else 'done':10} {row['name']}{reason}", err=True)
            for text in row.get("warnings") or []:
                typer.echo(f"  {'':10} {text}", err=True)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the measured child is ended and its folder removed."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_rows(record: Record, json_: bool, line: Callable[[Row], str]) -> None:
    """Finish the record and print it: JSON, or one line per row."""
    show_result(record, json_, lambda result: [line(row) for row in result["rows"]])


def show_result(record: Record, json_: bool, lines: Callable[[dict[str, Any]], list[str]]) -> None:
    """Finish the record and print it: JSON, or the lines that `lines` makes of the result."""
    for path in record.finish():
        typer.echo(f"  written    {path}", err=True)
    result = record.result()
    for line in [json.dumps(result)] if json_ else lines(result):
        typer.echo(line)


def throughput_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:14} failed: {row['error']}"
    formats = {
        "mfu": "{:7.1%} MFU",
        "step_ms": "{:9.1f} ms/step",
        "memory_gib": "{:7.1f} GiB",
        "power_w": "{:6.0f} W",
        "joules_per_step": "{:7.1f} J/step",
        "sm_clock_mhz": "{:6.0f} MHz",
        "kernel_share": "{:6.1%} in kernels",
        "micro_batch": "   micro-batch {}",
        "redline_is": "   redline is {:.2f}×",
    }
    known = "".join(form.format(row[key]) for key, form in formats.items() if row.get(key) is not None)
    return f"{row['name']:14}{row['tokens_per_s']:11,.0f} tok/s{known}"


def startup_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:6} failed: {row['error']}"
    return (
        f"{row['name']:6}{row['to_first_step_s']:7.1f} s to the first step: {row['imports_data_model_s']:.1f} imports, "
        f"data and model, {row['warmup_s']:.1f} warm-up, {row['evaluation_and_step_s']:.1f} evaluation and step"
    )
