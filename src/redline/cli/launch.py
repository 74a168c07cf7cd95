"""redline launch"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import split_words
from redline.runs.summary import refuse_too_long

if TYPE_CHECKING:
    from redline.launch.cluster import Cluster
    from redline.launch.slurm import Job
    from redline.recipe.load import Loaded


def launch(
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE …]", help="A shipped name or a YAML file.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="GPUs of each node, a rank on each; processes with train.device=cpu.")
    ] = 1,
    cpus_per_gpu: Annotated[
        int | None, typer.Option(min=1, help="CPUs of each rank; 8, or cluster.yaml's; on a CPU 1.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="T", help="12:00:00, 1-12:00:00 or 12h; else the partition's own limit.")
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="P", help="Stronger than cluster.yaml's.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Where the run goes, or goes on; runs/RECIPE-JOB if not given.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="One more #SBATCH line, like --sbatch=--mem=256G."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The site's lines; ~/.config/redline/cluster.yaml if not given.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script instead of printing it.")] = False,
) -> None:
    """Print the SLURM script of a run, or submit it: it saves before the time limit, requeues itself and goes on.

    Examples:
      redline launch pretrain-350m --nodes 2 --gpus-per-node 8 --time 12:00:00
      redline launch qlora-8b data.source=./rows.jsonl --gpus-per-node 4 --time 8h --partition gpu --submit
    """
    from redline.launch.slurm import Job, job_name, parse_time
    from redline.recipe.load import load

    name, overrides = split_words(recipe, "launch")
    resumed = _resumed(run, name, overrides)  # a mistake is answered here, not after a night in the queue
    loaded = resumed or load(name or "quickstart", overrides)
    for note in loaded.notes:
        typer.echo(f"note    {note}", err=True)
    _check_batch(loaded, nodes * gpus_per_node)
    site, options = _site(cluster, partition, sbatch or [])
    job = Job(
        recipe=(*([name or loaded.name] if name or not resumed else []), *overrides),
        name=job_name(loaded.name),
        folder=Path.cwd(),
        cluster=site,
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        on_gpus=loaded.recipe.train.device != "cpu",
        cpus=cpus_per_gpu,
        seconds=None if time is None else parse_time(time),
        run=None if run is None else str(run),
        sbatch=options,
    )
    if submit:
        _submit(job)
    else:
        typer.echo(job.script(), nl=False)


def _resumed(run: Path | None, name: str | None, overrides: list[str]) -> Loaded | None:
    """The recipe of a run that is there already, as it goes on; what it cannot go on with is refused."""
    from redline.vocabulary import RECIPE_LOCK_FILE

    if run is not None:
        refuse_too_long(run)
    if run is None or not (run / RECIPE_LOCK_FILE).is_file():
        return None
    from redline.launch.start import due_in

    return due_in(run, name, overrides).loaded


def _check_batch(loaded: Loaded, world: int) -> None:
    """Whether so many ranks can share the batch, as far as the recipe has settled it."""
    from redline.errors import Problem, RecipeError
    from redline.fields import none_if_auto
    from redline.planning.batch import indivisible_batch, solve_batch

    train = loaded.recipe.train
    total, micro, accumulation = (
        none_if_auto(train.global_batch),
        none_if_auto(train.micro_batch),
        none_if_auto(train.accumulation),
    )
    found = (indivisible_batch(total, world) if total else None) or solve_batch(total, micro, accumulation, world)
    if isinstance(found, Problem):
        raise RecipeError(loaded.name, [found])


def _site(file: Path | None, partition: str | None, sbatch: list[str]) -> tuple[Cluster, tuple[str, ...]]:
    """The site's lines, and those of the command."""
    from redline.errors import UsageError
    from redline.launch.cluster import one_line, read_cluster, sbatch_option

    site = read_cluster(file)
    try:
        if partition is not None:
            site = site.model_copy(update={"partition": one_line(partition)})
        return site, tuple(sbatch_option(option) for option in sbatch)
    except ValueError as error:
        raise UsageError(str(error), fix="Options of sbatch are written as in a script.") from None


def _submit(job: Job) -> None:
    from redline.launch.slurm import submit

    number = submit(job.script(), None if job.cluster.logs is None else Path(job.cluster.logs))
    typer.echo(f"job {number} submitted")
    run = job.run or f"runs/{job.name}-{number}"
    typer.echo(f"run     {run}", err=True)
    typer.echo(f"log     {job.log_of(number)}", err=True)
    typer.echo(f"look    squeue --jobs {number}", err=True)
    typer.echo(f"leave   scancel --signal=USR1 --batch {number} saves and requeues it", err=True)
    typer.echo(f"end     redline stop {shlex.quote(run)} saves and ends it", err=True)
