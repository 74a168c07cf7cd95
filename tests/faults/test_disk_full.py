"""R5: a full, failing or read-only disk costs one save and nothing else."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from redline.runs.events import read_events
from redline.training import checkpoint
from redline.training import checkpoint as saving
from redline.training.checkpoint import (
    BackgroundSaver,
    Committed,
    Snapshot,
    apply_retention,
    commit,
    committed_steps,
    newest_valid,
    step_name,
    verify,
)

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


class Kept:
    """A saver that records what it reports."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.saved: list[int] = []
        self.failed: list[OSError] = []
        self.saver = BackgroundSaver(folder, keep=keep, on_saved=self._saved, on_failed=self.failed.append)

    def _saved(self, done: Committed, seconds: float) -> None:
        self.saved.append(done.step)

    def save(self, snapshot: Snapshot) -> None:
        self.saver.save(snapshot)
        self.saver.wait()


def temporaries(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if not entry.name.startswith("step-")]


def fail(code: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_a_save_survives_an_error_in_any_operation(calls: Any, tiny: Any, tmp_path: Path, say: Any, code: int) -> None:
    """Each operation of a save fails once. Committed checkpoints stay, and the next save works."""
    refused = 0
    for at in range(1, 500):
        folder = tmp_path / str(at)
        commit(folder, tiny(1))
        kept = Kept(folder)
        with calls(at, fail(code)) as counted:
            kept.save(tiny(2))
        refused += len(kept.failed)
        assert len(kept.failed) + len(kept.saved) == 1
        assert all(verify(folder / step_name(step)) for step in committed_steps(folder))
        assert committed_steps(folder)[0] == 1
        assert not temporaries(folder)
        kept.save(tiny(3))
        assert kept.saved[-1] == 3
        assert committed_steps(folder)[-2:] == ([2, 3] if 2 in committed_steps(folder) else [1, 3])
        assert newest_valid(folder) == folder / step_name(3)
        if counted.count < at:
            break
    say(f"R5: {at - 1} operations failed with {errno.errorcode[code]}, {refused} saves refused, none lost")
    assert counted.count < at
    assert refused > 10


def test_a_save_survives_a_disk_of_any_size(fork: Any, tiny: Any, tmp_path: Path, say: Any) -> None:
    """The kernel refuses bytes beyond a limit, in the middle of the file that reaches it."""
    probe = commit(tmp_path / "probe", tiny(2)).path
    largest = max(file.stat().st_size for file in probe.iterdir())
    limits = [largest * n // 40 for n in range(40)]

    def child(limit: int, folder: Path) -> int:
        kept = Kept(folder)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        kept.save(tiny(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        clean_failure = len(kept.failed) == 1 and not kept.saved and not temporaries(folder)
        kept.save(tiny(3))
        return 0 if clean_failure and kept.saved == [3] else 1

    for limit in limits:
        folder = tmp_path / str(limit)
        commit(folder, tiny(1))
        assert fork(lambda _, limit=limit, folder=folder: child(limit, folder)).wait() == 0, limit
        assert committed_steps(folder) == [1, 3]
        assert all(verify(folder / step_name(step)) for step in (1, 3))
    say(f"R5: {len(limits)} sizes of disk, every save refused whole, every earlier checkpoint valid")


def test_training_continues_after_a_failed_save(attempt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors raises its own error for a full disk."""
    plain, failures = checkpoint.save_file, iter([True])

    def full_once(tensors: Any, path: Path) -> None:
        if path.parent.name.startswith(".writing-step-00000004") and next(failures, False):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        plain(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full_once)
    trainer = attempt(tmp_path / "run", "train.steps=8", "checkpoint.every=2", "checkpoint.keep=9")
    assert trainer.outcome.reason == "steps"
    warnings = [e["message"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "warning"]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert committed_steps(tmp_path / "run/checkpoints") == [2, 6, 8]
    assert newest_valid(tmp_path / "run/checkpoints") == tmp_path / "run/checkpoints" / step_name(8)


def test_errors_other_than_disk_errors_are_raised(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, snapshot: Snapshot) -> Committed:
        raise ValueError("a defect")

    monkeypatch.setattr(saving, "commit", broken)
    kept = Kept(tmp_path)
    kept.saver.save(tiny(1))
    with pytest.raises(ValueError, match="a defect"):
        kept.saver.wait()
    kept.saver.wait()
    assert not kept.failed


def test_a_checkpoint_that_cannot_be_deleted_is_no_failed_save(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        commit(tmp_path, tiny(step))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove_checkpoint", lambda path: fail(errno.EROFS)())
        kept = Kept(tmp_path, keep=1)
        kept.save(tiny(3))
    assert (kept.saved, kept.failed) == ([3], [])
    assert committed_steps(tmp_path) == [1, 2, 3]
    apply_retention(tmp_path, 1)
    assert committed_steps(tmp_path) == [3]
