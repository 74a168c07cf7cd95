"""redline launch"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.options import RecipeArgument, one_of, split_words
from redline.runs.summary import refuse_too_long

if TYPE_CHECKING:
    from redline.launch.cloud import CloudJob
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
    to: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER", help="slurm, k8s or skypilot.", callback=one_of("--to", "slurm", "k8s", "skypilot")
        ),
    ] = "slurm",
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="k8s, skypilot: a container image that holds redline.")
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(metavar="NAME:/PATH", help="k8s: a volume claim; skypilot: a volume. Runs lie in /PATH/runs."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="skypilot: the kind of GPU, for example h100.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="skypilot: use spot machines.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to a file instead of printing.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script instead of printing it.")] = False,
) -> None:
    """Print or submit the SLURM script of a run, its Kubernetes Job, or its SkyPilot task.

    The job resumes by itself: after its time limit, a preemption or a lost machine.

    Examples:
      redline launch pretrain-350m --nodes 2 --gpus-per-node 8 --time 12:00:00
      redline launch qlora-8b data.source=./rows.jsonl --gpus-per-node 4 --time 8h --partition gpu --submit
      redline launch pretrain-350m --to k8s --nodes 2 --gpus-per-node 8 --image redline:1 --volume training:/data
      redline launch pretrain-350m checkpoint.mirror=s3://bucket/run --to skypilot --gpu h100 --image redline:1 --spot
    """
    from redline.launch.slurm import Job, job_name, parse_time
    from redline.recipe.load import load

    slurm_only: dict[str, Any] = {"--time": time, "--partition": partition, "--sbatch": sbatch}
    cloud_only: dict[str, Any] = {"--image": image, "--volume": volume, "--gpu": gpu, "--spot": spot}
    if to == "k8s":  # a Job names the resource nvidia.com/gpu; the kind of GPU is a label of the cluster's own
        slurm_only |= {"--gpu": gpu, "--spot": spot}
    _refuse_options(cloud_only if to == "slurm" else slurm_only, to)

    name, overrides = split_words(recipe, "launch")
    resumed = _resumed(run, name, overrides)  # report mistakes here, not after a night in the queue
    loaded = resumed or load(name or "quickstart", overrides)
    for note in loaded.notes:
        typer.echo(f"note    {note}", err=True)
    _check_batch(loaded, nodes * gpus_per_node)
    site, options = _site(cluster, partition, sbatch or [])
    on_gpus = loaded.recipe.train.device != "cpu"
    if to != "slurm":
        from redline.launch.cloud import CloudJob, parse_volume
        from redline.remote import scheme_of

        file = None if resumed else _recipe_file(name, Path.cwd())
        section = site.kubernetes if to == "k8s" else site.skypilot
        disk = None if (place := volume or section.volume) is None else parse_volume(place)
        cloud_job = CloudJob(
            recipe=(*([file or name or loaded.name] if name or not resumed else []), *overrides),
            name=job_name(loaded.name),
            folder=Path.cwd(),
            cluster=site,
            nodes=nodes,
            gpus=gpus_per_node,
            on_gpus=on_gpus,
            cpus=cpus_per_gpu,
            gpu=gpu,
            image=image,
            volume=disk,
            spot=spot,
            run=None if run is None else str(run),
            # A folder of file:// is on the disk of the machine that goes, unless it is on the volume.
            mirror=scheme_of(loaded.recipe.checkpoint.mirror or "") not in ("", "file"),
            file=None if file is None else Path(file).read_text(encoding="utf-8"),
            local_data=_reads_local_data(loaded, None if disk is None else disk.path),
        )
        _write_cloud_job(cloud_job, to, out, submit=submit)
        return
    job = Job(
        recipe=(*([name or loaded.name] if name or not resumed else []), *overrides),
        name=job_name(loaded.name),
        folder=Path.cwd(),
        cluster=site,
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        on_gpus=on_gpus,
        cpus=cpus_per_gpu,
        seconds=None if time is None else parse_time(time),
        run=None if run is None else str(run),
        sbatch=options,
    )
    if out is not None:
        _write(out, job.script())
    if submit:
        _submit(job)
    elif out is None:
        typer.echo(job.script(), nl=False)


def _refuse_options(options: Mapping[str, Any], to: str) -> None:
    """Raise UsageError if an option is given that this launcher does not have."""
    from redline.errors import UsageError

    if given := [option for option, value in options.items() if value]:
        raise UsageError(f"--to {to} does not have this option.", where=given[0], fix="Leave it out.")


def _recipe_file(name: str | None, folder: Path) -> str | None:
    """Return the path of the recipe from the folder, or None for a shipped recipe."""
    from redline.errors import UsageError
    from redline.recipe.load import find_recipe

    if name is None or not Path(name).is_file():
        return None
    path = find_recipe(name).resolve()
    if not path.is_relative_to(folder.resolve()):
        what = "the recipe lies outside of this folder, which is what the nodes get."
        raise UsageError(what, where=name, fix=f"Type the command in {path.parent}.")
    return str(path.relative_to(folder.resolve()))


def _reads_local_data(loaded: Loaded, volume: str | None) -> bool:
    """Return whether the recipe reads a file or a folder of this machine that is not on the volume."""
    recipe = loaded.recipe
    names = [*(part.source for part in recipe.data.parts), recipe.model.base, recipe.model.init_from]
    paths = [Path(str(name)).expanduser() for name in names if name is not None]
    return any(path.exists() and not (volume and path.is_relative_to(volume)) for path in paths)


def _write(file: Path, text: str) -> None:
    from redline.errors import UserError

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "Choose another --out."
        raise UserError(f"cannot be written ({error.strerror}).", where=str(file), fix=fix) from None
    typer.echo(f"written {file}", err=True)


def _write_cloud_job(job: CloudJob, to: str, out: Path | None, *, submit: bool) -> None:
    """Print the file of a Kubernetes Job or a SkyPilot task, write it, or submit it."""
    from redline.launch.cloud import KUBERNETES, kubernetes_name, render, submission
    from redline.launch.cloud import submit as submit_cloud_job

    text = render(job, to)
    if out is None and not submit:
        typer.echo(text, nl=False)
        return
    file = out or Path(f"{job.name}.{to}.yaml")
    _write(file, text)
    if not submit:
        typer.echo(f"submit  {shlex.join(submission(to, str(file)))}", err=True)
        return
    submit_cloud_job(to, file)
    follow = f"kubectl logs --follow job/{kubernetes_name(job.name)}" if to == KUBERNETES else "sky jobs logs"
    typer.echo(f"status  {follow}", err=True)


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
