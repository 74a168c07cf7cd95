"""A step that is not finite changes no tensor by one bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import EXIT_FAILED
from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid
from redline.training.control import RunDirectory


def poison(trainer: Any, at: set[int], value: float) -> None:
    plain = trainer.objective.loss

    def loss(batch: Any) -> Any:
        terms = plain(batch)
        if trainer.state.step in at:
            first = next(iter(trainer.parameters.values()))
            terms = {n: type(t)(t.sum + value * first.sum(), t.weight, t.coefficient) for n, t in terms.items()}
        return terms

    trainer.objective.loss = loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_step_changes_no_tensor(world: Any, tmp_path: Path, optimizer: str, value: float) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, f"train.optimizer={optimizer}", "train.ema=0.9", "train.steps=8")
        snapshots: dict[int, dict[str, torch.Tensor]] = {}

        def keep(number: int) -> None:
            files = trainer.tensors()
            snapshots[number] = {f"{f}/{n}": t.clone() for f, ts in files.items() for n, t in ts.items()}

        world.around(trainer, after=keep)
        poison(trainer, {3, 4}, value)
        outcome = trainer.run()
    assert outcome.reason == "steps"
    for name, before in snapshots[2].items():
        after = snapshots[4][name]
        assert before.view(torch.uint8).equal(after.view(torch.uint8)) if before.dim() else before.equal(after), name
    changed = [n for n, t in snapshots[5].items() if not t.equal(snapshots[4][n])]
    assert len(changed) > len(snapshots[4]) // 2, "the next good step must change the weights"
    warnings = [e for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "warning"]
    assert any("not finite" in e["message"] for e in warnings)


def test_many_bad_steps_in_a_row_stop_the_run(world: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, "train.steps=50", "train.max_nonfinite=3")
        poison(trainer, set(range(2, 50)), float("nan"))
        outcome = trainer.run()
    assert outcome.reason == "nonfinite"
    assert outcome.exit_code == EXIT_FAILED
    assert outcome.state.step == 5


@pytest.mark.parametrize("bad", [range(2, 100), range(3, 26)])
def test_bad_steps_between_two_log_lines_stop_the_run_too(world: Any, tmp_path: Path, bad: range) -> None:
    """Bad steps are read every `max_nonfinite` steps, and a streak counts even if it has ended by then."""
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, "train.steps=200", "train.max_nonfinite=20", "monitor.log_every=100")
        poison(trainer, set(bad), float("nan"))
        outcome = trainer.run()
    assert outcome.reason == "nonfinite"
    assert outcome.state.step == 40
    assert trainer.step_log.fatal_streak[:20] == list(bad)[:20]


def test_fp16_scaling_backs_off_and_recovers() -> None:
    from redline.training.step import LossScale

    scale = LossScale("fp16", torch.device("cpu"))
    first = scale.scale.item()
    scale.update(torch.tensor(1.0))
    assert scale.scale.item() == first / 2
    for _ in range(2000):
        scale.update(torch.tensor(0.0))
    assert scale.scale.item() == first
    fixed = LossScale("bf16", torch.device("cpu"))
    fixed.update(torch.tensor(1.0))
    assert fixed.scale.item() == 1.0


def test_skipped_steps_are_counted_across_a_crash(world: Any, tmp_path: Path) -> None:
    """A run that resumes from the checkpoint does not compute those steps again."""
    options = ("train.steps=8", "train.max_nonfinite=4", "monitor.log_every=100", "checkpoint.every=5")
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, *options)
        poison(trainer, {3, 4}, float("nan"))
        world.around(trainer, after=lambda step: _die() if step == 5 else None)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        trainer.checkpoints.wait()
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, *options, checkpoint=newest_valid(run.checkpoints))
        assert trainer.state.step == 5
        assert (trainer.step_log.skipped, trainer.step_log.streak) == (2, [3, 4])
        poison(trainer, {5, 6}, float("nan"))
        outcome = trainer.run()
    assert outcome.reason == "nonfinite", "four in a row, of which a crash took two"
    stop = [e for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "stop"][-1]
    assert stop["skipped"] == 4


def _die() -> None:
    raise KeyboardInterrupt
