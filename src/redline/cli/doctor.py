"""redline doctor"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import JsonOption
from redline.errors import EXIT_FAILED
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.hardware.doctor import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    json_: JsonOption = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also measure matmul and copy rates, and store them for `redline plan`.")
    ] = False,
) -> None:
    """Check what this machine can do, and print how to fix what fails.

    Examples:
      redline doctor
      redline doctor --probe --json
    """
    from redline.hardware.doctor import extras_of, run_checks
    from redline.hardware.facts import collect_facts

    facts = collect_facts(RUNS, recipes=_recipes(), probe=probe)
    checks = run_checks(facts)
    failed = any(check.status == "fail" for check in checks)
    if json_:
        import json

        rows = [vars(check) for check in checks]
        extras = [vars(extra) for extra in extras_of(facts)]
        typer.echo(json.dumps({"ok": not failed, "checks": rows, "extras": extras, "measured": facts.measured}))
    else:
        _show(checks)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _recipes() -> dict[str, list[str]]:
    """Return the shipped recipes that need each extra; none if a package that reads recipes is missing or broken."""
    try:
        from redline.launch.extras import recipes_by_extra
    except ImportError:  # such as pydantic: the report names it, so it must not need it
        return {}
    return recipes_by_extra()


def _show(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    counts = ", ".join(f"{sum(check.status == status for check in checks)} {status}" for status in _COLOURS)
    terminal = Console(highlight=False)
    if not terminal.is_terminal:
        width = max(len(check.name) for check in checks)
        for check in checks:
            typer.echo(f"{check.status:4}  {check.name:{width}}  {check.detail}")
            if check.fix:
                typer.echo(f"{'':{width + 8}}→ {check.fix}")
        typer.echo(counts)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for overflow in ("ellipsis", "ellipsis", "fold"):
        table.add_column(overflow=overflow)
    for check in checks:
        what = Text(check.detail)
        if check.fix:
            what.append(f"\n→ {check.fix}", style="dim" if check.status == "ok" else "")
        table.add_row(Text(check.status, style=_COLOURS[check.status]), Text(check.name), what)
    terminal.print(table)
    terminal.print(counts)
