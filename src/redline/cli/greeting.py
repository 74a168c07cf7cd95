"""`redline` without a verb: print what it is, what is on this machine, and which commands come next."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import typer

from redline import __version__
from redline.vocabulary import EVENTS_FILE, RUNS, Status

_ENDED_EARLY = (Status.CRASHED, Status.PREEMPTED, Status.STOPPED, Status.FAILED)


@dataclass(frozen=True)
class Newest:
    """The newest run, and how many runs there are."""

    name: str  # quoted for a shell
    status: Status
    count: int


def greet() -> None:
    """Print the greeting. It imports no torch and reads only the end of a log, so that it takes no time."""
    newest = newest_run(RUNS)
    typer.echo(f"redline {__version__} trains language models at the limit of the hardware.\n")
    typer.echo(f"  here   {_describe_machine()}")
    typer.echo(f"  runs   {_describe_runs(newest)}\n")
    commands = _next_commands(newest)
    width = max(len(command) for command, _ in commands)
    for command, purpose in commands:
        typer.echo(f"  {command:{width}}  {purpose}")
    typer.echo("\n`redline recipes` lists the recipes, `redline --help` all verbs.")


def _describe_machine() -> str:
    from redline.hardware.nvml import first_gpu
    from redline.units import GIB

    card = first_gpu()
    if card is not None:
        return f"{card.name}, {card.memory_bytes / GIB:.0f} GiB"
    return f"no NVIDIA GPU, {os.cpu_count()} CPU cores: enough for the small recipes"


def _describe_runs(newest: Newest | None) -> str:
    if newest is None:
        return "none in ./runs yet"
    return f"{newest.count} in ./runs, newest: {newest.name} ({newest.status})"


def _next_commands(newest: Newest | None) -> list[tuple[str, str]]:
    """Return commands and their purposes: what suits the newest run, or the first steps if there is none."""
    first_steps = [
        ("redline doctor", "check this machine"),
        ("redline plan pretrain-350m", "memory, time and cost of a run before it starts"),
        ("redline train", "train quickstart: two minutes on any machine"),
        ("redline watch", "a live page of the runs"),
        ("redline report latest", "a page about the newest run"),
    ]
    if newest is None:
        return first_steps
    if newest.status is Status.RUNNING:
        return [
            (f"redline watch {newest.name}", "a live page of the run"),
            (f"redline stop {newest.name}", "save and stop the run"),
        ]
    resume = []
    if newest.status in _ENDED_EARLY:
        resume = [(f"redline train --resume {newest.name}", "resume the run")]
    after = [
        (f"redline report {newest.name}", "a page about the run"),
        (f"redline sample {newest.name}", "generate text with it"),
    ]
    return [*resume, *after, *first_steps[1:3]]


def newest_run(root: Path) -> Newest | None:
    """Return the newest run under `root`, or None if there is none."""
    from redline.runs.events import one_line, read_last_events
    from redline.runs.summary import run_paths, run_status

    paths = run_paths(root)
    if not paths:
        return None
    status = run_status(paths[0], read_last_events(paths[0] / EVENTS_FILE))
    return Newest(shlex.quote(one_line(paths[0].relative_to(root).as_posix())), status, len(paths))
