"""Ten steps equal five steps, a resume and five more, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import EXIT_PREEMPTED, UserError
from redline.runs.events import read_events
from redline.training.checkpoint import best_step

EVERYTHING = (
    "model.dropout=0.1",
    "data.pack=true",
    "data.workers=2",
    "train.ema=0.9",
    "train.steps=10",
    "train.micro_batch=2",
    "train.schedule=cosine",
    "eval.every=3",
)


def curve(run: Path) -> list[tuple[Any, ...]]:
    events = [e for e in read_events(run / "events.jsonl") if e["type"] in ("step", "eval")]
    keys = ("type", "step", "tokens", "loss", "lr", "grad_norm")
    return [tuple(e.get(k) for k in keys) for e in events]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_a_resumed_run_is_bitwise_equal(world: Any, tmp_path: Path, tensors_of: Any, optimizer: str) -> None:
    options = (*EVERYTHING, f"train.optimizer={optimizer}")
    whole = world.run(tmp_path / "whole", *options)
    first = world.run(tmp_path / "parts", *options, stop_at=5)
    assert first.outcome.exit_code == EXIT_PREEMPTED
    assert first.state.step == 5
    second = world.run(tmp_path / "parts", *options, resume=True)
    assert whole.state.step == second.state.step == 10

    expected = tensors_of(tmp_path / "whole/checkpoints/step-00000010")
    got = tensors_of(tmp_path / "parts/checkpoints/step-00000010")
    assert expected.keys() == got.keys()
    assert any(name.startswith("ema/") for name in got)
    assert any("momentum" in name or "exp_avg" in name for name in got)
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    resumed = [e for e in curve(tmp_path / "parts") if e[0] == "step"]
    assert resumed == [e for e in curve(tmp_path / "whole") if e[0] == "step"]


def test_micro_batches_do_not_change_the_mathematics(world: Any, tmp_path: Path, tensors_of: Any) -> None:
    """1×8 and 8×1, packed, three steps, fp32."""
    results = []
    for micro in (8, 1):
        run = tmp_path / str(micro)
        options = ("data.pack=true", "train.steps=3", "train.optimizer=adamw", "train.lr=1e-3")
        world.run(run, *options, f"train.micro_batch={micro}")
        results.append(tensors_of(run / "checkpoints/step-00000003"))
    for name, tensor in results[0].items():
        if name.startswith("model/"):
            # Adam divides by the gradient's size: where that is tiny, the order of a sum is seen in an update of 1e-3
            torch.testing.assert_close(tensor, results[1][name], rtol=0, atol=5e-6)
    losses = [[e[3] for e in curve(tmp_path / m) if e[0] == "step"] for m in ("8", "1")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_changed_data_are_refused(world: Any, tmp_path: Path) -> None:
    world.run(tmp_path / "run", stop_at=2)
    with pytest.raises(UserError, match="data changed since this run began"):
        world.run(tmp_path / "run", "data.val_fraction=0.3", resume=True)


def test_a_damaged_newest_checkpoint_falls_back(world: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    world.run(run, "train.steps=4", "checkpoint.every=2", "checkpoint.best=false")
    file = run / "checkpoints/step-00000004/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    trainer = world.run(run, "train.steps=4", resume=True)
    starts = json.loads((run / "checkpoints/step-00000004/state.json").read_text())
    assert trainer.state.step == 4
    assert starts["step"] == 4, "the damaged one was replaced by a valid one"


def test_the_last_evaluation_is_in_the_last_checkpoint(world: Any, tmp_path: Path) -> None:
    """Also if a checkpoint was due at the step that turned out to be the last."""
    trainer = world.run(tmp_path / "run", "train.steps=20", "eval.every=7", "checkpoint.every=20", "train.lr=1e-2")
    losses = {e["step"]: e["loss"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "eval"}
    assert min(losses, key=losses.__getitem__) == 20
    assert best_step(tmp_path / "run/checkpoints") == trainer.state.best_step == 20
