"""Ranks within a test: forks of the test process, which has imported torch already, in a gloo group."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


class Fork:
    """One rank; its output goes to `log`."""

    def __init__(self, action: Callable[[], int | None], environment: dict[str, str], log: Path) -> None:
        torch.set_num_threads(1)  # no pool of threads that a fork would lose
        sys.stdout.flush()
        sys.stderr.flush()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                for number in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
                sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # not the test runner's  # noqa: SIM115
                os.environ.update(environment)
                code = action() or 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code (negative after a signal), or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def end(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.code = -signal.SIGKILL


def run_ranks(
    size: int, action: Callable[[Any], int | None], folder: Path, timeout: float = 60.0, patience: float = 30.0
) -> list[int]:
    """Run `action(ranks)` on so many ranks; return their exit codes."""
    from redline.training.distributed import join

    def live() -> int | None:
        return action(join("cpu", patience))

    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    forks = [Fork(live, rank_environment(rank, size, port), folder / f"rank-{rank}.log") for rank in range(size)]
    deadline = time.monotonic() + timeout
    try:
        while any(fork.poll() is None for fork in forks) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for fork in forks:
            fork.end()
    return [int(fork.code or 0) for fork in forks]


def rank_logs(folder: Path, ranks: Sequence[int]) -> str:
    return "\n".join((folder / f"rank-{rank}.log").read_text() for rank in ranks)


class Several:
    """Trains runs with any number of ranks; 1 is a process without a process group."""

    def __init__(self, world: Any, folder: Path) -> None:
        self.world, self.folder = world, folder

    def run(
        self, run: Path, size: int, *options: str, resume: bool = False, prepare: Callable[[Any], None] | None = None
    ) -> Path:
        if size == 1:
            self.world.run(run, *options, resume=resume)
            return run

        def train(ranks: Any) -> int:
            from redline.training.checkpoint import newest_valid
            from redline.training.control import RunDirectory

            directory = RunDirectory(run)
            if ranks.is_main:
                directory.__enter__()
            ranks.barrier()
            checkpoint = newest_valid(directory.checkpoints) if resume else None
            if not ranks.is_main:
                directory = RunDirectory(self.folder / f"other-{ranks.rank}")  # its log is nobody's
                directory.path.mkdir(exist_ok=True)
                trainer = self.world.trainer(directory, *options, checkpoint=checkpoint, ranks=ranks)
                trainer.run_directory = trainer.checkpoints.run = RunDirectory(run)
                trainer.checkpoints._saver.folder = run / "checkpoints"
            else:
                trainer = self.world.trainer(directory, *options, checkpoint=checkpoint, ranks=ranks)
            if prepare:
                prepare(trainer)
            code = trainer.run().exit_code
            ranks.barrier()
            return int(code)

        logs = self.folder / f"logs-{run.name}"
        codes = run_ranks(size, train, logs)
        assert set(codes) <= {0, 75}, rank_logs(logs, range(size))
        return run
