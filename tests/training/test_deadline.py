"""REDLINE_DEADLINE: a run saves before it, and the next job continues bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_PREEMPTED, UserError
from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid
from redline.training.control import Deadline, RunDirectory

OPTIONS = ("train.steps=8", "train.schedule=cosine")
END = 1000.0


def leave_at(world: Any, path: Path, step: int, now: float, save: float = 0.0) -> Any:
    """Train with a deadline clock that shows `now` from the given step on."""
    with RunDirectory(path) as run:
        trainer = world.trainer(run, *OPTIONS)
        trainer.timer.final_seconds["save"] = save
        trainer.deadline.clock = lambda: now if trainer.state.step >= step else 0.0
        outcome = trainer.run()
        trainer.monitor.log.close()
    return outcome


def curve(path: Path) -> list[tuple[Any, ...]]:
    steps = [event for event in read_events(path / "events.jsonl") if event["type"] == "step"]
    return [(event["step"], event["loss"], event["lr"]) for event in steps]


def test_a_run_stops_before_its_deadline_and_resumes_bit_for_bit(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rates are those of the uninterrupted run, because the deadline is not a horizon."""
    world.run(tmp_path / "whole", *OPTIONS)
    monkeypatch.setenv("REDLINE_DEADLINE", str(END))
    outcome = leave_at(world, tmp_path / "parts", 3, now=END)
    assert (outcome.reason, outcome.exit_code, outcome.state.step) == ("preempted", EXIT_PREEMPTED, 3)
    assert newest_valid(tmp_path / "parts" / "checkpoints") is not None
    monkeypatch.delenv("REDLINE_DEADLINE")
    world.run(tmp_path / "parts", *OPTIONS, resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_the_deadline_leaves_time_for_a_save(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_DEADLINE", str(END))
    assert leave_at(world, tmp_path / "slow", 3, now=END - 150, save=100.0).state.step == 3
    assert leave_at(world, tmp_path / "quick", 3, now=END - 150).reason == "steps"


def test_a_run_that_has_reached_its_end_is_done(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_DEADLINE", str(END))
    assert leave_at(world, tmp_path / "run", 8, now=END).reason == "steps"


@pytest.mark.parametrize("text", ["soon", "12:00", "nan"])
def test_a_deadline_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("REDLINE_DEADLINE", text)
    with pytest.raises(UserError, match="REDLINE_DEADLINE"):
        Deadline()


def test_without_a_deadline_none_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "inf"):
        monkeypatch.setenv("REDLINE_DEADLINE", text)
        assert not Deadline().within(1e12)
