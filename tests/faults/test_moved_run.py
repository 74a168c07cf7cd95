"""A run directory that is moved or removed while the run trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_DONE, EXIT_USAGE
from redline.runs.events import read_events
from redline.training.checkpoint import committed_steps
from redline.training.control import RunDirectory
from redline.vocabulary import status_of_stop
from several import run_ranks

FAR = ("train.steps=100", "checkpoint.every=100", "eval.every=100")


def _at_step_3(world: Any, trainer: Any, action: Callable[[], Any]) -> None:
    """Do something to the directory during step 3; the run checks it again before step 4."""

    def hook(number: int) -> None:
        if number == 3:
            action()
            trainer.run_directory._checked = float("-inf")

    world.around(trainer, after=hook)


def test_a_moved_directory_stops_the_run_and_its_last_state_is_saved_there(world: Any, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    with RunDirectory(before) as run:
        trainer = world.trainer(run, *FAR)
        _at_step_3(world, trainer, lambda: before.rename(after))
        outcome = trainer.run()
    assert (outcome.reason, outcome.saved, outcome.exit_code) == ("moved", True, EXIT_DONE)
    assert not before.exists()
    assert run.path == after
    assert committed_steps(after / "checkpoints") == [4]
    stop = read_events(after / "events.jsonl")[-1]
    assert (stop["type"], stop["reason"], stop["step"]) == ("stop", "moved", 4)
    assert status_of_stop(stop) == "stopped"
    resumed = world.run(after, "train.steps=6", resume=True)
    assert (resumed.outcome.reason, resumed.state.step) == ("steps", 6)


def test_a_removed_directory_stops_the_run_and_is_not_created_again(world: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory(path) as run:
        trainer = world.trainer(run, *FAR)
        _at_step_3(world, trainer, lambda: shutil.rmtree(path))
        outcome = trainer.run()
    assert (outcome.reason, outcome.saved, outcome.exit_code) == ("moved", False, EXIT_USAGE)
    assert not path.exists()


def test_a_removed_lock_file_does_not_count_as_a_move(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        (tmp_path / "run/.lock").unlink()
        assert run.stop_reason() is None


def test_another_directory_at_the_same_path_is_noticed(world: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory(path) as run, pytest.MonkeyPatch.context() as patch:
        shutil.move(path, tmp_path / "elsewhere")
        with RunDirectory(path):
            assert run.stop_reason() == "moved"
            patch.setattr(Path, "readlink", lambda _: tmp_path / "gone (deleted)")
            assert not run.follow()


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_every_rank_saves_to_the_moved_directory(world: Any, tmp_path: Path, mode: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"

    def train(ranks: Any) -> int:
        if ranks.is_main:
            directory = RunDirectory(before).__enter__()
        ranks.barrier()
        if not ranks.is_main:
            directory = RunDirectory(before)
        trainer = world.trainer(directory, *FAR, f"parallel.mode={mode}", ranks=ranks)
        if ranks.is_main:
            _at_step_3(world, trainer, lambda: before.rename(after))
        outcome = trainer.run()
        ranks.barrier()
        return int(outcome.exit_code if outcome.saved and outcome.reason == "moved" else 99)

    assert run_ranks(2, train, tmp_path / "logs") == [EXIT_DONE, EXIT_DONE]
    assert committed_steps(after / "checkpoints") == [4]
    assert not before.exists()
