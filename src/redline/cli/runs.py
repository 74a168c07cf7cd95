"""redline runs and redline runs prune"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.completion import complete_words
from redline.cli.help import VerbCommand, VerbGroup
from redline.cli.options import JsonOption, RunArgument
from redline.errors import UsageError
from redline.runs.summary import request_stop, run_without_checkpoint
from redline.units import format_bytes, format_seconds, format_usd
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.runs.summary import RunSummary
    from redline.training.checkpoint import PruneResult

app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, json_: JsonOption = False) -> None:
    """List the runs in ./runs, or delete old checkpoints.

    Examples:
      redline runs
      redline runs --json
      redline runs prune --dry-run
    """
    if context.invoked_subcommand is None:
        _list(json_)


def _list(json_: bool) -> None:
    from redline.runs.summary import find_runs

    summaries = find_runs(RUNS)
    if json_:
        import json

        typer.echo(json.dumps([summary.as_dict() for summary in summaries]))
        return
    if not summaries:
        typer.echo("No runs in ./runs yet; `redline train` makes one.")
        return
    from rich.table import Table
    from rich.text import Text

    from redline.runs.console import print_table
    from redline.runs.events import one_line

    columns = {name: show for name, show in _COLUMNS.items() if any(show(run) != MISSING for run in summaries)}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
    for run in summaries:
        # As Text, or rich would interpret brackets in a name as markup.
        table.add_row(*(Text(one_line(show(run))) for show in columns.values()))
    print_table(table)


MISSING = "–"


def _or_missing(value: float | None, form: Callable[[float], str]) -> str:
    return MISSING if value is None else form(value)


_COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "status": lambda run: run.status,
    "step": lambda run: _or_missing(run.step, "{:,}".format),
    "loss": lambda run: _or_missing(run.loss, "{:.3f}".format),
    "val": lambda run: _or_missing(run.val_loss, "{:.3f}".format),
    "time": lambda run: _or_missing(run.hours, lambda hours: format_seconds(3600 * hours)),
    "cost": lambda run: _or_missing(run.cost_usd or None, format_usd),  # a cost of 0 means that no price is known
    "disk": lambda run: format_bytes(run.disk_bytes),
}


def _parse_keep(text: str) -> str:
    if text in ("best", "last") or (text.isascii() and text.isdigit() and int(text) > 0):
        return text
    raise UsageError(f"{text!r} is not best, last or a number of checkpoints.", where="--keep", fix="Use one of those.")


@app.command(cls=VerbCommand)
def prune(
    keep: Annotated[
        str,
        typer.Option(
            callback=_parse_keep,
            autocompletion=complete_words("best", "last"),
            metavar="best|last|N",
            help="Checkpoints to keep: best (best and newest), last (newest) or N (newest N and best).",
        ),
    ] = "best",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete without asking. Required with --json or without a terminal.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Delete old checkpoints in ./runs.

    Running runs are left alone, and the newest checkpoint of a run is never deleted.

    Examples:
      redline runs prune --dry-run
      redline runs prune --keep last --yes
    """
    from redline.runs.summary import run_paths
    from redline.training.checkpoint import plan_prune
    from redline.training.checkpoint import prune as remove

    rule = int(keep) if keep.isdigit() else keep
    plans = [plan_prune(run, rule) for run in run_paths(RUNS)]
    needs_answer = not (yes or dry_run) and any(plan.bytes for plan in plans)
    # If nobody can see or answer the question, delete nothing, show the list and fail.
    refused = needs_answer and (json_ or not _is_interactive())
    if needs_answer and not refused:
        _show(plans, "would free")
        if not typer.confirm("Delete them?"):
            typer.echo("nothing was deleted")
            return
    listed_only = dry_run or refused
    results = plans if listed_only else [remove(plan.run, rule) if plan.bytes else plan for plan in plans]
    if json_:
        import json

        rows = [result.as_dict() for result in results]
        typer.echo(json.dumps({"dry_run": listed_only, "bytes": sum(row["bytes"] for row in rows), "runs": rows}))
    else:
        _show(results, "would free" if listed_only else "freed")
    if refused:
        why = "--json asks no questions" if json_ else "there is no terminal to confirm at"
        raise UsageError(
            f"nothing was deleted: {why}.", where="runs prune", fix="Add --yes to delete the listed checkpoints."
        )


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _show(results: list[PruneResult], verb: str) -> None:
    for result in results:
        if result.bytes:
            steps = ", ".join(map(str, sorted(result.removed))) or "only files of interrupted saves"
            kept = ", ".join(map(str, result.kept))
            typer.echo(f"{result.run}  {verb} {format_bytes(result.bytes)}: {steps}; keeps: {kept}")
        if result.reason:
            typer.echo(f"{result.run}  skipped: it {result.reason}")
    typer.echo(f"{verb} {format_bytes(sum(result.bytes for result in results))}")


# ----------------------------------------------------------------------------------------------------
# redline stop


def stop(run: RunArgument = "latest") -> None:
    """Ask a run to finish its step, save and stop.

    This works from any machine that shares the directory.

    Examples:
      redline stop latest
      redline stop runs/pretrain-350m-20261115-101500
    """
    path = run_without_checkpoint(run)
    request_stop(path)
    typer.echo(f"asked {path} to save and stop; resume it later with: redline train --resume {shlex.quote(str(path))}")
