"""One run per directory."""

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
from redline.vocabulary import PROCESS_LOCK_FILE, STOP_REQUEST_FILE

NOT_WRITABLE_FIX = "Make it writable, or start a new run elsewhere with --run."  # said to who resumes one, too
_TRIES, _PAUSE_S = 6, 0.05


def open_no_follow(path: str, flags: int) -> int:
    """Open a regular file, but never through a link: what the link points to would be overwritten."""
    return open_regular(path, flags | os.O_NOFOLLOW)


class RunDirectory:
    """Holds the directory's lock while a run is alive; the kernel releases it however the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._folder: int | None = None  # open while the lock is held: it shows where the directory is now
        self._looked = float("-inf")  # when `stop_reason` last looked

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def stop_reason(self) -> str | None:
        """Why the run should stop, seen from its directory: it was "moved" away, or `redline stop` has "requested" it.
        Looks at most once a second, because the directory may be on a network file system."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return None
        self._looked = now
        if self.moved():
            return "moved"
        return "requested" if self.stop_requested() else None

    def moved(self) -> bool:
        """Whether the directory that this process locked is no longer at its path."""
        return self._folder is not None and not _is_at(self.path, self._folder)

    def follow(self) -> bool:
        """Change `path` to where the directory was moved to. Return False if it was removed or cannot be found."""
        if self._folder is None:
            return False
        try:
            found = Path(f"/proc/self/fd/{self._folder}").readlink()
        except OSError:  # no /proc on this system
            return False
        if not _is_at(found, self._folder):
            return False
        self.path = found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found
        return True

    def stop_requested(self) -> bool:
        """Whether `redline stop` has asked; asking consumes the request."""
        path = self.path / STOP_REQUEST_FILE
        found = path.exists()
        path.unlink(missing_ok=True)
        return found

    def __enter__(self) -> RunDirectory:
        try:
            make_folder(self.path)
            self._file = open(self.path / PROCESS_LOCK_FILE, "a+", encoding="utf-8", opener=open_no_follow)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            what = f"cannot be written ({error.strerror})."
            raise UserError(what, where=str(self.path), fix=NOT_WRITABLE_FIX) from None
        if not self._take(self._file):
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._release()
            fix = f"Wait for it, or ask it to stop: redline stop {shlex.quote(str(self.path))}"
            raise UserError(f"a run is using this directory ({holder}).", where=str(self.path), fix=fix)
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()
        if RECOVERY not in os.environ:  # whom that was asked is dead; but who is begun again by a watch, is asked still
            (self.path / STOP_REQUEST_FILE).unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)  # it says who holds it: nobody now
                if kind is None:  # who asked too late has not asked the next
                    (self.path / STOP_REQUEST_FILE).unlink(missing_ok=True)
        self._release()

    def _take(self, file: IO[str]) -> bool:
        """Whether the lock is ours. Onlookers hold it shared for an instant, so one refusal is not an answer."""
        for _ in range(_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except OSError as error:
                self._release()
                fix = "Start a new run elsewhere with --run, or move this one."
                what = f"its file system has no locks ({error.strerror})."
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
    """Whether `path` is the open directory. An error other than "not found" is no sign of a move."""
    try:
        return os.path.samestat(path.stat(), os.fstat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
