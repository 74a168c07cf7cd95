"""Every shipped recipe trains, with a small model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from redline.recipe.load import load, shipped
from redline.runs.events import read_events
from redline.training.checkpoint import verify

SHRUNK = ("train.steps=2", "train.warmup_steps=1", "train.precision=auto")
PROBLEMS = "data.source=problems:easy:40"
FACTS = ["data.source=facts:2:40", "data.seq_len=64"]
# what stands in for a job's own data, and for lengths that suit it
TOYS = {
    "block_diffusion": (PROBLEMS, "block_diffusion.question=16", "block_diffusion.block_size=8"),
    "hierarchical_diffusion": (
        PROBLEMS,
        *("hierarchical_diffusion.question=16", "hierarchical_diffusion.plan=8"),
        *("hierarchical_diffusion.execution=16", "hierarchical_diffusion.execution_block=8", "data.seq_len=40"),
    ),
}


@pytest.mark.parametrize("name", shipped())
def test_it_describes_itself(name: str) -> None:
    recipe = load(name).recipe
    assert len(recipe.description) > 10
    assert shipped()[name].name == f"{name}.yaml"


@pytest.mark.parametrize("name", shipped())
def test_it_trains(name: str, world: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    recipe: Any = load(name).recipe
    mine: list[str] = []
    if recipe.objective == "finetune":
        base, rows = (request.getfixturevalue(fixture) for fixture in ("tiny_base", "answers"))
        shape = ["model.layers=2", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.d_ff=128"]
        free = ["model.vocab=auto", "model.tied=true", "model.rope_theta=10000", "model.rope_scaling=null"]
        mine = [*shape, *free, f"model.base={base}", f"data.source={rows}", "data.tokenizer=base", "data.seq_len=64"]
    elif recipe.objective == "latent_prefix":
        base = request.getfixturevalue("tiny_base")
        free = [f"model.{key}=auto" for key in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab")]
        free += ["model.tied=true", "model.rope_theta=10000", "model.rope_scaling=null", "data.tokenizer=bytes"]
        small = [f"latent_prefix.{word}" for word in ("d_z=16", "slots=4", "layers=1", "heads=2", "bytes=64")]
        others = f"latent_prefix.others=[{base}]" if recipe.latent_prefix.others else "latent_prefix.others=[]"
        rows = [PROBLEMS, "data.seq_len=32"] if recipe.latent_prefix.question_aware else FACTS
        mine = [*free, *small, others, f"model.base={base}", *rows]
    elif recipe.objective in TOYS and not recipe.data.source.startswith("Skylion007/"):
        mine = [*TOYS[recipe.objective]]
    replaced = {word.partition("=")[0] for word in mine}
    tiny = [*world.tiny, *SHRUNK, f"data.source={world.corpus}"]
    shrunk = [word for word in tiny if word.partition("=")[0] not in replaced] + mine
    world.recipe = lambda *more: load(name, [*shrunk, *more]).recipe
    trainer = world.run(tmp_path / "run")
    assert trainer.state.step == 2
    losses = [e["loss"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "step"]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    assert verify(checkpoint)["step"] == 2
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 2
