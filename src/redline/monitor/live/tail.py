"""The end of a growing log, read on from where one was: whole lines only, and all of them again when it was begun anew.

The file belongs to another process and may lie on any file system: it may be missing, torn, cut, replaced, or no file.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 18
_LONGEST_LINE = 4 << 20  # bytes; what is longer is no event of ours
_HEAD = 256  # bytes by which a log that was begun anew is told from one that grew


class Tail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.size = 0
        self._identity: tuple[int, int] | None = None
        self._head = self._rest = b""
        self._skipping = False  # within a line that is too long

    @property
    def share(self) -> float:
        """How much of the file has been read."""
        return min(1.0, self.offset / self.size) if self.size else 1.0

    def read(self, seconds: float | None = None) -> Iterator[list[bytes] | None]:
        """Lists of new lines, for about so many seconds; None when what was read before no longer holds."""
        descriptor = self._open()
        if descriptor is None:
            return
        end = None if seconds is None else time.monotonic() + seconds
        with open(descriptor, "rb", buffering=0) as file:
            if self._begun_anew(descriptor):
                self.offset, self._head, self._rest, self._skipping = 0, b"", b"", False
                yield None
            self._head = os.pread(descriptor, _HEAD, 0)
            file.seek(self.offset)
            while block := file.read(_BLOCK):
                self.offset += len(block)
                if lines := self._lines(block):
                    yield lines
                if end is not None and time.monotonic() > end:
                    return

    def _open(self) -> int | None:
        try:  # no link, and never waiting: what looks like a log may be a pipe
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            return None
        self.size = about.st_size
        return descriptor

    def _begun_anew(self, descriptor: int) -> bool:
        about = os.fstat(descriptor)
        before, self._identity = self._identity, (about.st_dev, about.st_ino)
        if before is None:
            return False
        changed = os.pread(descriptor, len(self._head), 0) != self._head
        return before != self._identity or about.st_size < self.offset or changed

    def _lines(self, block: bytes) -> list[bytes]:
        *lines, rest = (self._rest + block).split(b"\n")
        if lines and self._skipping:
            lines, self._skipping = lines[1:], False
        if len(rest) > _LONGEST_LINE:
            self._skipping = True
        self._rest = b"" if self._skipping else rest
        return [line for line in lines if len(line) <= _LONGEST_LINE]
