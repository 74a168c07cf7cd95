"""Saving beside training: snapshot to host memory, then write in the background, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from redline.train.checkpoint import Committed, Snapshot, Tensors, commit, retain

OnSaved = Callable[[Committed, float], None]
OnFailed = Callable[[OSError], None]
Clock = Callable[[], float]
Commit = Callable[[Path, Snapshot], Committed]


class Saver:
    """Commits snapshots in a background thread. `on_saved` runs after the rename, never before."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        on_saved: OnSaved,
        on_failed: OnFailed,
        clock: Clock = time.monotonic,
        together: Commit | None = None,
        retaining: bool = True,
    ) -> None:
        """`together` commits with other ranks; of those one alone removes what is old."""
        self.folder, self.keep, self._clock = folder, keep, clock
        self._together, self._retaining = together, retaining
        self._on_saved, self._on_failed = on_saved, on_failed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot, protect: tuple[int, ...] = ()) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot, protect), name="checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        try:
            self._commit(snapshot, protect)
        except BaseException as error:  # a thread cannot fail in its own name; `wait` says it
            self._error = error

    def _commit(self, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        begin = self._clock()
        try:
            done = (self._together or commit)(self.folder, snapshot)
        except OSError as error:  # a full disk: earlier checkpoints are untouched and training can go on
            self._on_failed(error)
            return
        self._on_saved(done, self._clock() - begin)
        if not self._retaining:
            return
        with suppress(OSError):  # what cannot be removed now is old enough to go after the next save
            retain(self.folder, self.keep, protect, fresh=snapshot.step)


class HostCopy:
    """Copies that training cannot change any more. The memory is kept: pinning it anew takes longer than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensors] = {}

    def take(self, files: dict[str, Tensors]) -> dict[str, Tensors]:
        """The tensors of each file as they are now; valid until the next call."""
        for stem, tensors in files.items():
            kept = self._kept.setdefault(stem, {})
            for name, tensor in tensors.items():
                if name not in kept:
                    kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                kept[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {stem: self._kept[stem] for stem in files}
