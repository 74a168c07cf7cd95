"""Heartbeats: each rank writes twice a second what it is doing, for a supervisor that watches for hanging ranks.

Each rank overwrites one small file in place, so a heartbeat needs no free disk space. With a new file per heartbeat, a
full temporary folder would silence healthy ranks and the supervisor would kill them.

The supervisor asks for a rank's stack by a signal. The handler is C code of faulthandler, so it also works while the
process hangs inside a library and runs no Python code.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Environment variables that the supervisor sets for the ranks.
FOLDER_VARIABLE = "REDLINE_PULSE"  # the folder of the heartbeat files
PARENT_VARIABLE = "REDLINE_PARENT"  # the supervisor's process id: ranks stop if it has ended
EVERY_S = 0.5
_FILE_BYTES = 1024  # every write has this size, so that no heartbeat needs a new disk block
_FINAL_TRIES = 20
STACK_SIGNAL = signal.SIGUSR2
STARTING, PREPARING = "starting", "preparing data"  # how long preparing takes depends on the data


class Heartbeat:
    """The heartbeat of this process (`HEARTBEAT`). It writes nothing unless FOLDER_VARIABLE is set."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._facts: dict[str, Any] = {"doing": STARTING, "step": None, "waiting": False, "since": time.monotonic()}
        self._lock = threading.Lock()

    def start(self, rank: int) -> None:
        """Start the thread that writes, once the rank is known."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None or self._path is not None:
            return
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)
        self._path = Path(folder) / f"rank-{rank}.json"
        self._facts |= {"pid": os.getpid(), "rank": rank, "doing": STARTING, "step": None, "since": time.monotonic()}
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def at(self, doing: str, step: int | None = None) -> None:
        """Set what the rank is doing now."""
        with self._lock:
            self._facts |= {"doing": doing, "step": step, "since": time.monotonic()}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for other ranks: then it is not the one that hangs.

        Only the main thread counts. A background thread may wait while the main thread hangs.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._facts["waiting"] = True
        try:
            yield
        finally:
            self._facts["waiting"] = False

    def end(self, code: int, why: str) -> None:
        """Record the exit code and the reason, for the supervisor that decides what to do next."""
        with self._lock:
            self._facts |= {"code": code, "why": why}
        for _ in range(_FINAL_TRIES):  # no later heartbeat will repeat this one if it fails
            if self._write():
                return
            time.sleep(EVERY_S / 10)

    def _beat(self) -> None:
        parent = int(os.environ.get(PARENT_VARIABLE, 0))
        while "code" not in self._facts:
            self._write()
            if parent and not Path(f"/proc/{parent}").exists():
                parent = 0
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(EVERY_S)

    def _write(self) -> bool:
        """Overwrite the file. Return False if it failed and the next heartbeat should try again."""
        with self._lock:
            if self._path is None:
                return True
            text = json.dumps({**self._facts, "time": time.monotonic()})
            try:
                if self._file is None:
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.pwrite(self._file, text.encode().ljust(_FILE_BYTES), 0)
            except (FileNotFoundError, NotADirectoryError):
                self._path = None  # the supervisor has ended and removed its folder
            except OSError:
                return False  # a full disk or an unreachable network file system: both can pass
            return True


HEARTBEAT = Heartbeat()


def read_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last heartbeat of each rank. A file that is being written at this moment may be missing."""
    heartbeats = {}
    for path in folder.glob("rank-*.json"):
        try:
            facts = json.loads(path.read_text())
            heartbeats[int(facts["rank"])] = facts
        except (OSError, ValueError, KeyError):
            continue
    return heartbeats
