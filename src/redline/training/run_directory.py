"""The run directory: its lock, requests to stop, and where it is if it was moved."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from redline.cache import make_folder, open_regular
from redline.errors import UserError
from redline.training.supervisor import RECOVERY
from redline.vocabulary import CHECKPOINTS_FOLDER, PROCESS_LOCK_FILE, STOP_REQUEST_FILE, StopReason

NOT_WRITABLE_FIX = "Make it writable, or start a new run elsewhere with --run."
# `redline runs` and others hold the lock shared for an instant to see whether a run is alive. Retry as often, as long.
_LOCK_TRIES, _LOCK_PAUSE_S = 6, 0.05
_STOP_CHECK_EVERY_S = 1.0


def open_no_follow(path: str, flags: int) -> int:
    """Open a regular file, but refuse a symbolic link: it could overwrite a file outside of the run."""
    return open_regular(path, flags | os.O_NOFOLLOW)


class RunDirectory:
    """Holds the lock of the directory while the run is alive. The kernel releases it however the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._folder: int | None = None  # open while the lock is held, to find the directory if it is moved
        self._checked = float("-inf")  # time of the last check of `stop_reason`

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_FOLDER

    def stop_reason(self) -> StopReason | None:
        """Return MOVED if the directory was moved or removed, REQUESTED after `redline stop`, else None.

        Checks at most once a second, because the directory may be on a network file system.
        """
        now = time.monotonic()
        if now - self._checked < _STOP_CHECK_EVERY_S:
            return None
        self._checked = now
        if self.moved():
            return StopReason.MOVED
        return StopReason.REQUESTED if self.stop_requested() else None

    def moved(self) -> bool:
        """Return whether the directory that this process has locked is no longer at its path."""
        return self._folder is not None and not _is_at(self.path, self._folder)

    def follow(self) -> bool:
        """Set `path` to where the directory was moved. Return False if it was removed or cannot be found."""
        if self._folder is None:
            return False
        try:
            now = Path(f"/proc/self/fd/{self._folder}").readlink()
        except OSError:  # no /proc on this system
            return False
        if not _is_at(now, self._folder):
            return False
        self.path = now.relative_to(Path.cwd()) if now.is_relative_to(Path.cwd()) else now
        return True

    def stop_requested(self) -> bool:
        """Return whether `redline stop` was called, and delete its request."""
        path = self.path / STOP_REQUEST_FILE
        requested = path.exists()
        path.unlink(missing_ok=True)
        return requested

    def __enter__(self) -> RunDirectory:
        try:
            make_folder(self.path)
            self._file = open(self.path / PROCESS_LOCK_FILE, "a+", encoding="utf-8", opener=open_no_follow)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            what = f"cannot be written ({error.strerror})."
            raise UserError(what, where=str(self.path), fix=NOT_WRITABLE_FIX) from None
        if not self._lock(self._file):
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._release()
            fix = f"Wait for it, or ask it to stop: redline stop {shlex.quote(str(self.path))}"
            raise UserError(f"a run is using this directory ({holder}).", where=str(self.path), fix=fix)
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()
        # A request from before this start was for a process that has ended. After a restart by the supervisor it still
        # counts, because for the user it is the same run.
        if RECOVERY not in os.environ:
            (self.path / STOP_REQUEST_FILE).unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)  # the file names the process that holds the lock
                if kind is None:  # a request that came after the last check must not stop the next start
                    (self.path / STOP_REQUEST_FILE).unlink(missing_ok=True)
        self._release()

    def _lock(self, file: IO[str]) -> bool:
        """Take the lock; return False if another process keeps it."""
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
            except OSError as error:
                self._release()
                fix = "Start a new run on another file system with --run, or move this one."
                what = f"its file system does not support file locks ({error.strerror})."
                raise UserError(what, where=str(self.path), fix=fix) from None
        return False

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _is_at(path: Path, folder: int) -> bool:
    """Return whether `path` is the open directory.

    An error other than "not found" does not mean that it was moved: a network file system may be unreachable.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
