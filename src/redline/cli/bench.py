"""redline bench"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from redline.cli.bench_lines import accuracy_line, startup_line, throughput_line
from redline.cli.options import JsonOption, split_words
from redline.errors import EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from redline.bench.record import Record, Row
    from redline.bench.setting import Setting

app = typer.Typer(rich_markup_mode="rich", add_completion=False, no_args_is_help=True)
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE …]", help="Another recipe than the benchmark's own, and overrides."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="A folder, or a new FILE.json; a page and a picture come beside it."),
]
OnlyOption = Annotated[
    str | None, typer.Option("--only", metavar="NAME[,NAME]", help="These configurations of the list, anew.")
]
PickOption = Annotated[
    str | None, typer.Option("--only", metavar="WORD[,WORD]", help="Those of the list whose name has such a word.")
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE …]", help="Overrides for the arms that are trained.")
]
ArmOption = Annotated[
    str | None,
    typer.Option("--arm", metavar="NAME[,NAME]", help="nanogpt, pretrain-350m, speedrun-350m; else all there are."),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="TIME", help="Of training alone: 2m (the default on a GPU), 90s, 480.")
]
SeedOption = Annotated[str, typer.Option("--seed", metavar="N[,N]", help="A run of each arm for each.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Train what is there already anew.")]


@app.callback()
def bench() -> None:
    """Measure this machine: throughput, fine-tuning, latent prefixes, time to loss, the plan's accuracy or start-up.

    Examples:
      redline bench throughput
      redline bench finetune
      redline bench latent
      redline bench time-to-loss data.source=./tokens --out loss.json
      redline bench plan-accuracy --out plan.json
      redline bench startup --json
    """


@app.command("throughput")
def throughput(
    words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: PickOption = None
) -> None:
    """Tokens a second of the real loop, with fp8 too, beside the plain compiled step and transformers' Llama.

    Examples:
      redline bench throughput
      redline bench throughput data.source=./tokens train.steps=100 --out throughput.json
    """
    from redline.bench.picked import picked
    from redline.bench.place import check_out
    from redline.bench.setting import choose_setting
    from redline.bench.throughput import DEFAULTS, contenders, run_throughput, with_ratios

    check_out(out)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, DEFAULTS)
    chosen = picked(contenders(setting.recipe), only)
    record = _record_of("throughput", setting, out)
    _collect(record, run_throughput(setting, chosen))
    record.rows = with_ratios(record.rows)
    _show(record, json_, throughput_line)
    if "error" in record.rows[0]:
        raise typer.Exit(EXIT_FAILED)  # a peer may be missing, redline itself may not


@app.command("finetune")
def finetune(
    words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: PickOption = None
) -> None:
    """Tokens a second of QLoRA and LoRA, beside transformers, PEFT, bitsandbytes and Liger at the same work.

    Examples:
      redline bench finetune
      redline bench finetune train.steps=40 --out finetune.json
    """
    from redline.bench.finetune import CONTENDERS, choose, run_finetune, with_ratios
    from redline.bench.markdown import lines
    from redline.bench.picked import picked
    from redline.bench.place import check_out

    check_out(out)
    setting, contenders = choose(*split_words(words)), picked(CONTENDERS, only)
    record = _record_of("finetune", setting, out)
    _collect(record, run_finetune(setting, contenders))
    record.rows = with_ratios(record.rows)
    _show_lines(record, json_, lines)
    if "error" in record.rows[0]:
        raise typer.Exit(EXIT_FAILED)


@app.command("latent")
def latent(
    words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: PickOption = None
) -> None:
    """Texts a second of a latent prefix, beside the textbook loop: a forward for each term, the teacher in each step.

    Examples:
      redline bench latent
      redline bench latent model.quant=nf4 --out latent.json
    """
    from redline.bench.latent import CONTENDERS, choose, run_latent, with_ratios
    from redline.bench.markdown import lines
    from redline.bench.picked import picked
    from redline.bench.place import check_out

    check_out(out)
    setting, contenders = choose(*split_words(words)), picked(CONTENDERS, only)
    record = _record_of("latent", setting, out)
    _collect(record, run_latent(setting, contenders))
    record.rows = with_ratios(record.rows)
    _show_lines(record, json_, lines)
    if "error" in record.rows[0]:
        raise typer.Exit(EXIT_FAILED)


@app.command("plan-accuracy")
def plan_accuracy(
    words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: OnlyOption = None
) -> None:
    """Planned against measured memory and tokens/s, by a few real steps of each configuration.

    An --out file of an earlier call is gone on with: what has no figure there yet is measured, or what --only names.

    Examples:
      redline bench plan-accuracy --out plan.json
      redline bench plan-accuracy --only 350m,350m-fp8 --out plan.json
      redline bench plan-accuracy pretrain-350m train.micro_batch=32 --json
    """
    from redline.bench.place import check_out, file_for, read_earlier

    check_out(out, goes_on=True)
    name, overrides = split_words(words)
    if name is not None and only is not None:
        raise UsageError("picks from the list; a recipe is measured alone.", where="--only", fix="Leave one out.")
    from redline.recipe.load import load

    device = load(name or "pretrain-350m", overrides).recipe.train.device
    from redline.bench.plan_accuracy import cases, due, in_order, run_plan_accuracy
    from redline.hardware.probe import detect_machine

    machine = detect_machine(device)
    out = file_for(out, "plan-accuracy", machine, goes_on=True)
    earlier = read_earlier(out, "plan-accuracy", machine)
    known = cases(name, overrides, machine.device)
    chosen = due(known, only, earlier["rows"] if earlier else [])
    record = _record("plan-accuracy", machine, out)
    if earlier:
        record.go_on_from(earlier)
        typer.echo(f"  goes on    {len(earlier['rows'])} rows are there, {len(chosen)} to measure", err=True)
    _collect(record, run_plan_accuracy(chosen, machine))
    record.rows = in_order(record.rows, known)
    _show(record, json_, accuracy_line)
    if all("error" in row for row in record.rows):
        raise typer.Exit(EXIT_FAILED)


@app.command("startup")
def startup(words: WordsArgument = None, json_: JsonOption = False, out: OutOption = None) -> None:
    """Seconds from the command to the first step: caches empty, then warm.

    Examples:
      redline bench startup
      redline bench startup quickstart train.compile=false --json
    """
    from redline.bench.place import check_out
    from redline.bench.setting import choose_setting
    from redline.bench.startup import COMPILED_TINY, DEFAULTS, run_startup

    check_out(out)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, DEFAULTS, COMPILED_TINY)
    record = _record_of("startup", setting, out)
    _collect(record, run_startup(setting))
    _show(record, json_, startup_line)
    if any("error" in row for row in record.rows):
        raise typer.Exit(EXIT_FAILED)


@app.command("time-to-loss")
def time_to_loss(
    words: OverridesArgument = None,
    arm: ArmOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = "1337",
    again: AgainOption = False,
    json_: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Seconds of training until each arm passes the loss that a nanoGPT-style baseline ends with, on the same tokens.

    An --out file of an earlier call is gone on with: what is there is not trained again.

    Examples:
      redline bench time-to-loss data.source=./tokens --budget 2m --out loss.json
      redline bench time-to-loss data.source=./tokens --arm nanogpt train.lr=1e-3 --out loss.json
      redline bench time-to-loss data.source=./tokens --arm pretrain-350m --seed 1337,1338,1339 --out loss.json
    """
    from redline.bench.arms import Trial, check_overrides, choose_arms, device_of, in_order
    from redline.bench.loss_page import lines
    from redline.bench.passing import compare
    from redline.bench.place import check_out, file_for, read_earlier
    from redline.bench.time_to_loss import (
        BUDGETS,
        KNOWN_BY,
        check_data,
        check_rows,
        is_there,
        parse_budget,
        parse_seeds,
        run_time_to_loss,
    )

    check_out(out, goes_on=True)
    arms, seeds, seconds = choose_arms(arm), parse_seeds(seed), None if budget is None else parse_budget(budget)
    name, overrides = split_words(words)
    if name is not None:
        raise UsageError(f"{name!r} is no key=value.", fix="Name an arm with --arm.")
    check_overrides(arms, overrides)
    from redline.hardware.probe import detect_machine

    machine = detect_machine(device_of(overrides))
    check_data(overrides, machine)
    out = file_for(out, "time-to-loss", machine, goes_on=True)
    earlier = read_earlier(out, "time-to-loss", machine, KNOWN_BY)
    check_rows(earlier["rows"] if earlier else [], out, overrides, machine)
    seconds = BUDGETS[machine.device] if seconds is None else seconds
    asked = [Trial(a, in_order(overrides), seconds, s) for s in seeds for a in arms]
    record = _record("time-to-loss", machine, out)
    record.conclude = lambda rows: {"comparison": compare(rows)}
    record.go_on_from(earlier or {"rows": []})
    due = [trial for trial in asked if again or not is_there(trial, record.rows)]
    typer.echo(f"  trains     {len(due)} of {len(asked)} runs; {len(record.rows)} rows are there", err=True)
    _collect(record, run_time_to_loss(due, machine, record.rows, again=again))
    _show_lines(record, json_, lines)
    names = {trial.name for trial in asked}
    if any("error" in row for row in record.rows if row["name"] in names):
        raise typer.Exit(EXIT_FAILED)


def _record(benchmark: str, machine: Any, out: Path | None, **about: Any) -> Record:
    from redline.bench.record import Record

    typer.echo(f"redline bench {benchmark} · {machine.name}", err=True)
    for key, value in about.items():
        typer.echo(f"  {key:10} {' '.join(value) if isinstance(value, list) else value}", err=True)
    if machine.device == "cpu":
        typer.echo("  without a GPU this shows that the benchmark works, and no speed to speak of", err=True)
    return Record(benchmark, machine, about, out)


def _record_of(benchmark: str, setting: Setting, out: Path | None) -> Record:
    from redline.bench.place import file_for

    file = file_for(out, benchmark, setting.machine)
    return _record(benchmark, setting.machine, file, recipe=setting.name, overrides=list(setting.overrides))


def _collect(record: Record, rows: Iterator[Row]) -> None:
    with _told_to_leave():
        for row in rows:
            record.add(row)
            why = f": {row['error']}" if "error" in row else ""
            typer.echo(f"  {'no figure' if why else 'done':10} {row['name']}{why}", err=True)
            for text in row.get("warnings") or []:
                typer.echo(f"  {'':10} {text}", err=True)


@contextmanager
def _told_to_leave() -> Iterator[None]:
    """A signal as an exception: the process that is being timed ends, too, and its folder goes."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(record: Record, json_: bool, line: Callable[[Row], str]) -> None:
    _show_lines(record, json_, lambda result: [line(row) for row in result["rows"]])


def _show_lines(record: Record, json_: bool, lines: Callable[[dict[str, Any]], list[str]]) -> None:
    record.finish()
    for path in record.files():
        typer.echo(f"  written    {path}", err=True)
    result = record.result()
    if json_:
        import json

        typer.echo(json.dumps(result))
        return
    for line in lines(result):
        typer.echo(line)
