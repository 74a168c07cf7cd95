"""Checking token files against their recorded digests while a run trains on them.

Opening a prepared folder compares sizes and headers only: reading everything would delay the start of every run.
Instead a thread reads each file once, slowly enough that training does not notice.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from redline.cache import regular
from redline.data.shards import DamagedDataError, TokenFile, damaged

# At most this share of the time of one core (and of a disk that only this thread uses), and this many bytes/s.
SHARE = 0.05
BYTES_PER_S = 100e6
_CHUNK_BYTES = 1 << 22
_NICE = 10
_LOOK_AGAIN_S = 5.0  # for files that a stream has finished since


class BackgroundCheck:
    """Verifies the files that `files()` lists, each once, in a thread that runs between `__enter__` and `__exit__`.

    The thread never raises: `poll` does, in the caller's thread.
    """

    def __init__(
        self,
        files: Callable[[], Sequence[TokenFile]],
        *,
        share: float = SHARE,
        bytes_per_s: float = BYTES_PER_S,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._files, self._share, self._bytes_per_s = files, share, bytes_per_s
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        self._done: dict[TokenFile, bool] = {}  # whether it could be read
        self._damage: DamagedDataError | None = None
        self._notes: list[str] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> BackgroundCheck:
        self._closed.clear()
        if self._files():
            self._thread = threading.Thread(target=self._work, name="redline-verify", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def poll(self, warn: Callable[[str], None]) -> None:
        """Raise DamagedDataError if a file is damaged; warn once of each file that could not be read."""
        while self._notes:
            warn(self._notes.pop(0))
        if self._damage is not None:
            raise self._damage

    def progress(self) -> dict[str, int]:
        """How many files there are, and how many of them agree with their digests, for the `stop` event."""
        files = self._files()
        return {"files": len(files), "files_verified": sum(self._done.get(file, False) for file in files)}

    def _work(self) -> None:
        with suppress(OSError):  # on Linux a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._closed.is_set():
            pending = [file for file in self._files() if file not in self._done]
            for file in pending:
                self._verify(file)
                if self._closed.is_set() or self._damage is not None:
                    return
            if not pending:
                self._closed.wait(_LOOK_AGAIN_S)

    def _verify(self, file: TokenFile) -> None:
        try:
            digest = self._digest(file)
        except OSError as error:  # a disk that does not answer is no proof of damage; what was mapped is still read
            self._done[file] = False
            self._notes.append(f"{file.path}: its digest could not be checked ({error.strerror or error})")
            return
        if digest is not None and digest != file.sha256:
            self._damage = damaged(file.path, "the tokens are not those that were recorded (their SHA-256 differs)")
        self._done[file] = digest == file.sha256

    def _digest(self, file: TokenFile) -> str | None:
        """The SHA-256 of the tokens; None when the check was closed before the end."""
        found, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
        with open(file.path, "rb", buffering=0, opener=regular) as opened:
            opened.seek(file.offset)
            while not self._closed.is_set():
                begin = time.perf_counter()
                size = opened.readinto(chunk)
                if not size:
                    return found.hexdigest()
                found.update(chunk[:size])
                spent = time.perf_counter() - begin
                self._pause(max(spent / self._share, size / self._bytes_per_s) - spent)
        return None
