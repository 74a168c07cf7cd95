"""`redline` alone: what this is, what is here, and what to do next."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import typer

from redline import __version__
from redline.runs.summary import RUNS
from redline.vocabulary import EVENTS_FILE, Status

_ENDED_EARLY = (Status.CRASHED, Status.PREEMPTED, Status.STOPPED, Status.FAILED)


@dataclass(frozen=True)
class Newest:
    name: str  # as one types it
    status: Status
    count: int


def greet() -> None:
    """A few lines. Neither torch nor a whole log is read for them."""
    newest = newest_run(RUNS)
    typer.echo(f"redline {__version__} trains language models at the limit of the hardware.\n")
    typer.echo(f"  here   {_machine()}")
    typer.echo(f"  runs   {_runs(newest)}\n")
    steps = _steps(newest)
    width = max(len(command) for command, _ in steps)
    for command, why in steps:
        typer.echo(f"  {command:{width}}  {why}")
    typer.echo("\nredline recipes lists what can be trained, redline --help every verb.")


def _machine() -> str:
    from redline.hardware.nvml import first_gpu
    from redline.units import GIB

    card = first_gpu()
    if card is not None:
        return f"{card.name}, {card.memory_bytes / GIB:.0f} GiB"
    return f"no NVIDIA GPU, {os.cpu_count()} CPU cores: the small recipes train here"


def _runs(newest: Newest | None) -> str:
    if newest is None:
        return "none in ./runs yet"
    return f"{newest.count} in ./runs; the newest: {newest.name}, {newest.status}"


def _steps(newest: Newest | None) -> list[tuple[str, str]]:
    """The way of a run, from the machine to the page about it; what is next for the run that is here comes first."""
    ways = [
        ("redline doctor", "what this machine can do, and what to mend"),
        ("redline plan pretrain-350m", "memory, time and money, before anything runs"),
        ("redline train", "two minutes of quickstart, on any machine"),
        ("redline watch", "a live page, while it trains"),
        ("redline report latest", "one page about it, afterwards"),
    ]
    if newest is None:
        return ways
    if newest.status is Status.RUNNING:
        return [(f"redline watch {newest.name}", "look at it"), (f"redline stop {newest.name}", "save and end it")]
    first = []
    if newest.status in _ENDED_EARLY:
        first = [(f"redline train --resume {newest.name}", "go on where it ended")]
    after = [(f"redline report {newest.name}", "one page about it"), (f"redline sample {newest.name}", "let it write")]
    return [*first, *after, *ways[1:3]]


def newest_run(root: Path) -> Newest | None:
    from redline.runs.events import one_line, read_last_events
    from redline.runs.summary import run_paths, run_status

    paths = run_paths(root)
    if not paths:
        return None
    status = run_status(paths[0], read_last_events(paths[0] / EVENTS_FILE))
    return Newest(shlex.quote(one_line(paths[0].relative_to(root).as_posix())), status, len(paths))
