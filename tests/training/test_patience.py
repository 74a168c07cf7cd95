"""Early stopping: `eval.patience` evaluations without a lower validation loss end the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import EXIT_DONE
from redline.runs.events import Event, read_events
from redline.training.schedule import TrainState
from several import Several

# At this learning rate no weight changes in float32: no evaluation is better than the one before the first step.
STUCK = ("train.optimizer=adamw", "train.lr=1e-30", "train.steps=20", "eval.every=1", "eval.samples=0")


def events(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["type"] == kind]


def saved_state(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"checkpoints/step-{step:08}/state.json").read_text())
    return found


def test_a_run_that_does_not_improve_stops(world: Any, tmp_path: Path) -> None:
    trainer = world.run(tmp_path / "run", *STUCK, "eval.patience=3")
    assert (trainer.outcome.reason, trainer.outcome.exit_code) == ("patience", EXIT_DONE)
    assert trainer.state.step == 3, "three evaluations after the one before the first step"
    assert events(tmp_path / "run", "stop")[-1]["reason"] == "patience"
    assert saved_state(tmp_path / "run", 3)["evals_without_improvement"] == 3


def test_without_patience_or_with_improvement_a_run_continues(world: Any, tmp_path: Path) -> None:
    off = world.run(tmp_path / "off", *STUCK, "train.steps=5")
    assert off.outcome.reason == "steps"
    learns = ("train.lr=3e-3", "train.steps=6", "eval.every=1", "eval.samples=0", "eval.patience=1")
    better = world.run(tmp_path / "better", *learns)
    losses = [event["loss"] for event in events(tmp_path / "better", "eval")]
    assert losses == sorted(losses, reverse=True), "otherwise this test shows nothing"
    assert better.outcome.reason == "steps"


def test_the_count_survives_a_resume(world: Any, tmp_path: Path, tensors_of: Any) -> None:
    """A run that was interrupted stops at the same step as one that was not, with the same tensors."""
    whole = world.run(tmp_path / "whole", *STUCK, "eval.patience=4")
    world.run(tmp_path / "parts", *STUCK, "eval.patience=4", stop_at=3)
    assert saved_state(tmp_path / "parts", 3)["evals_without_improvement"] == 2, "it was asked to stop before the third"
    second = world.run(tmp_path / "parts", *STUCK, "eval.patience=4", resume=True)
    assert (whole.outcome.reason, whole.state.step) == ("patience", 4)
    assert (second.outcome.reason, second.state.step) == ("patience", 4)
    expected, got = (tensors_of(tmp_path / name / "checkpoints/step-00000004") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_checkpoints_of_older_versions_start_counting_at_zero() -> None:
    old = {"step": 7, "tokens": 70, "seconds": 1.0, "best": {"step": 2, "loss": 3.0}}
    assert TrainState.from_json(old).evals_without_improvement == 0


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ([3.0, 2.0, 1.0], 0),
        ([3.0, 3.0], 1),  # equal is not better
        ([3.0, 4.0, float("nan"), 5.0], 3),  # nor is a loss that is not finite
        ([3.0, 4.0, 2.0, 2.5], 1),
        ([3.0, None, None], 0),  # nothing was measured
    ],
)
def test_what_counts_as_improvement(losses: list[float | None], count: int) -> None:
    state = TrainState()
    for loss in losses:
        state = state.after_evaluation(loss)
    assert state.evals_without_improvement == count
    assert TrainState.from_json(state.to_json()).evals_without_improvement == count


def test_several_ranks_stop_together(several: Several, tmp_path: Path) -> None:
    ranks = ("train.global_batch=8", "train.micro_batch=2")
    run = several.run(tmp_path / "two", 2, *STUCK, *ranks, "eval.patience=2")
    assert [(event["reason"], event["step"]) for event in events(run, "stop")] == [("patience", 2)]
