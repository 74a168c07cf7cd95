"""Saving beside training: snapshot to host memory, then write in the background, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from redline.train.checkpoint import Committed, Snapshot, commit, retain

OnSaved = Callable[[Committed, float], None]


class Saver:
    """Commits snapshots in a background thread. `on_saved` runs after the rename, never before."""

    def __init__(self, folder: Path, *, keep: int, on_saved: OnSaved, on_failed: Callable[[OSError], None]) -> None:
        self.folder, self.keep = folder, keep
        self._on_saved, self._on_failed = on_saved, on_failed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last_seconds = 0.0
        self.last_step: int | None = None

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
        begin = time.monotonic()
        try:
            done = commit(self.folder, snapshot)
            self.last_seconds, self.last_step = time.monotonic() - begin, snapshot.step
            self._on_saved(done, self.last_seconds)
            retain(self.folder, self.keep, (*protect, snapshot.step))
        except OSError as error:  # a full disk: earlier checkpoints are untouched and training can go on
            self._on_failed(error)
        except BaseException as error:
            self._error = error
