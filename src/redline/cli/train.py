"""redline train"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from redline.cli.options import split_words
from redline.errors import UsageError
from redline.launch.start import Target, read_target, restart_warning


def train(
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE …]", help="A shipped name or a YAML file.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run's directory; runs/RECIPE-DATE-TIME if not given.")
    ] = None,
    continued: Annotated[
        bool, typer.Option("--continue", help="Start a run in --run, or resume the one there, whichever is due.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run: path, name or latest.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=V1,V2,…", help="A run for each value; several --sweep: each combination."),
    ] = None,
    preview: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show N samples of what would be learnt; train nothing.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="By so many GPUs of this machine; without any, processes.")
    ] = None,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Go on by itself after a lost rank, a hang, or too little memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, plan and print; train nothing.")] = False,
) -> None:
    """Train a model. Without a recipe: [bold]quickstart[/bold], two minutes on any machine.

    Examples:
      redline train
      redline train pretrain-350m data.source=./tokens train.hours=1.5
      redline train --resume latest train.steps=2000
      redline train pretrain-350m data.source=./tokens --run runs/long --continue
      redline train quickstart --sweep train.lr_base=3e-3,6e-3
      redline train qlora-smollm2 data.source=./train.jsonl --preview 3
      redline train pretrain-350m data.source=./tokens --gpus 4 --supervise
    """
    options = Target(run, resume, continued)
    target, words = read_target(recipe or [], options, os.environ, sweep=bool(sweep))
    given, overrides = split_words(words, "train")
    run, resume = target.run, target.resume
    if preview is not None and (resume or sweep):
        fix = "Leave out --resume and --sweep."
        raise UsageError("--preview looks at the data of one recipe.", fix=fix)
    if resume is not None:
        if given or run:
            raise UsageError("--resume needs no recipe and no --run: the run knows both.", fix="Leave them out.")
        if sweep:
            raise UsageError("--resume goes on with one run.", fix="Go on with a sweep by its command and its --run.")
        raise typer.Exit(_resume(resume, overrides, gpus or 1, supervise=supervise, dry_run=dry_run))
    if not sweep and not dry_run and preview is None and (warning := restart_warning(target, os.environ)):
        typer.echo(f"redline: {warning}", err=True)
    if run is not None and target.continued and preview is None:
        raise typer.Exit(_continue(given, overrides, run, gpus or 1, supervise=supervise, dry_run=dry_run))
    name = given or "quickstart"
    if sweep:
        if gpus or supervise:
            raise UsageError("--sweep makes its runs one after the other, on one GPU each.", fix="Leave out --gpus.")
        raise typer.Exit(_sweep(name, overrides, sweep, run, dry_run=dry_run))
    # a bad recipe is answered before torch is even imported
    from redline.recipe.load import load

    loaded = load(name, overrides)
    if preview is not None:
        from redline.cli.preview import preview_recipe

        return preview_recipe(loaded.recipe, preview)
    from redline.launch.session import ended
    from redline.launch.start import fresh_run, new_run

    if not dry_run and _by_others(gpus or 1, supervise):
        from redline.launch.processes import train_supervised

        path = fresh_run(loaded, run)
        words = ["train", name, *overrides, "--run", str(path), "--continue"]
        raise typer.Exit(train_supervised(loaded.recipe, path, words, gpus=gpus or 1, again=_again(supervise)))
    raise typer.Exit(ended(lambda: new_run(loaded, run, overrides, dry_run=dry_run, gpus=gpus or 1)))


def _by_others(gpus: int, supervise: bool) -> bool:
    """Whether this process only starts and watches those that train."""
    watched = "REDLINE_PULSE" in os.environ
    return not watched and (supervise or (gpus > 1 and "RANK" not in os.environ))


def _again(supervise: bool) -> bool:
    """Whether this process begins again what failed: not where someone else does, as the script of `launch`."""
    return supervise and "REDLINE_SUPERVISED" not in os.environ


def _resume(name: str, overrides: list[str], gpus: int, *, supervise: bool, dry_run: bool) -> int:
    from redline.launch.session import ended
    from redline.launch.start import resumable, resume_run

    if not dry_run and _by_others(gpus, supervise):
        from redline.launch.processes import train_supervised

        path, loaded = resumable(name, overrides)
        words = ["train", "--resume", str(path), *overrides]
        return train_supervised(loaded.recipe, path, words, gpus=gpus, again=_again(supervise))
    return ended(lambda: resume_run(name, overrides, dry_run=dry_run, gpus=gpus))


def _continue(given: str | None, overrides: list[str], run: Path, gpus: int, *, supervise: bool, dry_run: bool) -> int:
    from redline.launch.session import ended
    from redline.launch.start import continue_run, due_in

    if not dry_run and _by_others(gpus, supervise):
        from redline.launch.processes import train_supervised

        due = due_in(run, given, overrides)
        words = ["train", *([given] if given else []), *overrides, "--run", str(run), "--continue"]
        return train_supervised(due.loaded.recipe, run, words, gpus=gpus, again=_again(supervise))
    return ended(lambda: continue_run(run, given, overrides, dry_run=dry_run, gpus=gpus))


def _sweep(name: str, overrides: list[str], options: list[str], run: Path | None, *, dry_run: bool) -> int:
    from redline.launch.start import fresh_name
    from redline.launch.sweep import Sweep, parse_axes, run_sweep
    from redline.recipe.load import find_recipe
    from redline.runs.summary import refuse_unreadable

    sweep = Sweep(name, overrides, parse_axes(options, overrides))
    directory = run or fresh_name(find_recipe(name).stem, "-sweep")
    refuse_unreadable(directory)
    return run_sweep(sweep, directory, dry_run=dry_run)
