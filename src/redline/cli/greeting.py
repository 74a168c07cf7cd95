"""`redline` without a verb: print what it is, what is on this machine, and which commands come next."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import typer

from redline import __version__
from redline.vocabulary import RUNS, Status

if TYPE_CHECKING:
    from redline.runs.summary import NewestRun

_ENDED_EARLY = (Status.CRASHED, Status.PREEMPTED, Status.STOPPED, Status.FAILED)


def greet() -> None:
    """Print the greeting. It imports no torch and reads only the end of a log, so that it takes no time."""
    from redline.runs.summary import newest_run

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


def _describe_runs(newest: NewestRun | None) -> str:
    if newest is None:
        return "none in ./runs yet"
    return f"{newest.count} in ./runs, newest: {shlex.quote(newest.name)} ({newest.status})"


def _next_commands(newest: NewestRun | None) -> list[tuple[str, str]]:
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
    name = shlex.quote(newest.name)
    if newest.status is Status.RUNNING:
        return [
            (f"redline watch {name}", "a live page of the run"),
            (f"redline stop {name}", "save and stop the run"),
        ]
    resume = []
    if newest.status in _ENDED_EARLY:
        resume = [(f"redline train --resume {name}", "resume the run")]
    after = [
        (f"redline report {name}", "a page about the run"),
        (f"redline sample {name}", "generate text with it"),
    ]
    return [*resume, *after, *first_steps[1:3]]
