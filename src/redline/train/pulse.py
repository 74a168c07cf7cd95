"""What a rank is doing, written down twice a second for a watch that may have to say where it hangs.

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
STACK = signal.SIGUSR2
STARTING, PREPARING = "starting", "preparing data"  # the second takes as long as there is text


class Pulse:
    """One for the process. Without a folder it is only remembered, and nothing is written."""

    def __init__(self) -> None:
        self._path: Path | None = None
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
        """The last words, for whoever decides what to do next."""
        with self._lock:
            self._facts |= {"code": code, "why": why}
        self._write()

    def _beat(self) -> None:
        parent = int(os.environ.get(PARENT, 0))
        while "code" not in self._facts:
            self._write()
            if parent and not Path(f"/proc/{parent}").exists():
                parent = 0
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(EVERY_S)

    def _write(self) -> None:
        with self._lock:
            if self._path is None:
                return
            text = json.dumps({**self._facts, "time": time.monotonic()})
            try:
                temporary = self._path.with_suffix(".new")
                temporary.write_text(text)
                temporary.replace(self._path)
            except OSError:  # the folder went away with the watch
                self._path = None


PULSE = Pulse()


def read_pulses(folder: Path) -> dict[int, dict[str, Any]]:
    """The last words of each rank."""
    found = {}
    for path in folder.glob("rank-*.json"):
        try:
            facts = json.loads(path.read_text())
            found[int(facts["rank"])] = facts
        except (OSError, ValueError, KeyError):
            continue
    return found
