"""redline train"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.completion import complete_runs
from redline.cli.options import RecipeArgument, split_words
from redline.errors import UsageError, require_torch

if TYPE_CHECKING:
    from redline.launch.processes import Nodes


def train(
    recipe: RecipeArgument = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="The run's directory. Default: runs/RECIPE-DATE-TIME.")
    ] = None,
    continue_: Annotated[
        bool, typer.Option("--continue", help="Resume the run in the directory of --run; start one if there is none.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", autocompletion=complete_runs, help="Resume a run: its path, its name, or latest."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=V1,V2,...",
            help="Train one run for each value of a key, or for each combination of several --sweep.",
        ),
    ] = None,
    preview: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show N training samples; train nothing.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of GPUs on this machine. On a machine without GPUs: number of CPU processes. Default: 1.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of machines. Type the command on each of them, with another --node-rank."
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="I", help="Which of the machines this is, from 0. Default: $NODE_RANK."),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Where the machines meet: machine 0. Default: $MASTER_ADDR:$MASTER_PORT."
        ),
    ] = None,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Restart by itself after a lost rank, a hang, or running out of memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, plan and print; train nothing.")] = False,
) -> None:
    """Train a model, or resume a run.

    Without a recipe it trains quickstart, which takes about two minutes on any machine.

    Examples:
      redline train
      redline train pretrain-350m data.source=./tokens train.hours=1.5
      redline train --resume latest train.steps=2000
      redline train pretrain-350m data.source=./tokens --run runs/long --continue
      redline train quickstart --sweep train.lr_base=3e-3,6e-3
      redline train qlora-smollm2 data.source=./train.jsonl --preview 3
      redline train pretrain-350m data.source=./tokens --gpus 4 --supervise
      redline train pretrain-350m --run /shared/run --continue --nodes 2 --node-rank 0 --master node0 --supervise
    """
    from redline.launch.processes import read_nodes
    from redline.launch.start import Target, accelerate_warning, read_target, restart_warning

    require_torch()
    target, words = read_target(recipe or [], Target(run, resume, continue_), os.environ, sweep=bool(sweep))
    given_recipe, overrides = split_words(words, "train")
    run, resume = target.run, target.resume
    if warning := accelerate_warning(os.environ):
        typer.echo(f"redline: {warning}", err=True)
    places = read_nodes(
        nodes, node_rank, master, os.environ, repeatable=target.continued or resume is not None or bool(sweep)
    )
    if places.count > 1 and dry_run:
        fix = f"Use `redline plan RECIPE --gpus {gpus or 1} --nodes {places.count}`."
        raise UsageError("--dry-run plans for one machine.", where="--nodes", fix=fix)
    if preview is not None and (resume or sweep):
        raise UsageError("--preview shows the data of one recipe.", fix="Leave out --resume and --sweep.")
    if resume is not None:
        if given_recipe or run:
            what = "--resume takes no recipe and no --run: both are stored in the run."
            raise UsageError(what, fix="Leave them out.")
        if sweep:
            fix = "To resume a sweep, repeat its command with the same --run."
            raise UsageError("--resume resumes one run.", fix=fix)
        raise typer.Exit(_resume(resume, overrides, gpus or 1, places, supervise=supervise, dry_run=dry_run))
    if not sweep and not dry_run and preview is None and (warning := restart_warning(target, os.environ)):
        typer.echo(f"redline: {warning}", err=True)
    if run is not None and target.continued and preview is None:
        raise typer.Exit(
            _continue(given_recipe, overrides, run, gpus or 1, places, supervise=supervise, dry_run=dry_run)
        )
    name = given_recipe or "quickstart"
    if sweep:
        if gpus or supervise or places.count > 1:
            what = "--sweep trains one run after the other, each on one GPU."
            raise UsageError(what, fix="Leave out --gpus, --nodes and --supervise.")
        raise typer.Exit(_sweep(name, overrides, sweep, run, dry_run=dry_run))
    # Load the recipe before anything imports torch, so that a mistake in it is reported at once.
    from redline.recipe.load import load

    loaded = load(name, overrides)
    if preview is not None:
        from redline.cli.preview import preview_recipe

        return preview_recipe(loaded.recipe, preview)
    from redline.launch.processes import ChildCommand, train_or_supervise
    from redline.launch.start import new_run, new_run_path

    def child_command() -> ChildCommand:
        path = new_run_path(loaded, run)
        return ChildCommand(loaded.recipe, path, ["train", name, *overrides, "--run", str(path), "--continue"])

    code = train_or_supervise(
        lambda: new_run(loaded, run, overrides, dry_run=dry_run, gpus=gpus or 1),
        child_command,
        gpus=gpus or 1,
        supervise=supervise,
        dry_run=dry_run,
    )
    raise typer.Exit(code)


def _resume(name: str, overrides: list[str], gpus: int, nodes: Nodes, *, supervise: bool, dry_run: bool) -> int:
    """Run `train --resume` and return the exit code."""
    from redline.launch.processes import ChildCommand, train_or_supervise
    from redline.launch.start import open_resumable, resume_run
    from redline.recipe.resolve import adapt_to_world

    def child_command() -> ChildCommand:
        path, loaded = open_resumable(name, overrides)
        return ChildCommand(adapt_to_world(loaded.recipe, gpus), path, ["train", "--resume", str(path), *overrides])

    return train_or_supervise(
        lambda: resume_run(name, overrides, dry_run=dry_run, gpus=gpus),
        child_command,
        gpus=gpus,
        supervise=supervise,
        dry_run=dry_run,
        nodes=nodes,
    )


def _continue(
    recipe: str | None, overrides: list[str], run: Path, gpus: int, nodes: Nodes, *, supervise: bool, dry_run: bool
) -> int:
    """Run `train --continue` and return the exit code."""
    from redline.launch.processes import ChildCommand, train_or_supervise
    from redline.launch.start import continue_run, plan_continue
    from redline.recipe.lock import spelled_as_locked
    from redline.recipe.resolve import adapt_to_world

    recipe = spelled_as_locked(recipe, run)

    def child_command() -> ChildCommand:
        due = plan_continue(run, recipe, overrides)
        resumed = adapt_to_world(due.loaded.recipe, gpus) if due.resumed else due.loaded.recipe
        words = ["train", *([recipe] if recipe else []), *overrides, "--run", str(run), "--continue"]
        return ChildCommand(resumed, run, words)

    return train_or_supervise(
        lambda: continue_run(run, recipe, overrides, dry_run=dry_run, gpus=gpus),
        child_command,
        gpus=gpus,
        supervise=supervise,
        dry_run=dry_run,
        nodes=nodes,
    )


def _sweep(name: str, overrides: list[str], options: list[str], run: Path | None, *, dry_run: bool) -> int:
    """Run `train --sweep` and return the exit code."""
    from redline.launch.start import unused_run_path
    from redline.launch.sweep import Sweep, parse_axes, run_sweep
    from redline.recipe.load import find_recipe
    from redline.runs.summary import refuse_unreadable

    sweep = Sweep(name, overrides, parse_axes(options, overrides))
    directory = run or unused_run_path(find_recipe(name).stem, "-sweep")
    refuse_unreadable(directory)
    return run_sweep(sweep, directory, dry_run=dry_run)
