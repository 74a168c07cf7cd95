"""Presets: one word for how much of the memory to fill and how large a batch to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.errors import RecipeError
from redline.hardware.machine import named_gpu
from redline.recipe.load import load
from redline.recipe.lock import locked_recipe, make_lock
from redline.recipe.resolve import DataFacts, resolve

FACTS = DataFacts(50257, 10**10, 10**6, "", "gpt2", "")


@pytest.mark.parametrize(
    ("preset", "fraction", "batch"),
    [("conservative", 0.45, 64), ("recommended", 0.65, 128), ("aggressive", 0.80, 192), ("extreme", 0.92, 256)],
)
def test_a_preset_sets_memory_and_batch(preset: str, fraction: float, batch: int) -> None:
    recipe = load("pretrain-350m", [f"train.preset={preset}"]).recipe
    assert (recipe.train.memory_fraction, recipe.train.global_batch) == (fraction, batch)
    plan = resolve(recipe, named_gpu("h100"), FACTS)
    assert plan.memory.peak <= fraction * plan.machine.memory_bytes
    assert plan.recipe.train.lr == pytest.approx(4e-4 * (batch / 128) ** 0.5, rel=1e-5), "the learning rate follows"
    assert ("train.preset", preset) in [(choice.key, choice.value) for choice in plan.choices]


def test_explicit_keys_override_the_preset() -> None:
    beside = ["train.preset=extreme", "train.global_batch=96", "train.memory_fraction=0.5"]
    recipe = load("pretrain-350m", beside).recipe
    assert (recipe.train.memory_fraction, recipe.train.global_batch) == (0.5, 96)


def test_in_a_file_it_scales_the_files_batch(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    batch = "micro_batch: 4, accumulation: 2"
    path.write_text(f"model: {{size: 1m}}\ntrain: {{steps: 5, preset: aggressive, {batch}, memory_fraction: 0.3}}\n")
    recipe = load(str(path)).recipe
    assert (recipe.train.accumulation, recipe.train.memory_fraction) == (3, 0.3)
    assert load(str(path), ["train.preset=conservative"]).recipe.train.memory_fraction == 0.45


@pytest.mark.parametrize(
    ("batch", "micro", "total"),
    [
        ("micro_batch: 4, global_batch: 16", 6, 24),
        ("micro_batch: 3, global_batch: 12", 3, 18),  # four and a half sequences are none
        ("micro_batch: 5, global_batch: 16", None, None),
    ],
)
def test_a_micro_batch_goes_with_the_global_one(
    tmp_path: Path, batch: str, micro: int | None, total: int | None
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"model: {{size: 1m}}\ntrain: {{steps: 5, preset: aggressive, {batch}}}\n")
    if micro is None:
        with pytest.raises(RecipeError, match="does not divide"):
            load(str(path))
        return
    train = load(str(path)).recipe.train
    assert (train.micro_batch, train.global_batch) == (micro, total)
    asked = load(str(path), ["train.micro_batch=2"]).recipe.train
    assert (asked.micro_batch, asked.global_batch) == (2, total), "what is asked for is not scaled"


def test_an_automatic_batch_is_scaled_too() -> None:
    def batch(*overrides: str) -> int:
        recipe = load("quickstart", ["train.steps=100", "train.epochs=null", "train.hours=null", *overrides]).recipe
        return resolve(recipe, named_gpu("l4"), FACTS).batch.global_batch

    assert batch("train.preset=extreme") == 2 * batch()


def test_it_is_not_applied_again_when_a_run_is_resumed(tmp_path: Path) -> None:
    plan = resolve(load("pretrain-350m", ["train.preset=extreme"]).recipe, named_gpu("h200"), FACTS)
    again = locked_recipe(tmp_path, make_lock("pretrain-350m", "id", plan, FACTS)).recipe
    assert again.train.global_batch == 256
    assert resolve(again, named_gpu("h200"), FACTS).batch == plan.batch


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(RecipeError, match=r"train\.preset.*conservative"):
        load("pretrain-350m", ["train.preset=turbo"])
