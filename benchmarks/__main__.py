"""python -m benchmarks: run a comparison; `make bench ARGS="NAME …"` does the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import benchmarks
from benchmarks import finetune as finetuning
from benchmarks import laptop as laptops
from benchmarks import latent as latents
from benchmarks import pages, plan_accuracy, time_to_loss
from benchmarks.record import Record, refuse_dirty
from redline.bench import record as measured
from redline.bench import throughput as speeds
from redline.bench.record import check_out, file_for, read_earlier
from redline.bench.setting import choose_setting
from redline.cli import bench as cli
from redline.cli.main import run
from redline.cli.options import JsonOption, split_words
from redline.errors import EXIT_FAILED, UsageError
from redline.hardware.probe import detect_machine
from redline.recipe.load import load

app = typer.Typer(rich_markup_mode="rich", add_completion=False, no_args_is_help=True)
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Write the result here: a folder, or FILE.json; a page and a picture go beside it."),
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE …]", help="Overrides for every arm.")
]
ArmOption = Annotated[
    str | None,
    typer.Option("--arm", metavar="NAME[,NAME]", help=f"{', '.join(time_to_loss.ARMS)}; default: all."),
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", metavar="TIME", help="Training time per arm: 2m (default on a GPU), 90s, 480.")
]
SeedOption = Annotated[str, typer.Option("--seed", metavar="N[,N]", help="Train each arm once per seed.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Train runs again that --out already holds.")]
DirtyOption = Annotated[
    bool, typer.Option("--allow-dirty", help="Accept uncommitted changes, here and in --out; the rows are marked.")
]

HeldOutOption = Annotated[
    bool, typer.Option("--held-out", help="Measure the held-out configurations, which no constant was fitted to.")
]

LLAMA = speeds.Contender(
    "transformers",
    "transformers' Llama in a plain loop: float32 weights under bf16 autocast, SDPA, torch.compile, fused AdamW",
    ("train.compile=true",),
    module="benchmarks.peers.llama",
)


@app.callback()
def main() -> None:
    """Compare redline with other programs on this machine, at the same work and in the same call.

    Examples:
      python -m benchmarks throughput
      python -m benchmarks time-to-loss data.source=./tokens --out loss.json
    """


@app.command()
def throughput(
    words: cli.WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: cli.OnlyOption = None
) -> None:
    """Measure tokens per second beside the plain compiled step and transformers' Llama."""
    check_out(out, siblings=Record.siblings)
    name, overrides = split_words(words)
    setting = choose_setting(name, overrides, speeds.DEFAULTS)
    known = speeds.contenders(setting.recipe)
    known = (*known, LLAMA) if known == speeds.CONTENDERS else known  # transformers has no peer for the other jobs
    record = cli.open_record("throughput", setting, out, Record)
    cli.collect(record, speeds.run_throughput(setting, speeds.select(known, only)))
    record.rows = speeds.add_ratios(record.rows)
    cli.show_rows(record, json_, cli.throughput_line)
    _exit_if_first_failed(record)


@app.command()
def finetune(
    words: cli.WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: cli.OnlyOption = None
) -> None:
    """Measure tokens per second of QLoRA and LoRA beside transformers, PEFT, bitsandbytes and Liger."""
    check_out(out, siblings=Record.siblings)
    setting, chosen = finetuning.choose(*split_words(words)), speeds.select(finetuning.CONTENDERS, only)
    record = cli.open_record("finetune", setting, out, Record)
    cli.collect(record, finetuning.run_finetune(setting, chosen))
    record.rows = finetuning.add_ratios(record.rows)
    cli.show_result(record, json_, pages.lines)
    _exit_if_first_failed(record)


@app.command()
def laptop(
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Training time of each arm.")] = 2.0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds; a second one doubles the time.")] = 1,
    json_: JsonOption = False,
    out: OutOption = None,
    only: cli.OnlyOption = None,
) -> None:
    """Train quickstart on this CPU beside nanoGPT's loop, transformers' Trainer, and our architecture with AdamW.

    It takes about 15 minutes. With an --out file of an earlier call, arms that it holds are not trained again.

    Examples:
      python -m benchmarks laptop
      python -m benchmarks laptop --seeds 3 --out laptop.json
    """
    check_out(out, may_exist=True)
    arms, machine = laptops.choose_arms(only), detect_machine("cpu")
    out = file_for(out, "laptop", machine, may_exist=True, siblings=Record.siblings)
    earlier = read_earlier(out, "laptop", machine)
    record = cli.start_record(Record("laptop", machine, {}, out))
    record.conclude = lambda rows: {"comparison": laptops.compare(rows)}
    record.continue_from(earlier or {"rows": []})
    numbers = range(laptops.FIRST_SEED, laptops.FIRST_SEED + seeds)
    cli.collect(record, laptops.run_laptop(arms, numbers, 60 * minutes, record.rows))
    cli.show_result(record, json_, laptops.lines)
    _exit_if_first_failed(record)


@app.command()
def latent(
    words: cli.WordsArgument = None, json_: JsonOption = False, out: OutOption = None, only: cli.OnlyOption = None
) -> None:
    """Measure texts per second of a latent prefix beside the textbook loop."""
    check_out(out, siblings=Record.siblings)
    setting, chosen = latents.choose(*split_words(words)), speeds.select(latents.CONTENDERS, only)
    record = cli.open_record("latent", setting, out, Record)
    cli.collect(record, latents.run_latent(setting, chosen))
    record.rows = latents.add_ratios(record.rows)
    cli.show_result(record, json_, pages.lines)
    _exit_if_first_failed(record)


@app.command("plan-accuracy")
def compare_plan(
    words: cli.WordsArgument = None,
    json_: JsonOption = False,
    out: OutOption = None,
    only: cli.OnlyOption = None,
    held_out: HeldOutOption = False,
    allow_dirty: DirtyOption = False,
) -> None:
    """Compare planned with measured memory and tokens per second, by a few real steps of each configuration.

    With an --out file of an earlier call, only configurations without a figure, or those of --only, are measured.
    --held-out measures another list: configurations that no constant of the plan was fitted to.
    """
    check_out(out, may_exist=True)
    name, overrides = split_words(words)
    if name is not None and only is not None:
        raise UsageError("selects from the list; a recipe is measured alone.", where="--only", fix="Leave one out.")
    if name is not None and held_out:
        what = "measures its own list of configurations; a recipe is measured alone."
        raise UsageError(what, where="--held-out", fix="Leave one out.")
    machine = detect_machine(load(name or "pretrain-350m", overrides).recipe.train.device)
    benchmark = plan_accuracy.NAMES[held_out]
    out = file_for(out, benchmark, machine, may_exist=True, siblings=Record.siblings)
    earlier = read_earlier(out, benchmark, machine)
    if earlier:
        _refuse_dirty(earlier, out, allow_dirty=allow_dirty)
    known = plan_accuracy.cases(name, overrides, machine.device, held_out=held_out)
    chosen = plan_accuracy.due(known, only, earlier["rows"] if earlier else [])
    record = cli.start_record(Record(benchmark, machine, {}, out))
    if earlier:
        record.continue_from(earlier)
        typer.echo(f"  continues  {len(earlier['rows'])} rows exist, {len(chosen)} to measure", err=True)
    cli.collect(record, plan_accuracy.run_plan_accuracy(chosen, machine))
    record.rows = plan_accuracy.in_order(record.rows, known)
    cli.show_rows(record, json_, pages.accuracy_line)
    if all("error" in row for row in record.rows):
        raise typer.Exit(EXIT_FAILED)


@app.command("time-to-loss")
def race(
    words: OverridesArgument = None,
    arm: ArmOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = "1337",
    again: AgainOption = False,
    json_: JsonOption = False,
    out: OutOption = None,
    allow_dirty: DirtyOption = False,
) -> None:
    """Measure the training seconds until each arm passes the final loss of a nanoGPT-style baseline on the same tokens.

    With an --out file of an earlier call, runs that it holds are not trained again.

    Examples:
      python -m benchmarks time-to-loss data.source=./tokens --budget 2m --out loss.json
      python -m benchmarks time-to-loss data.source=./tokens --arm nanogpt train.lr=1e-3 --out loss.json
    """
    check_out(out, may_exist=True)
    arms, seeds = time_to_loss.choose_arms(arm), time_to_loss.parse_seeds(seed)
    seconds = None if budget is None else time_to_loss.parse_budget(budget)
    name, overrides = split_words(words)
    if name is not None:
        raise UsageError(f"{name!r} is not key=value.", fix="Name an arm with --arm.")
    time_to_loss.check_overrides(arms, overrides)
    time_to_loss.check_tree(allow_dirty=allow_dirty)
    machine = detect_machine(time_to_loss.device_of(overrides))
    time_to_loss.check_data(overrides, machine)
    out = file_for(out, "time-to-loss", machine, may_exist=True, siblings=Record.siblings)
    earlier = read_earlier(out, "time-to-loss", machine, time_to_loss.KNOWN_BY)
    if earlier:
        _refuse_dirty(earlier, out, allow_dirty=allow_dirty)
        earlier["rows"] = time_to_loss.with_current_names(earlier["rows"])
    time_to_loss.check_rows(earlier["rows"] if earlier else [], out, overrides, machine)
    seconds = time_to_loss.BUDGETS[machine.device] if seconds is None else seconds
    ordered = time_to_loss.in_order(overrides)
    asked = [time_to_loss.Trial(one, ordered, seconds, number) for number in seeds for one in arms]
    record = cli.start_record(Record("time-to-loss", machine, {}, out))
    record.conclude = lambda rows: {"comparison": time_to_loss.compare(rows)}
    record.continue_from(earlier or {"rows": []})
    due = [trial for trial in asked if again or not time_to_loss.is_there(trial, record.rows)]
    typer.echo(f"  trains     {len(due)} of {len(asked)} runs; {len(record.rows)} rows exist", err=True)
    cli.collect(record, time_to_loss.run_time_to_loss(due, machine, record.rows, again=again))
    cli.show_result(record, json_, pages.time_to_loss_lines)
    names = {trial.name for trial in asked}
    if any("error" in row for row in record.rows if row["name"] in names):
        raise typer.Exit(EXIT_FAILED)


def _refuse_dirty(earlier: dict[str, Any], out: Path | None, *, allow_dirty: bool) -> None:
    """Refuse to add rows to a result that holds some of an unknown state of the code, unless it is asked for."""
    if not allow_dirty:
        refuse_dirty(earlier, out)


def _exit_if_first_failed(record: measured.Record) -> None:
    """A peer may be missing on this machine; redline's own row, the first, may not fail."""
    if "error" in record.rows[0]:
        raise typer.Exit(EXIT_FAILED)


if __name__ == "__main__":
    # Contenders are `python -m benchmarks.peers.…` processes, which must find this package from any directory.
    root = str(Path(benchmarks.__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    raise SystemExit(run(app))
