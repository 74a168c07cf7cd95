"""Prefetching: batches are made ahead of time by threads, so that the accelerator never waits for data.

Threads, not processes: reading memory maps and numpy release the interpreter's lock, nothing is pickled, and there is
no worker process that could be killed when memory runs out. A thread that ends nevertheless is replaced.
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

_CHECK_THREADS_S = 0.5
_JOIN_S = 5.0
_MAX_TRIES = 3  # threads that may end while they make the same step


class Prefetcher(Generic[T]):
    """Makes the batches of consecutive steps with `make(step)`, up to `depth` steps ahead, in `workers` threads.

    `make` must be a function of the step alone. With 0 workers it runs in the caller's thread.
    """

    def __init__(
        self, make: Callable[[int], T], start: int, *, workers: int, depth: int = 4, timeout: float = 300.0
    ) -> None:
        self._make, self._depth, self._timeout = make, max(depth, workers), timeout
        self._next = self._unclaimed = start  # the step that the caller gets next; the first that no thread makes
        self._made: dict[int, T] = {}
        self._failed: dict[int, BaseException] = {}
        self._owners: dict[int, threading.Thread] = {}  # of the steps that are being made
        self._abandoned: list[int] = []  # steps whose thread ended before they were made
        self._tries: dict[int, int] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [self._start_thread(number) for number in range(workers)]

    def _start_thread(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._work, name=f"redline-loader-{number}", daemon=True)
        thread.start()
        return thread

    def next(self, step: int) -> T:
        """Return the batch of this step, which must follow the last one. Raise the error of `make(step)` here."""
        if step != self._next:
            raise ValueError(f"step {step} was requested, but step {self._next} is next")
        if self._closed:
            raise RuntimeError(f"the loader was closed before step {step}")
        if self._threads:
            return self._wait_for(step)
        batch = self._make(step)
        self._next = step + 1
        return batch

    def _wait_for(self, step: int) -> T:
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while step not in self._made:
                if step in self._failed:
                    raise _as_failure(self._failed[step], step)
                self._replace_dead_threads()
                left = deadline - time.monotonic()
                if left <= 0:
                    fix = "Check the disk, or run `redline prepare` on a streamed source first; then resume the run."
                    raise UserError(f"the batch of step {step} was not ready within {self._timeout:g} s.", fix=fix)
                self._changed.wait(min(left, _CHECK_THREADS_S))
            self._next = step + 1
            self._tries.pop(step, None)
            self._changed.notify_all()  # a thread may make one more batch
            return self._made.pop(step)

    def _replace_dead_threads(self) -> None:
        """Start a new thread for each one that ended without an error, and give its step to another thread.

        This changes no batch, because a batch is a function of its step. A step at which several threads end counts as
        a failure (see `_work`).
        """
        if self._failed:  # after a failure no thread continues
            return
        self._threads = [t if t.is_alive() else self._start_thread(i) for i, t in enumerate(self._threads)]
        for step in [step for step, owner in self._owners.items() if not owner.is_alive()]:
            del self._owners[step]
            self._abandoned.append(step)
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
        except BaseException as error:  # the trainer must get it, at the step that failed and not earlier
            with self._changed:
                if isinstance(error, Exception) or (step is not None and self._tries[step] >= _MAX_TRIES):
                    self._failed[self._unclaimed if step is None else step] = error
                self._changed.notify_all()

    def _claim(self) -> int | None:
        """Wait for a step that may be made, and return it; None if there is nothing more to do."""
        with self._changed:
            while not (self._closed or self._failed):
                if self._abandoned or self._unclaimed < self._next + self._depth:
                    step = self._abandoned[0] if self._abandoned else self._unclaimed
                    # Before anything else, so that the step has an owner if this thread ends in between.
                    self._owners[step] = threading.current_thread()
                    self._tries[step] = self._tries.get(step, 0) + 1
                    if self._abandoned:
                        self._abandoned.pop(0)
                    else:
                        self._unclaimed += 1
                    return step
                self._changed.wait()
        return None

    def close(self) -> None:
        """Stop the threads; may be called again. A thread that hangs in `make` runs until the process exits."""
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
    """Return the error to raise. A SystemExit of a loader thread must not end the trainer as if that had called it."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a loader thread ended at step {step} with {error!r}")
    failure.__cause__ = error
    return failure


def pin(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the batch to page-locked memory if there is a GPU, so that its transfer can overlap with computation."""
    import torch

    if not torch.cuda.is_available():
        return batch
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
