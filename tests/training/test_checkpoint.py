"""Commits, retention, selection and background saving of checkpoints."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.errors import UserError
from redline.training import checkpoint
from redline.training import checkpoint as saving
from redline.training.checkpoint import (
    BackgroundSaver,
    Committed,
    DamagedCheckpointError,
    HostCopy,
    Snapshot,
    apply_retention,
    commit,
    committed_steps,
    newest_valid,
    read_state,
    read_tensors,
    remove_temporaries,
    select_checkpoint,
    step_name,
    verify,
)
from redline.training.control import RECOVERY, RunDirectory
from redline.training.schedule import TrainState
from redline.vocabulary import STOP_REQUEST_FILE


def snapshot(step: int, best: int | None = None) -> Snapshot:
    state = {"step": step, "best": None if best is None else {"step": best, "loss": 1.0}}
    return Snapshot(step, {"model": {"w": torch.full((4,), float(step))}}, state)


def damage(folder: Path, step: int) -> None:
    file = folder / step_name(step) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def valid_steps(folder: Path) -> list[int]:
    found = []
    for step in committed_steps(folder):
        try:
            verify(folder / step_name(step))
            found.append(step)
        except DamagedCheckpointError:
            pass
    return found


def test_checkpoints_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    done = commit(tmp_path / "new/checkpoints", snapshot(12, best=4))
    assert done.path.name == "step-00000012"
    assert done.bytes == sum(file.stat().st_size for file in done.path.iterdir() if file.name != "manifest.json")
    assert read_tensors(done.path, "model")["w"].tolist() == [12.0] * 4
    assert read_state(done.path)["best"]["step"] == 4


def test_committing_again_changes_nothing(tmp_path: Path) -> None:
    first = commit(tmp_path, snapshot(3))
    written = {file.name: file.stat().st_mtime_ns for file in first.path.iterdir()}
    again = commit(tmp_path, snapshot(3))
    assert again == first
    assert {file.name: file.stat().st_mtime_ns for file in again.path.iterdir()} == written
    assert [entry.name for entry in tmp_path.iterdir()] == [step_name(3)]


@pytest.mark.parametrize("obstacle", ["damaged", "file", "empty"])
def test_what_is_not_valid_is_replaced(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / step_name(3)
    if obstacle == "damaged":
        commit(tmp_path, snapshot(3))
        damage(tmp_path, 3)
    elif obstacle == "file":
        path.write_bytes(b"")
    else:
        path.mkdir()
    commit(tmp_path, snapshot(3))
    verify(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [step_name(3)]


def test_remove_temporaries_removes_only_interrupted_saves(tmp_path: Path) -> None:
    commit(tmp_path, snapshot(1))
    (tmp_path / ".writing-step-00000002-77").mkdir()
    (tmp_path / ".writing-step-00000002-77/model.safetensors").write_bytes(b"half")
    (tmp_path / ".writing-removed-step-00000000-77").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    remove_temporaries(tmp_path)
    remove_temporaries(tmp_path / "missing")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", step_name(1)]


def test_a_host_copy_does_not_change_with_training() -> None:
    weight = torch.ones(3, 2).t()
    copy = HostCopy().take({"model": {"w": weight}})["model"]["w"]
    weight.zero_()
    assert copy.tolist() == [[1.0] * 3] * 2
    assert copy.is_contiguous()


# --- retention


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        commit(tmp_path, snapshot(step))
        apply_retention(tmp_path, 2, also=(3,), fresh=step)
    assert committed_steps(tmp_path) == [3, 6, 7]


def test_retention_does_not_count_damaged_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 6):
        commit(tmp_path, snapshot(step))
    damage(tmp_path, 4)
    apply_retention(tmp_path, 2, fresh=5)
    assert valid_steps(tmp_path) == [3, 5]
    commit(tmp_path, snapshot(6))
    apply_retention(tmp_path, 2, fresh=6)
    assert committed_steps(tmp_path) == [5, 6], "and go when they are old"


def test_damage_after_a_verification_is_noticed(tmp_path: Path) -> None:
    for step in range(1, 4):
        commit(tmp_path, snapshot(step))
    apply_retention(tmp_path, 3, fresh=3)
    damage(tmp_path, 2)
    apply_retention(tmp_path, 2, fresh=3)
    assert valid_steps(tmp_path) == [1, 3]


def test_valid_checkpoints_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying all kept checkpoints at every save would read more than the save writes."""
    read: list[str] = []
    plain = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", lambda path: (read.append(path.name), plain(path))[1])
    for step in range(1, 9):
        commit(tmp_path, snapshot(step))
        apply_retention(tmp_path, 4, fresh=step)
    assert max(read.count(name) for name in read) == 2, "verified once before it is written, and once while it is kept"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), keep=st.integers(1, 4), count=st.integers(1, 6))
def test_retention_never_keeps_too_few(tmp_path_factory: Any, data: st.DataObject, keep: int, count: int) -> None:
    folder = tmp_path_factory.mktemp("retention")
    for step in range(1, count + 1):
        commit(folder, snapshot(step))
    for step in data.draw(st.sets(st.integers(1, count), max_size=count)):
        damage(folder, step)
    best = data.draw(st.integers(1, count))
    before = valid_steps(folder)
    apply_retention(folder, keep, also=(best,))
    after = valid_steps(folder)
    assert after[-keep:] == before[-keep:]
    assert best in committed_steps(folder)
    assert len(after) <= keep + 1


# --- choosing


def test_select_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        commit(folder, snapshot(step, best=10))
    assert select_checkpoint(folder, None).name == step_name(30)
    assert select_checkpoint(folder, 20).name == step_name(20)
    assert select_checkpoint(folder, "best").name == step_name(10)
    with pytest.raises(UserError, match=r"@25.*10, 20, 30"):
        select_checkpoint(folder, 25)
    damage(folder, 20)
    with pytest.raises(UserError, match=r"step-00000020/model\.safetensors.*RUN@STEP"):
        select_checkpoint(folder, 20)
    damage(folder, 30)
    said: list[str] = []
    assert select_checkpoint(folder, None, said.append).name == step_name(10)
    assert len(said) == 2


def test_select_checkpoint_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no valid checkpoint"):
        select_checkpoint(tmp_path / "checkpoints", None)
    with pytest.raises(UserError, match=r"@best.*none"):
        select_checkpoint(tmp_path / "checkpoints", "best")
    with RunDirectory(tmp_path), pytest.raises(UserError, match=r"checkpoint\.every"):
        select_checkpoint(tmp_path / "checkpoints", None)
    assert newest_valid(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path: Path, loss: float | None) -> None:
    """It must not get into the state either, which is strict JSON."""
    state = TrainState(step=5).after_evaluation(loss)
    assert state.best_step is None
    commit(tmp_path, Snapshot(5, {"model": {"w": torch.ones(1)}}, state.to_json()))
    better = state.after_evaluation(2.0)
    assert (better.best_step, better.best_loss) == (5, 2.0)
    again = better.after_evaluation(2.0)
    assert (again.best_step, again.best_loss) == (5, 2.0)
    assert TrainState.from_json(better.to_json()) == better


# --- saving in the background


def test_a_save_is_reported_after_the_rename(tmp_path: Path) -> None:
    valid: list[bool] = []

    def saved(done: Committed, seconds: float) -> None:
        valid.append(bool(verify(done.path)))
        assert threading.current_thread() is not threading.main_thread()

    saver = BackgroundSaver(tmp_path, keep=1, on_saved=saved, on_failed=lambda error: valid.append(False))
    for step in (1, 2, 2, 3):  # a step may be saved twice
        saver.save(snapshot(step))
    saver.wait()
    assert valid == [True] * 4
    assert committed_steps(tmp_path) == [3]


def test_only_one_save_runs_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, order = threading.Event(), threading.Event(), []

    def slow(folder: Path, snap: Snapshot) -> Committed:
        order.append(("begin", snap.step))
        begun.set()
        release.wait(10)
        done = commit(folder, snap)
        order.append(("end", snap.step))
        return done

    monkeypatch.setattr(saving, "commit", slow)
    saver = BackgroundSaver(tmp_path, keep=2, on_saved=lambda done, seconds: None, on_failed=lambda error: None)
    saver.save(snapshot(1))
    assert begun.wait(10), "it is written beside training"
    assert committed_steps(tmp_path) == []
    release.set()
    saver.save(snapshot(2))
    saver.wait()
    assert order == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]


@pytest.mark.parametrize("where", ["commit", "on_saved", "on_failed"])
def test_an_error_in_the_background_is_raised_by_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a defect")

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if where != "on_saved":
        monkeypatch.setattr(saving, "commit", broken if where == "commit" else full)
    saver = BackgroundSaver(tmp_path, keep=1, on_saved=broken, on_failed=broken)
    saver.save(snapshot(1))
    with pytest.raises(RuntimeError, match="a defect"):
        saver.wait()


def test_files_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    """safetensors creates files that only their owner can read."""
    before = os.umask(0o002)
    try:
        done = commit(tmp_path, snapshot(1))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in done.path.iterdir()} == {0o664}


def test_a_late_stop_request_does_not_stop_the_next_start(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run"):
        (tmp_path / "run" / STOP_REQUEST_FILE).touch()
    with RunDirectory(tmp_path / "run") as again:
        assert not again.stop_requested()


@pytest.mark.parametrize("watched", [True, False])
def test_a_stop_request_survives_a_failure_only_under_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    """A process that the supervisor restarts obeys the request to its predecessor; one started by hand does not."""

    def fails() -> None:
        with RunDirectory(tmp_path / "run"):
            (tmp_path / "run" / STOP_REQUEST_FILE).touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    if watched:
        monkeypatch.setenv(RECOVERY, "rank 0 failed")
    with RunDirectory(tmp_path / "run") as again:
        assert again.stop_requested() == watched
