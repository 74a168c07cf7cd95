"""One run per directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import IO

from redline.errors import UserError

LOCK_FILE = ".lock"


class RunDirectory:
    """Holds the directory's lock while a run is alive; the kernel releases it however the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path / LOCK_FILE, "a+", encoding="utf-8")
        except OSError as error:
            fix = "Choose another with --run."
            raise UserError(f"cannot be written ({error.strerror}).", where=str(self.path), fix=fix) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            self._file = None
            fix = f"Wait for it, or ask it to stop: redline stop {self.path}"
            raise UserError(f"a run is using this directory ({holder}).", where=str(self.path), fix=fix) from None
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
