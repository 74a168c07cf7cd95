"""What a rank is doing, written down twice a second for a supervisor that may have to say where it hangs.

Each rank overwrites one small file in place, so a beat needs no free disk space: with a new file per beat, a full
temporary folder would silence healthy ranks and the supervisor would kill them.

The stack is asked for by a signal: the handler is C and needs nothing of Python's, so it also answers for a process
that waits within a library.
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

FOLDER = "REDLINE_PULSE"  # names the folder; whoever starts the ranks sets it
PARENT = "REDLINE_PARENT"  # and its own number: who is left behind should leave, too
EVERY_S = 0.5
_RECORD = 1024  # bytes of a file: one write of a fixed size, so that no beat needs a new block
_LAST_TRIES = 20
STACK = signal.SIGUSR2
STARTING, PREPARING = "starting", "preparing data"  # the second takes as long as there is text


class Heartbeat:
    """One for the process. Without a folder it is only remembered, and nothing is written."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._facts: dict[str, Any] = {"doing": STARTING, "step": None, "waiting": False, "since": time.monotonic()}
        self._lock = threading.Lock()

    def start(self, rank: int) -> None:
        """Once the rank is known."""
        folder = os.environ.get(FOLDER)
        if folder is None or self._path is not None:
            return
        faulthandler.register(STACK, file=2, all_threads=True, chain=False)
        self._path = Path(folder) / f"rank-{rank}.json"
        self._facts |= {"pid": os.getpid(), "rank": rank, "doing": STARTING, "step": None, "since": time.monotonic()}
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def at(self, doing: str, step: int | None = None) -> None:
        with self._lock:
            self._facts |= {"doing": doing, "step": step, "since": time.monotonic()}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For other ranks: who waits is not the one that hangs. What threads beside training wait for says nothing."""
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
        for _ in range(_LAST_TRIES):  # this beat has no successor
            if self._write():
                return
            time.sleep(EVERY_S / 10)

    def _beat(self) -> None:
        parent = int(os.environ.get(PARENT, 0))
        while "code" not in self._facts:
            self._write()
            if parent and not Path(f"/proc/{parent}").exists():
                parent = 0
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(EVERY_S)

    def _write(self) -> bool:
        """Overwrite the file. Return False if it failed and the next beat should try again."""
        with self._lock:
            if self._path is None:
                return True
            text = json.dumps({**self._facts, "time": time.monotonic()})
            try:
                if self._file is None:
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.pwrite(self._file, text.encode().ljust(_RECORD), 0)
            except (FileNotFoundError, NotADirectoryError):
                self._path = None  # the supervisor has ended and removed its folder
            except OSError:
                return False  # a full disk or a network file system that is away: both can pass
            return True


HEARTBEAT = Heartbeat()


def read_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """The last beat of each rank. A file that is being written just now may be missing."""
    found = {}
    for path in folder.glob("rank-*.json"):
        try:
            facts = json.loads(path.read_text())
            found[int(facts["rank"])] = facts
        except (OSError, ValueError, KeyError):
            continue
    return found
