"""Fixtures: processes to kill, small checkpoints to damage, and calls that can be made to fail."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.training import checkpoint
from redline.training.checkpoint import Snapshot, newest_valid, remove_temporaries
from redline.training.control import RunDirectory


class Child:
    """A fork of the test process. It has imported torch already, so a trial takes a fraction of a second."""

    def __init__(self, action: Callable[[Child], int | None]) -> None:
        self._read, self._write = os.pipe()
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(action)
        os.close(self._write)

    def _live(self, action: Callable[[Child], int | None]) -> None:
        code = 99
        try:
            code = action(self) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def say_ready(self) -> None:
        """Tell the parent that the child is ready. Called in the child."""
        os.write(self._write, b".")

    def await_ready(self, timeout: float = 30.0) -> None:
        """Wait until the child is ready or has ended."""
        assert select.select([self._read], [], [], timeout)[0], "the child hangs"

    def send(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the exit code, which is negative if a signal ended the process."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._read)
        return self.code


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[Child], int | None]], Child]]:
    torch.set_num_threads(1)  # a fork would lose the threads of a pool and then hang
    children: list[Child] = []

    def start(action: Callable[[Child], int | None]) -> Child:
        children.append(Child(action))
        return children[-1]

    yield start
    for child in children:
        child.send(signal.SIGKILL)
        child.wait()


@pytest.fixture
def attempt(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Start or resume a run as the command line does, and train until it ends."""
    world.run(
        tmp_path_factory.mktemp("first-run") / "run", "train.steps=1"
    )  # makes torch import its lazy modules before the fork

    def run(path: Path, *overrides: str, prepare: Callable[[Any], None] = lambda _: None, **options: Any) -> Any:
        with RunDirectory(path) as directory:
            remove_temporaries(directory.checkpoints)
            newest = newest_valid(directory.checkpoints)
            trainer = world.trainer(directory, *overrides, checkpoint=newest, **options)
            trainer.monitor.emit("start", schema=1, resumed_from=trainer.state.step)
            prepare(trainer)
            try:
                trainer.outcome = trainer.run()
            finally:
                trainer.monitor.log.close()
        return trainer

    return run


@pytest.fixture
def tiny() -> Callable[[int], Snapshot]:
    """Return a function that makes a snapshot of five kilobytes, different for every step."""

    def make(step: int) -> Snapshot:
        generator = torch.Generator().manual_seed(step)
        tensors = {
            stem: {name: torch.randn(16, 20, generator=generator) for name in ("first", "second")}
            for stem in ("model", "optimizer")
        }
        return Snapshot(step, tensors, {"step": step, "best": None, "identity": {"data": "abc"}})

    return make


class Calls:
    """Counts the disk operations of a save, and calls `act` before operation number `at`.

    A file is written in two halves with an operation between them, because a save may end within a file.
    """

    SYSTEM = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open", "scandir", "listdir")

    def __init__(self, patch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
        self.count, self.at, self.act = 0, at, act
        for name in self.SYSTEM:
            patch.setattr(os, name, self._counted(getattr(os, name)))
        save_file = checkpoint.save_file

        def save_in_halves(tensors: Any, path: Path) -> None:
            self.operation()
            save_file(tensors, path)
            content = path.read_bytes()
            os.truncate(path, len(content) // 2)
            self.operation()
            write_bytes(path, content)

        write_bytes = Path.write_bytes

        def write_in_halves(path: Path, data: bytes) -> int:
            self.operation()
            write_bytes(path, data[: len(data) // 2])
            self.operation()
            return write_bytes(path, data)

        patch.setattr(checkpoint, "save_file", save_in_halves)
        patch.setattr(Path, "write_bytes", write_in_halves)

    def operation(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.act()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.operation()
            return function(*args, **options)

        return call


@pytest.fixture
def calls() -> Callable[[int, Callable[[], None]], AbstractContextManager[Calls]]:
    @contextmanager
    def counted(at: int, act: Callable[[], None]) -> Iterator[Calls]:
        with pytest.MonkeyPatch.context() as patch:
            yield Calls(patch, at, act)

    return counted
