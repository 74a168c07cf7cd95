"""R16: of two runs in one directory exactly one gets the lock, and the other fails with the reason."""

from __future__ import annotations

import errno
import fcntl
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from redline.errors import UserError
from redline.runs.events import read_events
from redline.runs.summary import is_locked
from redline.training.control import RunDirectory
from redline.vocabulary import PROCESS_LOCK_FILE

REFUSED = 3


def test_exactly_one_of_two_runs_gets_the_directory(fork: Any, attempt: Any, tmp_path: Path) -> None:
    def train(run: Path, at: float) -> int:
        time.sleep(max(0.0, at - time.monotonic()))
        try:
            return int(attempt(run, "train.steps=3", prepare=lambda _: time.sleep(0.6)).outcome.exit_code)
        except UserError as error:
            return REFUSED if "a run is using this directory" in str(error) and "redline stop" in str(error) else 1

    for pair in range(5):
        run, at = tmp_path / str(pair), time.monotonic() + 0.1
        both = [fork(lambda _, run=run, at=at: train(run, at)) for _ in range(2)]
        assert sorted(child.wait() for child in both) == [0, REFUSED]
        starts = [e for e in read_events(run / "events.jsonl") if e["type"] == "start"]
        assert len(starts) == 1, "the other one wrote nothing"


def test_a_killed_run_frees_its_directory(fork: Any, tmp_path: Path) -> None:
    def hold(child: Any) -> None:
        with RunDirectory(tmp_path):
            child.say_ready()
            time.sleep(60)

    child = fork(hold)
    child.await_ready()
    with pytest.raises(UserError, match=f'"pid": {child.pid}'), RunDirectory(tmp_path):
        pass
    child.send(signal.SIGKILL)
    child.wait()
    with RunDirectory(tmp_path):
        pass


def test_a_status_check_does_not_count_as_a_run(tmp_path: Path) -> None:
    """A process that checks whether a run is alive holds the lock for an instant."""
    (tmp_path / PROCESS_LOCK_FILE).touch()
    with open(tmp_path / PROCESS_LOCK_FILE) as onlooker:
        fcntl.flock(onlooker, fcntl.LOCK_SH)
        leaves = threading.Timer(0.1, fcntl.flock, (onlooker, fcntl.LOCK_UN))
        leaves.start()
        with RunDirectory(tmp_path):
            assert is_locked(tmp_path), "the run gets the lock after the check has ended"
        leaves.join()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all of it", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PROCESS_LOCK_FILE).symlink_to(precious)
    with pytest.raises(UserError, match="cannot be written"), RunDirectory(tmp_path / "run"):
        pass
    assert precious.read_text(encoding="utf-8") == "all of it"


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(UserError, match="file locks"), RunDirectory(tmp_path):
        pass
