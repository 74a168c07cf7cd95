"""`redline train`: train in this process, or start processes that do, supervise them and restart them on failure."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from redline.cache import make_folder, open_regular
from redline.errors import EXIT_FAILED, RecipeError, UsageError, UserError
from redline.fields import none_if_auto
from redline.hardware.host import available_cores, has_proc, list_processes
from redline.hardware.nvml import open_nvml, visible_handles
from redline.launch.session import CONSOLE, exit_code_of
from redline.planning.batch import indivisible_batch
from redline.planning.context import indivisible_world
from redline.recipe.schema import Recipe
from redline.runs.monitor import require_packages
from redline.training.control import FOLDER_VARIABLE, NOT_WRITABLE_FIX, PARENT_VARIABLE, RECOVERY, open_no_follow
from redline.training.supervisor import SUPERVISED, supervise
from redline.vocabulary import CHECKPOINTS_FOLDER, RECIPE_LOCK_FILE

LOG = "ranks.log"  # in the run directory: the output of all ranks, with the stacks of hung ones
_SHOWN_LINES = 30  # of the log, after a failure
DEFAULT_PORT = 29500
NODE_WAIT_S = 1800  # for the other nodes of an attempt: a machine that was lost may take long to come back
NODE_VARIABLES = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Nodes:
    """The machines that train one run together, each with a command of its own, and which of them this one is."""

    count: int = 1
    rank: int = 0
    host: str = ""  # of the first node, where the ranks meet
    port: int = DEFAULT_PORT

    @property
    def log(self) -> str:
        """Return the name of the log of this machine's ranks, because all nodes share the run directory."""
        return LOG if self.rank == 0 else LOG.replace(".", f"-{self.rank}.")

    @property
    def torchrun_options(self) -> list[str]:
        if self.count == 1:
            return ["--standalone", "--local-addr", "127.0.0.1"]
        place = ["--node-rank", str(self.rank), "--master-addr", self.host, "--master-port", str(self.port)]
        return ["--nnodes", str(self.count), *place, "--rdzv-conf", f"timeout={NODE_WAIT_S}"]


ONE_NODE = Nodes()


def read_nodes(
    count: int | None, rank: int | None, master: str | None, environment: Mapping[str, str], *, repeatable: bool
) -> Nodes:
    """Return the nodes from the options, or where one is missing from NODE_RANK, MASTER_ADDR and MASTER_PORT.

    `repeatable` says whether the command may be repeated: the nodes start at different times, and after the first one
    has created the run the others must join it.
    """
    if count is None or count == 1:
        if master is not None or rank:
            raise UsageError("--node-rank and --master are for several nodes.", fix="Add --nodes N, or leave them out.")
        return ONE_NODE
    if not repeatable:
        what = "several nodes share one run, and each of them repeats its command after a failure."
        raise UsageError(what, where="--nodes", fix="Add --run DIR --continue, with a DIR that all nodes see.")
    rank_text = environment.get("NODE_RANK", "") if rank is None else str(rank)
    if not rank_text.isascii() or not rank_text.isdigit() or int(rank_text) >= count:
        what = f"{rank_text!r} is not the number of one of {count} nodes."
        raise UsageError(what, where="--node-rank", fix=f"Use 0 to {count - 1}, another one on each node.")
    given = master or environment.get("MASTER_ADDR", "")
    host, colon, port = given.rpartition(":") if given.count(":") == 1 else (given, "", "")
    port = port if colon else environment.get("MASTER_PORT", "") or str(DEFAULT_PORT)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        what = f"{given!r} is not an address at which the nodes can meet."
        raise UsageError(
            what, where="--master", fix="Use the name of the first node, for example --master node0:29500."
        )
    return Nodes(count, int(rank_text), host, int(port))


@dataclass(frozen=True)
class ChildCommand:
    """The words after `redline` with which child processes train the run at `path`."""

    recipe: Recipe
    path: Path
    words: Sequence[str]  # with --continue or --resume, because a restart uses the same words


def train_or_supervise(
    train: Callable[[], int],
    child_command: Callable[[], ChildCommand],
    *,
    gpus: int,
    supervise: bool,
    dry_run: bool,
    nodes: Nodes = ONE_NODE,
) -> int:
    """Call `train` in this process, or train in child processes if several are needed. Return the exit code.

    `child_command` is called only in the second case.
    """
    # A supervised process, or a rank that torchrun has started, trains by itself: otherwise it would start others.
    is_supervised, is_rank = FOLDER_VARIABLE in os.environ, "RANK" in os.environ
    if dry_run or is_supervised or not (supervise or ((gpus > 1 or nodes.count > 1) and not is_rank)):
        return exit_code_of(train)
    command = child_command()
    # The script of `redline launch` restarts failed runs itself; two supervisors would restart a run twice.
    restart = supervise and SUPERVISED not in os.environ
    return train_supervised(command.recipe, command.path, command.words, gpus=gpus, restart=restart, nodes=nodes)


def check_world(recipe: Recipe, gpus: int, nodes: int = 1) -> None:
    """Raise an error if so many processes on each of so many nodes cannot train the recipe here."""
    total, context, world = none_if_auto(recipe.train.global_batch), recipe.parallel.context, gpus * nodes
    problem = indivisible_world(context, world)
    if problem is None and total:
        problem = indivisible_batch(total, world // context)
    if problem is not None:
        raise RecipeError("recipe", [problem])
    count = 0 if recipe.train.device == "cpu" else _gpu_count()
    if count and gpus > count:
        raise UsageError(f"this machine has {count} GPU(s), not {gpus}.", where="--gpus", fix=f"Use --gpus {count}.")
    if not count and gpus > 1:
        typer.echo(f"no GPU is used: {gpus} processes train on the CPU", err=True)


def _gpu_count() -> int:
    nvml = open_nvml()
    return 0 if nvml is None else len(visible_handles(nvml))


class Processes:
    """One attempt to train: torchrun with its ranks, or a single process."""

    def __init__(
        self,
        words: Sequence[str],
        gpus: int,
        log: Path,
        recovery: str | None,
        *,
        restart: bool,
        more: Mapping[str, str],
        quiet: bool,
        nodes: Nodes = ONE_NODE,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redline-"))
        command, environment = [sys.executable, "-m", "redline", *words], dict(os.environ)
        environment |= {FOLDER_VARIABLE: str(self.folder), PARENT_VARIABLE: str(os.getpid())}
        environment |= {SUPERVISED: "1"} if restart else {}
        environment |= more
        environment |= {RECOVERY: recovery} if recovery else {}
        self.log = None
        if gpus > 1 or nodes.count > 1:
            ranks = [*nodes.torchrun_options, "--nproc-per-node", str(gpus), "-m", "--", "redline"]
            command = [sys.executable, "-m", "torch.distributed.run", *ranks, *words]
            environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // gpus)))
            environment[CONSOLE] = "1"
            self.log = open(log, "ab", opener=open_no_follow)  # noqa: SIM115 - until `end`
        # In a session of their own the processes do not receive Ctrl-C from the terminal. The supervisor forwards it
        # once: a second one would mean "exit at once".
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL if quiet else 2 if self.log else None,
            stderr=self.log,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def _is_ours(self, pid: int) -> bool:
        """Return whether a process belongs to this attempt. A process id may have been reused by another program."""
        try:
            return os.fsencode(self.folder) in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def _own_pids(self, pids: Sequence[int]) -> set[int]:
        """Return all living processes of this attempt, also ranks that have not written a heartbeat yet.

        `pids` are those of the heartbeats.
        """
        if has_proc():
            return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._is_ours(int(entry.name))}
        # macOS does not show the environment of a process, only its parent and its command line.
        known = list_processes()
        own = {pid for pid in pids if "redline" in known.get(pid, (0, ""))[1]}
        below = {self.process.pid}
        while children := {pid for pid, (parent, _) in known.items() if parent in below} - below:
            below |= children
        return own | below

    def end(self, pids: Sequence[int]) -> None:
        for pid in self._own_pids(pids) - {self.process.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.log:
            self.log.close()


def train_supervised(
    recipe: Recipe,
    path: Path,
    words: Sequence[str],
    *,
    gpus: int,
    restart: bool,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    nodes: Nodes = ONE_NODE,
) -> int:
    """Run `redline WORDS` in child processes and supervise them. Return the exit code.

    `environment` holds more variables for them. With `quiet` nothing of their progress is shown.
    """
    check_world(recipe, gpus, nodes.count)
    gpu_words = ["--gpus", str(gpus)] if gpus > 1 else []
    log = path / nodes.log
    require_packages(recipe.monitor)
    try:
        make_folder(path)
        if gpus > 1 or nodes.count > 1:
            open(log, "ab", opener=open_no_follow).close()
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror}).", where=str(path), fix=NOT_WRITABLE_FIX) from None

    def start(recovery: str | None) -> Processes:
        more = environment or {}
        return Processes(
            [*words, *gpu_words], gpus, log, recovery, restart=restart, more=more, quiet=quiet, nodes=nodes
        )

    def report(text: str) -> None:
        typer.echo(f"redline: {text}", err=True)

    size = log.stat().st_size if log.is_file() else 0
    result = supervise(
        start,
        timeout=recipe.parallel.timeout,
        restart=restart,
        progress=lambda: last_commit(path / CHECKPOINTS_FOLDER),
        log=report,
        several_nodes=nodes.count > 1,
    )
    if result.code == EXIT_FAILED and result.message and log.is_file():
        _show_end(log, size)
    if not (path / RECIPE_LOCK_FILE).exists():  # training never started
        with suppress(OSError):
            log.unlink(missing_ok=True)
            path.rmdir()
    return result.code


def last_commit(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, by its name alone: verifying needs torch, which is slow to import."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return max((int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit()), default=None)


def _show_end(log: Path, start: int) -> None:
    with open(log, "rb", opener=open_regular) as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    if lines:
        typer.echo(f"the end of {log}:", err=True)
        typer.echo("\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:]), err=True)
