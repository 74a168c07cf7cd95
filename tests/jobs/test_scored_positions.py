"""Logits are computed for positions with a target alone, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetuning import Tuning
from redline.jobs import objective as decoder
from redline.jobs.objective import DecoderObjective, with_scored_positions
from redline.kernels.cross_entropy import IGNORE


@given(st.integers(1, 4), st.integers(1, 40), st.floats(0, 1), st.integers(0, 1000))
def test_every_target_keeps_its_position(rows: int, length: int, share: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 50, (rows, length), generator=chance)
    targets[torch.rand(targets.shape, generator=chance) < share] = IGNORE
    found = with_scored_positions({"inputs": targets, "targets": targets})
    if "scored_positions" not in found:
        assert found["targets"] is targets
        return
    learnt = found["targets"] != IGNORE
    assert (targets.flatten()[found["scored_positions"][learnt]] == found["targets"][learnt]).all()
    assert found["scored_positions"][learnt].unique().numel() == int((targets != IGNORE).sum()) == int(learnt.sum())
    assert len(found["targets"]) == len(found["scored_positions"]) < targets.numel()
    assert len(found["targets"]) % max(1, targets.numel() // 4) == 0


@pytest.mark.parametrize("learn", ["answers", "all"])
def test_loss_and_gradients_equal_those_of_all_positions(
    world: Any, tiny_base: Path, answers: Path, tmp_path: Path, learn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = decoder.linear_cross_entropy

    def counted(hidden: Any, *rest: Any, **how: Any) -> Any:
        made.append(len(hidden))
        return plain(hidden, *rest, **how)

    monkeypatch.setattr(decoder, "linear_cross_entropy", counted)
    tuning, results = Tuning(world, tiny_base, answers, tmp_path), []
    for uniform in (True, False):
        monkeypatch.setattr(DecoderObjective, "uniform_layout", uniform)
        objective = tuning.objective(f"finetune.learn={learn}", "data.pack=false", "model.lora.dropout=0")
        batch = objective.batch(torch.arange(4).numpy())
        loss = objective.loss(batch)["cross_entropy"].sum
        loss.backward()
        gradients = [p.grad for p in objective.model.parameters() if p.requires_grad]
        results.append((objective.weights(batch), loss.detach(), gradients))
    (weights, loss, gradients), (found_weights, found_loss, found_gradients) = results
    assert weights == found_weights
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=1e-5)
    for found, expected in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert made[0] == 4 * 96
    assert made[1] < made[0], "without packing, rows have padding"
