"""Every recipe that ships trains, shrunk to a toy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from redline.monitor.events import read_events
from redline.recipe.load import load, shipped
from redline.train.checkpoint import verify

SHRUNK = ("train.steps=2", "train.warmup_steps=1", "train.precision=auto")


@pytest.mark.parametrize("name", shipped())
def test_it_describes_itself(name: str) -> None:
    recipe = load(name).recipe
    assert len(recipe.description) > 10
    assert shipped()[name].name == f"{name}.yaml"


@pytest.mark.parametrize("name", shipped())
def test_it_trains(name: str, world: Any, tmp_path: Path) -> None:
    world.recipe = lambda *more: load(name, [*world.tiny, *SHRUNK, f"data.source={world.corpus}", *more]).recipe
    trainer = world.run(tmp_path / "run")
    assert trainer.state.step == 2
    losses = [e["loss"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "step"]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    assert verify(checkpoint)["step"] == 2
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 2
