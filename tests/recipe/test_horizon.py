"""Which stop condition counts, what the plan says about the length of a run, and when it warns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.hardware.machine import Machine
from redline.recipe.load import load
from redline.recipe.lock import locked_recipe, make_lock
from redline.recipe.resolve import DataFacts, Resolved, resolve

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
YAML = """
model: {layers: 1, d_model: 32, heads: 2}
data: {tokenizer: bytes, seq_len: 32}
train: {global_batch: 4, STOPS}
"""
STEP = 4 * 32  # tokens


def plan(path: Path, stops: str, *overrides: str, train_tokens: int = 100 * STEP) -> Resolved:
    recipe = path / "own.yaml"
    recipe.write_text(YAML.replace("STOPS", stops))
    data = DataFacts(256, train_tokens, STEP, "data", "bytes", "tokenizer")
    return resolve(load(str(recipe), overrides).recipe, CPU, data)


def stops(recipe: Any) -> tuple[Any, ...]:
    return recipe.train.steps, recipe.train.tokens, recipe.train.epochs


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (None, None, 3.0)),
        (["train.steps=40"], (40, None, None)),
        (["train.tokens=1M"], (None, 1_000_000, None)),
        (["train.epochs=1"], (None, None, 1.0)),
        (["train={steps: 40}"], (40, None, None)),
        (["train.steps=40", "train.epochs=2"], (40, None, 2.0)),
        (["train.steps=40", "train.epochs=null"], (40, None, None)),
        (["train.steps=null"], (None, None, 3.0)),
        (["train.hours=1h"], (None, None, 3.0)),
    ],
)
def test_a_typed_stop_replaces_those_of_the_recipe(words: list[str], expected: tuple[Any, ...]) -> None:
    loaded = load("qlora-8b", words)
    assert stops(loaded.recipe) == expected
    replaced = expected[2] is None and "train.epochs=null" not in words
    assert any("train.epochs" in note for note in loaded.notes) == replaced


def test_the_tutorials_command_trains_the_steps_it_names() -> None:
    """600 short rows are less than one global batch of the recipe, so its three epochs are a single step."""
    data = DataFacts(128256, 24_000, 4096, "data", "base", "tokenizer")
    assert resolve(load("qlora-8b", ["train.steps=40"]).recipe, CPU, data).horizon_steps == 40


def test_two_stops_of_a_file_stay_and_the_first_reached_counts(tmp_path: Path) -> None:
    assert plan(tmp_path, "steps: 30, epochs: 2").horizon_steps == 30
    assert plan(tmp_path, "steps: 300, epochs: 2").horizon_steps == 200
    assert plan(tmp_path, "epochs: 1", "train.steps=30", "train.tokens=2560").horizon_steps == 20


def test_a_resume_replaces_too_and_old_logs_keep_their_meaning(tmp_path: Path) -> None:
    resolved = plan(tmp_path, "epochs: 2")
    lock = make_lock("own", "abc", resolved, DataFacts(256, 100 * STEP, STEP, "data", "bytes", "tokenizer"))
    assert stops(locked_recipe(tmp_path, lock, ["train.steps=300"]).recipe) == (300, None, None)
    earlier = locked_recipe(tmp_path, lock, [], [["train.steps=300"]]).recipe
    assert stops(earlier) == (300, None, 2.0), "as the version that wrote the log understood it"
    later = locked_recipe(tmp_path, lock, [], [["train.steps=300", "train.tokens=null", "train.epochs=null"]]).recipe
    assert stops(later) == (300, None, None)


def test_the_horizon_has_steps_tokens_epochs_and_time(tmp_path: Path) -> None:
    event = plan(tmp_path, "steps: 50").plan_event()
    assert event["horizon"] == {
        "steps": 50,
        "tokens": 50 * STEP,
        "epochs": 0.5,
        "seconds": None,
        "expected_steps": None,
        "expected_tokens": None,
        "expected_epochs": None,
    }
    assert event["hours"] > 0
    clock = plan(tmp_path, "steps: 1000000000, hours: 1s").plan_event()["horizon"]
    assert clock["expected_tokens"] < clock["tokens"]
    assert clock["expected_steps"] == clock["expected_tokens"] // STEP
    assert clock["expected_epochs"] == pytest.approx(clock["expected_tokens"] / (100 * STEP), rel=1e-3)
    assert plan(tmp_path, "steps: 50", train_tokens=0).plan_event()["horizon"]["epochs"] is None, "not known yet"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("steps: 19", ["19 steps"]),
        ("steps: 20", []),
        ("epochs: 0.05", ["5 steps", "0.05 epochs"]),
        ("steps: 100", []),
        ("epochs: 10", []),
        ("epochs: 10.5", ["10.5 epochs"]),
        ("tokens: 1280", ["10 steps"]),
    ],
)
def test_an_unlikely_run_length_is_warned_of(tmp_path: Path, given: str, words: list[str]) -> None:
    event = plan(tmp_path, given).plan_event()
    warnings = [text for text in event["warnings"] if "steps long" in text or "epochs" in text]
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_many_epochs_within_the_time_budget_are_warned_of(tmp_path: Path) -> None:
    event = plan(tmp_path, "hours: 1h").plan_event()
    assert event["horizon"]["expected_epochs"] > 10
    assert any("epochs" in warning for warning in event["warnings"])
