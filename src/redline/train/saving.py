"""Saving beside training: snapshot to host memory, then write in the background, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from redline.train.checkpoint import Committed, Snapshot, commit, retain

OnSaved = Callable[[Committed, float], None]
OnFailed = Callable[[OSError], None]
Clock = Callable[[], float]


class Saver:
    """Commits snapshots in a background thread. `on_saved` runs after the rename, never before."""

    def __init__(
        self, folder: Path, *, keep: int, on_saved: OnSaved, on_failed: OnFailed, clock: Clock = time.monotonic
    ) -> None:
        self.folder, self.keep, self._clock = folder, keep, clock
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
            done = commit(self.folder, snapshot)
        except OSError as error:  # a full disk: earlier checkpoints are untouched and training can go on
            self._on_failed(error)
            return
        self._on_saved(done, self._clock() - begin)
        with suppress(OSError):  # what cannot be removed now is old enough to go after the next save
            retain(self.folder, self.keep, protect, fresh=snapshot.step)
