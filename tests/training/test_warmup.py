"""Failures during the warm-up: out of memory, failed compilation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import UserError
from redline.runs.events import read_events
from redline.training.control import RunDirectory
from redline.training.recovery import read_failures, reduce_memory


@pytest.fixture(autouse=True)
def _default_stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def fail(trainer: Any, errors: list[Exception]) -> None:
    plain = trainer.train_step.dry_run

    def dry_run(batch: Any) -> None:
        if errors:
            raise errors.pop(0)
        plain(batch)

    trainer.train_step.dry_run = dry_run


def said(run: Path, kind: str) -> list[str]:
    return [e["message"] for e in read_events(run / "events.jsonl") if e["type"] == kind]


def test_out_of_memory_halves_the_micro_batch_and_changes_no_result(
    world: Any, tmp_path: Path, tensors_of: Any
) -> None:
    options = ("train.micro_batch=8", "train.steps=3", "data.pack=true")
    for name, errors in (("whole", []), ("halved", [torch.OutOfMemoryError("no"), torch.OutOfMemoryError("no")])):
        with RunDirectory(tmp_path / name) as run:
            trainer = world.trainer(run, *options)
            fail(trainer, errors)
            trainer.run()
    assert trainer.batch.micro == 2
    assert trainer.batch.global_batch == 8
    assert ["the global batch stays 8" in m for m in said(tmp_path / "halved", "recovery")] == [True, True]
    expected, got = (tensors_of(tmp_path / n / "checkpoints/step-00000003") for n in ("whole", "halved"))
    for name, tensor in expected.items():
        if name.startswith("model/"):
            torch.testing.assert_close(tensor, got[name], rtol=0, atol=1e-4)


def test_a_halved_micro_batch_stays_on_resume(world: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, "train.micro_batch=8", "train.steps=3")
        fail(trainer, [torch.OutOfMemoryError("no")])
        trainer.run()
    again = world.run(tmp_path / "run", "train.micro_batch=8", "train.steps=4", resume=True)
    assert again.batch.micro == 4
    assert again.state.step == 4


def test_a_micro_batch_of_one_cannot_be_halved(world: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, "train.micro_batch=1", "train.grad_checkpointing=full")
        fail(trainer, [torch.OutOfMemoryError("no")])
        with pytest.raises(UserError, match="even with grad_checkpointing=full"):
            trainer.run()


def test_one_sequence_that_does_not_fit_is_recorded_for_recomputation(world: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, "train.micro_batch=2")
        fail(trainer, [torch.OutOfMemoryError("no"), torch.OutOfMemoryError("no")])
        with pytest.raises(UserError, match="grad_checkpointing=full"):
            trainer.run()
    (found,) = read_failures(tmp_path / "run")
    assert (found.micro, found.checkpointing) == (1, "none")
    assert reduce_memory(trainer.resolved.batch, "none", [found], sharded=False)[1] == "full"


def test_a_failed_compilation_falls_back_to_eager(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, "train.steps=2")
        trainer.train = trainer.train.model_copy(update={"compile": True})

        def broken(*_: Any) -> Any:
            raise RuntimeError("no compiler here")

        for block in trainer.objective.model.blocks:
            block._compiled_call_impl = torch.compile(block._call_impl, backend=broken)
        outcome = trainer.run()
    assert outcome.reason == "steps"
    assert len(said(tmp_path / "run", "warning")) == 1
    assert "torch.compile" in said(tmp_path / "run", "warning")[0]


def test_any_other_error_is_not_hidden(world: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run)
        fail(trainer, [ValueError("a defect of ours")])
        with pytest.raises(ValueError, match="a defect of ours"):
            trainer.run()


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputation_changes_nothing(world: Any, tmp_path: Path, tensors_of: Any, checkpointing: str) -> None:
    """With dropout: the recomputed masks are the same."""
    for level in ("none", checkpointing):
        options = ("train.steps=3", "data.pack=true", "model.dropout=0.2", f"train.grad_checkpointing={level}")
        world.run(tmp_path / level, *options)
    expected, got = (tensors_of(tmp_path / n / "checkpoints/step-00000003") for n in ("none", checkpointing))
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
