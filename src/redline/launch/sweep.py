"""`redline train --sweep`: train every combination of values, one run after the other, and compare the runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import typer

from redline.cache import read_text, write_atomically
from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError, UserError
from redline.recipe.load import load
from redline.runs.console import print_table
from redline.runs.report.compare import Row, sweep_row
from redline.runs.summary import run_status
from redline.training.control import preemption_signals
from redline.units import format_count, format_seconds
from redline.vocabulary import EVENTS_FILE, RECIPE_LOCK_FILE, SWEEP_FILE, Status

COMPARISON = "comparison.json"
_STOP_CODES = {EXIT_INTERRUPTED, EXIT_PREEMPTED}  # the sweep stops when a run ends with one of these


@dataclass(frozen=True)
class Member:
    name: str
    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


@dataclass(frozen=True)
class Sweep:
    """A sweep as its command describes it. Repeating the command continues it."""

    recipe: str
    overrides: list[str]
    axes: dict[str, list[str]]

    @property
    def members(self) -> list[Member]:
        combinations = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        width = len(str(len(combinations)))
        return [Member(f"{n:0{width}d}-{_slug(values)}", values) for n, values in enumerate(combinations, 1)]

    def description(self) -> dict[str, object]:
        """Return the content of sweep.json. This validates all runs, so a mistake in the last one is found at once."""
        recipes = [load(self.recipe, [*self.overrides, *m.overrides]).recipe.model_dump_json() for m in self.members]
        digest = hashlib.sha256("\n".join(recipes).encode()).hexdigest()[:16]
        return {"schema": 1, **vars(self), "digest": digest}


def parse_axes(options: list[str], overrides: list[str]) -> dict[str, list[str]]:
    """Return the values of each key of options like `train.lr=1e-4,3e-4`. Commas inside brackets do not separate."""
    axes: dict[str, list[str]] = {}
    for option in options:
        key, separator, text = option.removeprefix("+").partition("=")
        values = _split(text)
        if not separator or not key or not all(values):
            fix = "Use, for example, --sweep train.lr=1e-4,3e-4."
            raise UsageError(f"{option!r} is not KEY=VALUE,VALUE,….", where="--sweep", fix=fix)
        if key in axes or any(override.removeprefix("+").startswith(f"{key}=") for override in overrides):
            raise UsageError(f"{key} is given twice.", where="--sweep", fix="Put all its values into one --sweep.")
        if len(set(values)) < len(values):
            raise UsageError(f"{option!r} has a value twice.", where="--sweep", fix="Remove one.")
        axes[key] = values
    return axes


def _split(text: str) -> list[str]:
    values, depth, quote = [""], 0, ""
    for character in text:
        if character in "'\"" and (quote == character or not (quote or values[-1].strip())):
            quote = "" if quote else character
        depth += 0 if quote else (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _slug(values: dict[str, str]) -> str:
    """Return a directory name with the last word of each key and its value; with full keys if two words are equal."""
    words = [key.rpartition(".")[2] for key in values]
    names = words if len(set(words)) == len(words) else list(values)
    text = "_".join(f"{name}={value}" for name, value in zip(names, values.values(), strict=True))
    return re.sub(r"[^\w.+=-]+", "-", text)[:80].strip("-")


def run_sweep(sweep: Sweep, directory: Path, *, dry_run: bool = False) -> int:
    """Train every run in a process of its own, so that memory and compiled kernels of one do not affect the next."""
    description = sweep.description()
    members = sweep.members
    if dry_run:
        for member in members:
            typer.echo(f"{directory / member.name}  {' '.join(member.overrides)}")
        return EXIT_DONE
    _write_description(directory, description)
    codes: dict[str, int] = {}
    with _command_runner() as run:
        for number, member in enumerate(members, 1):
            path = directory / member.name
            done = _finished(path)
            state = "finished already" if done else f"→ {path}"
            with suppress(OSError):  # a closed terminal or pipe must not stop the sweep
                typer.echo(f"sweep  {number}/{len(members)}  {' '.join(member.overrides)}  {state}", err=True)
            if not done:
                codes[member.name] = run(_command(sweep, member, path))
            if codes.get(member.name) in _STOP_CODES:
                break
    rows = [sweep_row(directory / m.name, m.values, codes.get(m.name)) for m in members]
    _compare(directory, sweep, rows)
    stopped = [code for code in codes.values() if code in _STOP_CODES]
    if stopped:
        command = f"the same command with --run {directory}"
        typer.echo(f"next    continue with {command}; finished runs are not trained again", err=True)
        return stopped[0]
    return EXIT_FAILED if any(codes.values()) else EXIT_DONE


def _write_description(directory: Path, description: dict[str, object]) -> None:
    """Write sweep.json. If there is one, raise UsageError unless it describes the same sweep."""
    path = directory / SWEEP_FILE
    if path.is_file():
        try:
            known = json.loads(read_text(path))
        except (OSError, ValueError):
            known = None
        if known != description:
            keys = [key for key in description if not isinstance(known, dict) or known.get(key) != description[key]]
            what = f"this directory holds another sweep (different: {', '.join(keys)})."
            raise UsageError(what, where=str(directory), fix="Repeat its first command, or choose another --run.")
        return
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UsageError("the folder is not empty.", where=str(directory), fix="Choose another --run.")
    try:
        write_atomically(path, json.dumps(description, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        fix = "Choose another --run."
        raise UserError(f"cannot be written ({error.strerror}).", where=str(directory), fix=fix) from None


def _finished(path: Path) -> bool:
    return (path / RECIPE_LOCK_FILE).is_file() and run_status(path) is Status.FINISHED


def _command(sweep: Sweep, member: Member, path: Path) -> list[str]:
    words = ["--resume", str(path)]
    if not (path / RECIPE_LOCK_FILE).is_file():
        words = [sweep.recipe, *sweep.overrides, *member.overrides, "--run", str(path)]
    return [sys.executable, "-m", "redline", "train", *words]


@contextmanager
def _command_runner() -> Iterator[Callable[[list[str]], int]]:
    """Return a function that runs a command and returns its exit code.

    A signal is forwarded to the running command, which saves and exits; no further command is started. Each command has
    a process group of its own, so that Ctrl-C in the terminal reaches it only once: twice means "exit at once".
    """
    current: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if current:
            current[-1].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def run(command: list[str]) -> int:
        if not received:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
            current.append(process)
            if received:  # the signal arrived before `current` was set
                process.send_signal(received[-1])
            code = process.wait()
            current.clear()
            if not received:
                return code if code >= 0 else EXIT_FAILED
        return EXIT_INTERRUPTED if received[0] == signal.SIGINT else EXIT_PREEMPTED

    numbers = (signal.SIGINT, *preemption_signals())
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield run
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _compare(directory: Path, sweep: Sweep, rows: list[Row]) -> None:
    best, notes = _best(directory, rows)
    members = [row.as_dict() for row in rows]
    content = {"schema": 1, **vars(sweep), "best": best and best.name, "notes": notes, "members": members}
    try:
        write_atomically(directory / COMPARISON, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        typer.echo(f"warning  {directory / COMPARISON} could not be written ({error.strerror})", err=True)
    _print_table(sweep, rows, best)
    for note in notes:
        typer.echo(note)


def _best(directory: Path, rows: list[Row]) -> tuple[Row | None, list[str]]:
    """Return the best run by the fairest measure that all share, and cautions; None if the runs are not comparable."""
    from redline.runs.report.compare import measure, read_runs

    started = [row for row in rows if (directory / row.name / EVENTS_FILE).is_file()]
    measured = measure(read_runs([directory / row.name for row in started]))
    if isinstance(measured, str):
        return None, [measured]
    return (started[measured.ranked[0][1]] if measured.ranked else None), measured.cautions


def _print_table(sweep: Sweep, rows: list[Row], best: Row | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    def cell(value: float | None, form: Callable[[float], str]) -> str:
        return "–" if value is None else form(value)

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in (*sweep.axes, "status", "step", "loss", "best val", "tok/s", "time", ""):
        table.add_column(name, no_wrap=True, justify="left" if name in (*sweep.axes, "status", "") else "right")
    for row in rows:
        status = f"{row.status} ({row.exit_code})" if row.exit_code else row.status
        figures = (
            cell(row.step, "{:,.0f}".format),
            cell(row.loss, "{:.4f}".format),
            cell(row.best_val, "{:.4f}".format),
            cell(row.tokens_per_s, format_count),
            cell(row.hours, lambda hours: format_seconds(3600 * hours)),
        )
        table.add_row(*map(escape, row.values.values()), status, *figures, "← best" if row is best else "")
    print_table(table)
