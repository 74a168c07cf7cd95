"""What is said when training is over: where the report lies, and what to try next."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from redline.errors import UserError, without_secrets
from redline.jobs import job
from redline.recipe.schema import Recipe

if TYPE_CHECKING:
    from redline.train.outcome import Outcome


def closing(path: Path, outcome: Outcome, recipe: Recipe) -> None:
    """What was trained and saved stays so, whether or not anybody reads this."""
    with suppress(OSError):  # of a pipe or a terminal that is gone
        _say(path, outcome, recipe)


def _say(path: Path, outcome: Outcome, recipe: Recipe) -> None:
    if outcome.reason != "preempted":  # who is asked to make room does not draw pictures
        from redline.monitor.report import write_report

        try:
            typer.echo(f"report  {write_report(path)}", err=True)
        except UserError as error:  # the run itself is safe
            typer.echo(f"report  not written: {error.what} Later: redline report {shlex.quote(str(path))}", err=True)
    if outcome.reason == "nonfinite":  # going on from here would end here again
        anew = (
            f"train anew with a lower train.lr; model.init_from={shlex.quote(_best(path))} begins with what was learnt"
        )
        typer.echo(f"next    {anew}", err=True)
        return
    again = f"redline train --resume {shlex.quote(str(path))}"
    unfinished = outcome.exit_code or outcome.reason == "moved"
    for command in [again] if unfinished else _next_commands(path, recipe, outcome.reason):
        typer.echo(f"next    {command}", err=True)


def _next_commands(path: Path, recipe: Recipe, reason: str) -> list[str]:
    from redline.models.llama import inexact
    from redline.objectives import objective_module

    module = objective_module(recipe.objective)
    answers = f" --answers {answers_kind(recipe)}" if module.can_answer(recipe) else ""
    python = recipe.data.source == "embedded"
    prompt = without_secrets(recipe.eval.prompt or "") or ("a question" if answers else "import " if python else "")
    run, best, model = (shlex.quote(str(word)) for word in (path, _best(path), f"{path.resolve().name}-model"))
    begin = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    if reason == "patience":  # the run went on after its best step to see that it was the best
        run = best
    commands = [f"redline sample {run}{begin}", f"redline eval {best}{answers}"]
    if hasattr(module, "export") and (recipe.model.base is not None or not inexact(recipe.model)):
        commands.append(f"redline export {run} --out {model}")
    return commands


def _best(path: Path) -> str:
    """Its best weights, where they were kept: none are when nothing was learnt."""
    from redline.train.checkpoint import best_step, step_name

    folder = path / "checkpoints"
    step = best_step(folder)
    return f"{path}@best" if step is not None and (folder / step_name(step)).is_dir() else str(path)


def answers_kind(recipe: Recipe) -> str:
    """How its answers are best compared: as its job says, else numbers as numbers."""
    if own := getattr(job(recipe.objective), "ANSWERS", None):
        return str(own)
    numbers = any(name in str(recipe.data.source).lower() for name in ("gsm8k", "problems:"))
    return "gsm8k" if numbers else "match"
