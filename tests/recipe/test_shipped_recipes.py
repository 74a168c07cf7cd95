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
def test_it_trains(name: str, world: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shrunk = [*world.tiny, *SHRUNK, f"data.source={world.corpus}"]
    if load(name).recipe.objective == "finetune":
        base, rows = (request.getfixturevalue(fixture) for fixture in ("tiny_base", "answers"))
        shape = ["model.layers=2", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.d_ff=128"]
        free = ["model.vocab=auto", "model.tied=true", "model.rope_theta=10000", "model.rope_scaling=null"]
        mine = [*shape, *free, f"model.base={base}", f"data.source={rows}", "data.tokenizer=base", "data.seq_len=64"]
        shrunk = [word for word in shrunk if word.partition("=")[0] not in {m.partition("=")[0] for m in mine}] + mine
    world.recipe = lambda *more: load(name, [*shrunk, *more]).recipe
    trainer = world.run(tmp_path / "run")
    assert trainer.state.step == 2
    losses = [e["loss"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "step"]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    assert verify(checkpoint)["step"] == 2
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 2
