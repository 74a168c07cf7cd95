"""Batches made ahead of time, so that the accelerator never waits for data.

By threads, not processes: reading memory maps and numpy release the interpreter's lock, nothing is pickled,
and there is no worker that could be killed for memory apart from the run. One that is ended all the same is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from redline.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_LOOK_EVERY_S = 0.5
_JOIN_S = 5.0


_MOST_TRIES = 3  # at a step whose thread is ended


class Prefetcher(Generic[T]):
    """`next(step)` is `make(step)` for consecutive steps, computed up to `depth` steps ahead by `workers` threads.

    `make` must be a function of the step alone; with no workers it runs in the caller's thread.
    """

    def __init__(
        self, make: Callable[[int], T], start: int, *, workers: int, depth: int = 4, timeout: float = 300.0
    ) -> None:
        self._make, self._depth, self._timeout = make, max(depth, workers), timeout
        self._wanted = self._unclaimed = start
        self._made: dict[int, T] = {}
        self._failed: dict[int, BaseException] = {}
        self._owners: dict[int, threading.Thread] = {}  # of the steps that are being made
        self._deserted: list[int] = []  # whose thread was ended before they were made
        self._tries: dict[int, int] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [self._started(number) for number in range(workers)]

    def _started(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._work, name=f"redline-loader-{number}", daemon=True)
        thread.start()
        return thread

    def next(self, step: int) -> T:
        """The batch of this step, which must be the one after the last. A failure in `make(step)` is raised here."""
        if step != self._wanted:
            raise ValueError(f"step {step} asked for, but {self._wanted} is next")
        if self._closed:
            raise RuntimeError(f"the loader was closed before step {step}")
        if self._threads:
            return self._wait_for(step)
        batch = self._make(step)
        self._wanted = step + 1
        return batch

    def _wait_for(self, step: int) -> T:
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while step not in self._made:
                if step in self._failed:
                    raise _as_failure(self._failed[step], step)
                self._replace_the_dead()
                left = deadline - time.monotonic()
                if left <= 0:
                    fix = "Look at the disk, or `redline prepare` a streamed source first; then resume the run."
                    raise UserError(f"the data of step {step} were not ready within {self._timeout:g} s.", fix=fix)
                self._changed.wait(min(left, _LOOK_EVERY_S))
            self._wanted = step + 1
            self._tries.pop(step, None)
            self._changed.notify_all()  # there is room for one more
            return self._made.pop(step)

    def _replace_the_dead(self) -> None:
        """A thread that was ended from outside leaves a step behind, which another makes: a batch is a function of its
        step. One that ends several threads is a failure of its own."""
        if self._failed:  # no thread goes on after one
            return
        self._threads = [t if t.is_alive() else self._started(i) for i, t in enumerate(self._threads)]
        for step in [step for step, owner in self._owners.items() if not owner.is_alive()]:
            del self._owners[step]
            self._deserted.append(step)
        self._changed.notify_all()

    def _work(self) -> None:
        step = None
        try:
            while (step := self._claim()) is not None:
                batch = self._make(step)
                with self._changed:
                    self._made[step] = batch
                    del self._owners[step]
                    self._changed.notify_all()
                step = None
        except BaseException as error:  # a failure must reach the trainer, at its step and in order
            with self._changed:
                if isinstance(error, Exception) or (step is not None and self._tries[step] >= _MOST_TRIES):
                    self._failed[self._unclaimed if step is None else step] = error
                self._changed.notify_all()

    def _claim(self) -> int | None:
        """The next step to make, as soon as there is room for it; None when there is nothing more to do."""
        with self._changed:
            while not (self._closed or self._failed):
                if self._deserted or self._unclaimed < self._wanted + self._depth:
                    step = self._deserted[0] if self._deserted else self._unclaimed
                    self._owners[step] = threading.current_thread()  # first: whatever comes between, it has an owner
                    self._tries[step] = self._tries.get(step, 0) + 1
                    if self._deserted:
                        self._deserted.pop(0)
                    else:
                        self._unclaimed += 1
                    return step
                self._changed.wait()
        return None

    def close(self) -> None:
        """Stop the threads; safe to call again. One that hangs in `make` is left behind, and dies with the process."""
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_failure(error: BaseException, step: int) -> Exception:
    """The error itself; but a thread's SystemExit is no wish of the trainer to leave."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a loader thread was ended at step {step} by {error!r}")
    failure.__cause__ = error
    return failure


def pin(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In page-locked memory where there is a GPU, so that the copy to it can overlap with work."""
    import torch

    if not torch.cuda.is_available():
        return batch
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
