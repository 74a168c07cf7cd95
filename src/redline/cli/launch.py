"""redline launch"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import RecipeArgument, split_words
from redline.runs.summary import refuse_too_long

if TYPE_CHECKING:
    from redline.launch.cluster import Cluster
    from redline.launch.slurm import Job
    from redline.recipe.load import Loaded


def launch(
    recipe: RecipeArgument = None,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, metavar="N", help="GPUs per node; with train.device=cpu: processes per node.")
    ] = 1,
    cpus_per_gpu: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="CPUs per GPU. Default: as in cluster.yaml, else 8; 1 with train.device=cpu."
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="T", help="Time limit: 12:00:00, 1-12:00:00 or 12h. Default: the limit of the partition."),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="P", help="The partition. Default: as in cluster.yaml.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="DIR", help="The run's directory; a run in it is resumed. Default: runs/RECIPE-JOB."
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="An additional #SBATCH line, for example --sbatch=--mem=256G."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings of the cluster. Default: ~/.config/redline/cluster.yaml."),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script instead of printing it.")] = False,
) -> None:
    """Print or submit the SLURM script of a run.

    The job saves before its time limit, requeues itself and resumes.

    Examples:
      redline launch pretrain-350m --nodes 2 --gpus-per-node 8 --time 12:00:00
      redline launch qlora-8b data.source=./rows.jsonl --gpus-per-node 4 --time 8h --partition gpu --submit
    """
    from redline.launch.slurm import Job, job_name, parse_time
    from redline.recipe.load import load

    name, overrides = split_words(recipe, "launch")
    resumed = _resumed(run, name, overrides)  # report mistakes here, not after a night in the queue
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
    """Return the recipe with which the run in `run` resumes, or None if there is no run; refuse invalid changes."""
    from redline.vocabulary import RECIPE_LOCK_FILE

    if run is not None:
        refuse_too_long(run)
    if run is None or not (run / RECIPE_LOCK_FILE).is_file():
        return None
    from redline.launch.start import plan_continue
    from redline.recipe.lock import spelled_as_locked

    return plan_continue(run, spelled_as_locked(name, run), overrides).loaded


def _check_batch(loaded: Loaded, world: int) -> None:
    """Raise a RecipeError if the ranks cannot share the batch that the recipe sets."""
    from redline.errors import Problem, RecipeError
    from redline.fields import none_if_auto
    from redline.planning.batch import indivisible_batch, solve_batch
    from redline.planning.context import indivisible_world

    train = loaded.recipe.train
    total, micro, accumulation = (
        none_if_auto(train.global_batch),
        none_if_auto(train.micro_batch),
        none_if_auto(train.accumulation),
    )
    if problem := indivisible_world(loaded.recipe.parallel.context, world):
        raise RecipeError(loaded.name, [problem])
    world //= loaded.recipe.parallel.context
    batch = (indivisible_batch(total, world) if total else None) or solve_batch(total, micro, accumulation, world)
    if isinstance(batch, Problem):
        raise RecipeError(loaded.name, [batch])


def _site(file: Path | None, partition: str | None, sbatch: list[str]) -> tuple[Cluster, tuple[str, ...]]:
    """Return the settings of the cluster with the partition of the command, and the additional #SBATCH options."""
    from redline.errors import UsageError
    from redline.launch.cluster import one_line, read_cluster, sbatch_option

    site = read_cluster(file)
    try:
        if partition is not None:
            site = site.model_copy(update={"partition": one_line(partition)})
        return site, tuple(sbatch_option(option) for option in sbatch)
    except ValueError as error:
        raise UsageError(str(error), fix="Write the option as in a SLURM script.") from None


def _submit(job: Job) -> None:
    from redline.launch.slurm import submit

    number = submit(job.script(), None if job.cluster.logs is None else Path(job.cluster.logs))
    typer.echo(f"job {number} submitted")
    run = job.run or f"runs/{job.name}-{number}"
    typer.echo(f"run     {run}", err=True)
    typer.echo(f"log     {job.log_of(number)}", err=True)
    typer.echo(f"status  squeue --jobs {number}", err=True)
    typer.echo(f"requeue scancel --signal=USR1 --batch {number} (saves first)", err=True)
    typer.echo(f"stop    redline stop {shlex.quote(run)} (saves first)", err=True)
