"""redline train --gpus N, --supervise: this process starts the run's processes, watches them, and begins again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from redline.cache import make_folder, open_regular
from redline.errors import EXIT_FAILED, RecipeError, UsageError, UserError
from redline.fields import none_if_auto
from redline.hardware.host import available_cores
from redline.hardware.nvml import open_nvml, visible_handles
from redline.launch.session import CONSOLE
from redline.planning.batch import indivisible_batch
from redline.recipe.schema import Recipe
from redline.runs.trackers import require_packages
from redline.training.heartbeat import FOLDER, PARENT
from redline.training.run_directory import NOT_WRITABLE_FIX, open_no_follow
from redline.training.supervisor import RECOVERY, SUPERVISED, supervise
from redline.vocabulary import RECIPE_LOCK_FILE

LOG = "ranks.log"  # in the run: what its ranks print, stacks and all
_SHOWN = 30  # lines of it, when something failed


def check_world(recipe: Recipe, gpus: int) -> None:
    """What can be known before anything is started."""
    total = none_if_auto(recipe.train.global_batch)
    if total and (problem := indivisible_batch(total, gpus)):
        raise RecipeError("recipe", [problem])
    cards = 0 if recipe.train.device == "cpu" else _cards()
    if cards and gpus > cards:
        raise UsageError(f"this machine has {cards} GPU(s), not {gpus}.", where="--gpus", fix=f"Use --gpus {cards}.")
    if not cards and gpus > 1:
        typer.echo(f"no GPU is used: {gpus} processes on the CPU, by gloo", err=True)


def _cards() -> int:
    nvml = open_nvml()
    return 0 if nvml is None else len(visible_handles(nvml))


class Processes:
    """One attempt: torchrun with its ranks, or a single process."""

    def __init__(self, words: Sequence[str], gpus: int, log: Path, recovery: str | None, *, again: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redline-"))
        command, environment = [sys.executable, "-m", "redline", *words], dict(os.environ)
        environment |= {FOLDER: str(self.folder), PARENT: str(os.getpid())}
        environment |= {SUPERVISED: "1"} if again else {}
        environment |= {RECOVERY: recovery} if recovery else {}
        self.log = None
        if gpus > 1:
            ranks = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(gpus), "-m", "--", "redline"]
            command = [sys.executable, "-m", "torch.distributed.run", *ranks, *words]
            environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // gpus)))
            environment[CONSOLE] = "1"
            self.log = open(log, "ab", opener=open_no_follow)  # noqa: SIM115 — for as long as they run
        # a session of their own: a Ctrl-C of the terminal comes here alone, and is passed on once
        self.process = subprocess.Popen(
            command, env=environment, stdout=2 if self.log else None, stderr=self.log, start_new_session=True
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def _is_ours(self, pid: int) -> bool:
        """Not another process that was given the number of one that has ended."""
        try:
            return os.fsencode(self.folder) in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def _family(self) -> set[int]:
        """All that was begun here and is alive: ranks that have not told their numbers yet, too."""
        return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._is_ours(int(entry.name))}

    def end(self, pids: Sequence[int]) -> None:
        for pid in {*pids, *self._family()} - {self.process.pid}:
            if self._is_ours(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.log:
            self.log.close()


def train_supervised(recipe: Recipe, path: Path, words: Sequence[str], *, gpus: int, again: bool) -> int:
    """Run `redline WORDS` in processes of its own and watch them. A restart uses the same words, so they must resume
    the run at `path` once it exists (--continue or --resume)."""
    check_world(recipe, gpus)
    several = ["--gpus", str(gpus)] if gpus > 1 else []
    log = path / LOG
    require_packages(recipe.monitor)
    try:
        make_folder(path)
        if gpus > 1:
            open(log, "ab", opener=open_no_follow).close()
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror}).", where=str(path), fix=NOT_WRITABLE_FIX) from None

    def start(recovery: str | None) -> Processes:
        return Processes([*words, *several], gpus, log, recovery, again=again)

    def say(text: str) -> None:
        typer.echo(f"redline: {text}", err=True)

    size = log.stat().st_size if log.is_file() else 0
    ending = supervise(
        start, timeout=recipe.parallel.timeout, again=again, progress=lambda: last_commit(path / "checkpoints"), say=say
    )
    if ending.code == EXIT_FAILED and ending.what and log.is_file():
        _show_end(log, size)
    if not (path / RECIPE_LOCK_FILE).exists():  # it never was a run
        with suppress(OSError):
            log.unlink(missing_ok=True)
            path.rmdir()
    return ending.code


def last_commit(folder: Path) -> int | None:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return max((int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit()), default=None)


def _show_end(log: Path, start: int) -> None:
    with open(log, "rb", opener=open_regular) as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    if lines:
        typer.echo(f"the end of {log}:", err=True)
        typer.echo("\n".join(f"  {line}" for line in lines[-_SHOWN:]), err=True)
