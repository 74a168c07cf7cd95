"""From samples to batches: the order of samples, how they are packed into sequences, and prefetching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from redline.errors import UserError

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------
# The order of samples, and how samples are packed into sequences.
#
# Which tokens the n-th sample has is a function of the seed and n alone. The order of an epoch is a stateless
# pseudo-random permutation. So any sample of any epoch is computed directly, a resumed run needs no saved state, and
# neither the number of ranks nor the micro-batch changes the data of a step.


_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

UInt64s = npt.NDArray[np.uint64]


class Index(Protocol):
    """Returns the first token of each sample. Samples are numbered through all epochs, without end."""

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...


def _mix(x: UInt64s) -> UInt64s:
    """Apply the finaliser of splitmix64 (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _encrypt(x: UInt64s, half_bits: int, keys: UInt64s) -> UInt64s:
    """Apply a Feistel network on 2·half_bits bits: a bijection for any round function (Luby & Rackoff 1988)."""
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> half, x & mask
    for number in range(1, _ROUNDS + 1):
        round_key = _mix(keys + np.uint64(number * _GOLDEN & _MASK))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << half) | right


def permute(i: npt.NDArray[np.int64], n: int, key: int | UInt64s) -> npt.NDArray[np.int64]:
    """Return where a permutation of range(n) maps each i; `key` selects it, for all i or for each of them.

    The network permutes range(m), where m is the next power of four. A value outside range(n) is mapped again until it
    is inside (cycle walking). The result is still a bijection, and takes fewer than four rounds on average.
    """
    if n < 1 or (np.size(i) and (np.min(i) < 0 or np.max(i) >= n)):
        raise ValueError(f"positions must lie in range({n})")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    # 1-d arrays throughout: the unsigned overflow is intended, and numpy warns about it for scalars only.
    values = np.array(i, dtype=np.uint64, ndmin=1)
    keys = np.broadcast_to(key if isinstance(key, np.ndarray) else np.uint64(key & _MASK), values.shape)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _encrypt(values[outside], half_bits, keys[outside])
        outside = values >= np.uint64(n)
    return values.astype(np.int64).reshape(np.shape(i))


def order_keys(seed: int, epochs: npt.NDArray[np.int64], group: int = 0) -> UInt64s:
    """Return a key for `permute` for each epoch. Each group (a shard, a source, a purpose) has keys of its own."""
    origin = _mix(np.array([(seed + (group << 32)) & _MASK], dtype=np.uint64))
    return _mix(np.atleast_1d(epochs).astype(np.uint64) * np.uint64(_GOLDEN) + origin)


class PassIndex:
    """The order of the `size` items of one source: pass after pass, each in another seeded order."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self.seed, self.shuffle, self._size = seed, shuffle, size

    def __len__(self) -> int:
        """Return the number of items per pass."""
        return self._size

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the item of each sample. Samples are numbered through all passes, without end."""
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError("sample numbers are not negative")
        passes, positions = np.divmod(samples, self._size)
        if self.shuffle:
            positions = permute(positions, self._size, order_keys(self.seed, passes))
        return positions


class WindowIndex:
    """The order of the windows of seq_len + 1 tokens, shuffled anew in each epoch.

    A window's last token is also the first of the next one, so every token after the first is a target once.
    """

    def __init__(self, tokens: int, seq_len: int, seed: int, shuffle: bool = True) -> None:
        self.seq_len = seq_len
        windows = max(0, tokens - 1) // seq_len
        if not windows:
            raise UserError(
                f"the data has {tokens} tokens, less than one sequence of {seq_len + 1}.",
                fix="Give more data" + (f", or set data.seq_len to at most {tokens - 1}." if tokens > 1 else "."),
            )
        self._passes = PassIndex(windows, seed, shuffle)

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return len(self._passes)

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first token of each sample's window. Samples are numbered through all epochs, without end."""
        return self._passes.starts(samples) * self.seq_len


# ----------------------------------------------------------------------------------------------------
# Sequence packing: which samples share a sequence, where documents begin in a batch, and the targets of a batch.


IGNORE = -100  # a target without loss; the same number as IGNORE in redline.kernels
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


def document_ids(tokens_BT: npt.NDArray[np.integer], eot: int) -> Int32s:
    """Return for each token the number of its document in its row, from 0. Its end-of-text token begins a document."""
    started_BT = np.cumsum(tokens_BT == eot, axis=1, dtype=np.int32)
    return started_BT - started_BT[:, :1]


def cu_seqlens(ids_BT: Int32s) -> Int32s:
    """Return where documents begin in the flattened batch, and its length: [0, …, B·T]. No document spans two rows."""
    is_start_BT = np.ones(ids_BT.shape, dtype=bool)
    is_start_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    return np.append(np.flatnonzero(is_start_BT), ids_BT.size).astype(np.int32)


def inputs_and_targets(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Split rows of T + 1 tokens into inputs [B, T] and targets [B, T]: each token predicts the next one.

    No target is ignored, with document masks or without. The last token of a document predicts the end-of-text token,
    from which a model learns to stop. The end-of-text token is the first of the next document, and under the mask it
    attends to itself alone; it predicts that document's first word, from which a model learns how texts begin.
    """
    return rows[:, :-1], rows[:, 1:]


def best_fit(lengths: Int64s, capacity: int) -> Int64s:
    """Return the bin of each item: the open bin that it fills best, or a new one. Items are placed in order.

    Open bins are kept in one list per remaining space. The set bits of `nonempty` are the spaces whose list is not
    empty, so the lowest set bit at or above the item's length is the best fit, without a search over the bins.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"lengths must lie between 1 and {capacity}")
    bins = np.empty(len(lengths), dtype=np.int64)
    bins_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    nonempty, opened = 0, 0
    for item, length in enumerate(lengths.tolist()):
        if fitting := nonempty >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                nonempty ^= 1 << space
        else:
            space, chosen = capacity, opened
            opened += 1
        bins[item] = chosen
        space -= length
        if space:
            bins_by_space[space].append(chosen)
            nonempty |= 1 << space
    return bins


# ----------------------------------------------------------------------------------------------------
# Prefetching: batches are made ahead of time by threads, so that the accelerator never waits for data.
#
# Threads, not processes: reading memory maps and numpy release the interpreter's lock, nothing is pickled, and there is
# no worker process that could be killed when memory runs out. A thread that ends nevertheless is replaced.


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
