"""redline runs, redline runs prune"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import JsonOption
from redline.errors import UsageError
from redline.runs.console import one_line, print_whole
from redline.runs.summary import RUNS, RunSummary, find_runs
from redline.units import format_bytes, format_seconds, format_usd

if TYPE_CHECKING:
    from redline.training.checkpoint import PruneResult
import shlex

from redline.cli.options import RunArgument
from redline.runs.summary import whole_run

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.callback(invoke_without_command=True)
def runs(context: typer.Context, json_: JsonOption = False) -> None:
    """List the runs in ./runs: status, step, loss, cost, disk. [bold]prune[/bold] frees disk.

    Examples:
      redline runs
      redline runs --json
      redline runs prune --dry-run
    """
    if context.invoked_subcommand is None:
        _list(json_)


def _list(json_: bool) -> None:
    found = find_runs(RUNS)
    if json_:
        import json

        typer.echo(json.dumps([summary.as_dict() for summary in found]))
        return
    if not found:
        typer.echo("No runs in ./runs yet; `redline train` makes one.")
        return
    from rich.table import Table
    from rich.text import Text

    columns = {name: show for name, show in _COLUMNS.items() if any(show(run) != MISSING for run in found)}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
    for run in found:
        table.add_row(*(Text(one_line(show(run))) for show in columns.values()))  # a name is no markup
    print_whole(table)


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
    "cost": lambda run: _or_missing(run.cost_usd or None, format_usd),  # of nothing there is no price
    "disk": lambda run: format_bytes(run.disk_bytes),
}


def _keep(text: str) -> str:
    if text in ("best", "last") or (text.isascii() and text.isdigit() and int(text) > 0):
        return text
    raise UsageError(f"{text!r} is not best, last or a number of checkpoints.", where="--keep", fix="Use one of those.")


@app.command()
def prune(
    keep: Annotated[
        str,
        typer.Option(
            callback=_keep,
            metavar="best|last|N",
            help="best: the best and the newest; last: the newest; N: the newest N and the best.",
        ),
    ] = "best",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete without asking; required with --json or without a terminal.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Free disk: remove the checkpoints in ./runs that are not needed. Never of a running run, never the newest.

    Examples:
      redline runs prune --dry-run
      redline runs prune --keep last --yes
    """
    from redline.runs.summary import run_paths
    from redline.training.checkpoint import plan_prune
    from redline.training.checkpoint import prune as remove

    rule = int(keep) if keep.isdigit() else keep
    plans = [plan_prune(run, rule) for run in run_paths(RUNS)]
    unanswered = not (yes or dry_run) and any(plan.bytes for plan in plans)
    # where nobody can see the question or answer it, nothing is deleted and the list is shown
    refused = unanswered and (json_ or not _at_a_terminal())
    if unanswered and not refused:
        _show(plans, "would free")
        if not typer.confirm("Remove them?"):
            typer.echo("nothing was deleted")
            return
    only_shown = dry_run or refused
    done = plans if only_shown else [remove(plan.run, rule) if plan.bytes else plan for plan in plans]
    if json_:
        import json

        rows = [pruned.as_dict() for pruned in done]
        typer.echo(json.dumps({"dry_run": only_shown, "bytes": sum(row["bytes"] for row in rows), "runs": rows}))
    else:
        _show(done, "would free" if only_shown else "freed")
    if refused:
        why = "--json asks no questions" if json_ else "there is no terminal to confirm at"
        raise UsageError(f"nothing was deleted: {why}.", where="runs prune", fix="Add --yes to delete these.")


def _at_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _show(pruned: list[PruneResult], verb: str) -> None:
    for one in pruned:
        if one.bytes:
            steps = ", ".join(map(str, sorted(one.removed))) or "only what interrupted saves left"
            kept = ", ".join(map(str, one.kept))
            typer.echo(f"{one.run}  {verb} {format_bytes(one.bytes)}: {steps}; stays: {kept}")
        if one.reason:
            typer.echo(f"{one.run}  left alone: it {one.reason}")
    typer.echo(f"{verb} {format_bytes(sum(one.bytes for one in pruned))}")


# ----------------------------------------------------------------------------------------------------
# redline stop


def stop(run: RunArgument = "latest") -> None:
    """Ask a run to finish its step, save and stop. Works across machines that share the directory.

    Examples:
      redline stop latest
      redline stop runs/pretrain-350m-20261115-101500
    """
    from redline.errors import UserError
    from redline.runs.summary import is_locked
    from redline.vocabulary import STOP_REQUEST_FILE

    path = whole_run(run)
    if not is_locked(path):
        raise UserError("is not running.", where=str(path), fix="`redline runs` shows what is.")
    try:
        (path / STOP_REQUEST_FILE).touch()
    except OSError as error:
        fix = "Ask its owner to stop it."
        raise UserError(f"cannot be written ({error.strerror}).", where=str(path), fix=fix) from None
    typer.echo(f"asked {path} to save and stop; go on later with: redline train --resume {shlex.quote(str(path))}")
