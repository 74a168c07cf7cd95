"""The recipe with a leaderboard's rules: what they fix, what the card makes of it, and what its page quotes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.data.sources import dataset_id
from redline.hardware.machine import named_gpu
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve
from redline.runs.events import read_events
from redline.training.control import RunDirectory
from test_docs import EXAMPLES, Example

NAME = "owt-cs336"
FACTS = DataFacts(32_000, 9 * 10**9, 4 * 10**8, "data", "train:32000", "tokenizer")
MOST_MATMUL = 350_000_000
QUOTED_PLANS = [e for e in EXAMPLES if e.page in ("pretrain.md", "cs336.md") and e.words[0] == "plan"]


def typed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`redline …` without a network, and without a price."""
    env = {key: value for key, value in os.environ.items() if key != "REDLINE_PRICE"} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "redline", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env, timeout=120, check=False)


def test_it_has_the_rules_of_the_leaderboard() -> None:
    recipe = load(NAME).recipe
    assert (recipe.data.tokenizer, recipe.data.seq_len, recipe.train.hours) == ("train:32000", 512, 1.5)
    stops = (recipe.train.steps, recipe.train.tokens, recipe.train.epochs, recipe.train.target_loss)
    assert stops == (None, None, None, None), "the clock alone ends it"
    assert isinstance(recipe.data.source, str)
    dataset = dataset_id(recipe.data.source)
    assert dataset is not None
    assert (dataset.name, dataset.split) == ("Skylion007/openwebtext", "train")


def test_a_local_copy_replaces_the_dataset() -> None:
    assert load(NAME, ["data.source=./tokens-32k"]).recipe.data.source == "./tokens-32k"


def test_on_an_h100_it_is_the_model_that_is_described() -> None:
    plan = resolve(load(NAME).recipe, named_gpu("h100"), FACTS)
    shape = plan.shape
    assert (shape.layers, shape.d_model, shape.heads, shape.head_dim, shape.d_ff) == (16, 1024, 8, 128, 4096)
    assert (shape.mlp, shape.tied, shape.qk_norm, shape.vocab) == ("relu2", False, True, 32_000)
    assert 16 * (4 * 1024**2 + 2 * 1024 * 4096) + 32_000 * 1024 == shape.matmul_parameters <= MOST_MATMUL
    assert (plan.batch.global_batch, plan.tokens_per_step) == (128, 128 * 512)
    assert plan.recipe.train.precision == "bf16"
    model, train = plan.recipe.model, plan.recipe.train
    assert (model.softcap, model.init) == (15, "zero")
    assert (train.optimizer, train.schedule, train.min_lr_ratio) == ("normuon", "wsd", 0.0)


def test_it_trains(world: Any, tmp_path: Path) -> None:
    """Two steps of a toy with its kind of tokenizer: what AdamW and NorMuon each train has moved."""
    toy = [*world.tiny, "data.tokenizer=train:300", "train.steps=2", f"data.source={world.corpus}"]
    world.recipe = lambda *more: load(NAME, [*toy, *more]).recipe
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run)
        model = trainer.objective.model
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        trainer.run()
        trainer.monitor.log.close()
    losses = [e["loss"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "step"]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(trainer.resolved.shape.vocab), abs=0.2), "it begins without an opinion"
    assert all(map(math.isfinite, losses))
    moved = {name for name, tensor in model.named_parameters() if not tensor.equal(before[name])}
    assert {"embedding.weight", "head.weight", "norm.weight"} <= moved
    assert any(name.startswith("blocks.1.") for name in moved)


def test_the_plan_needs_no_data(tmp_path: Path) -> None:
    done = typed("plan", NAME, "--gpu", "h100", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["hours"] == 1.5
    assert plan["parameters"]["matmul"] <= MOST_MATMUL
    assert plan["horizon"]["expected_tokens"] == pytest.approx(5400 * plan["throughput"]["tokens_per_s"], rel=1e-3)
    (warning,) = plan["warnings"]
    assert "Skylion007/openwebtext is not known" in warning


def test_without_network_or_copy_it_says_what_is_missing(tmp_path: Path) -> None:
    done = typed("train", NAME, "--dry-run", "train.device=cpu", cwd=tmp_path)
    assert done.returncode == 1
    assert "redline: Skylion007/openwebtext: no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("example", QUOTED_PLANS, ids=str)
def test_their_pages_quote_the_plan(example: Example, tmp_path: Path) -> None:
    """When the plan's arithmetic changes, so must these pages."""
    done = typed(*example.words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in example.output} >= {"speed", "horizon"}
    assert [line for line in example.output if line not in done.stdout.splitlines()] == []


def test_pages_quote_the_plans_of_both_recipes() -> None:
    assert {example.words[1] for example in QUOTED_PLANS} == {"pretrain-350m", NAME}
