"""`redline bench` with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.bench import child, setting, throughput
from redline.recipe.load import load


def test_throughput_measures_each_configuration(inside: Any, recipe: str, tmp_path: Path) -> None:
    answer = inside("bench", "throughput", recipe, "train.steps=3", "--json", "--out", "t.json", "--only", "redline")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert json.loads((tmp_path / "t.json").read_text()) == result
    (row,) = result["rows"]
    assert row["name"] == "redline"
    assert row["steps"] == 3
    assert row["redline_is"] == 1.0
    # the median of three steps and the mean differ by what else the machine does, but not by a unit
    assert 0.02 < row["tokens_per_s"] * row["step_ms"] / (8 * 32 * 1000) < 50


def test_startup_is_measured_cold_and_warm(inside: Any, recipe: str) -> None:
    answer = inside("bench", "startup", recipe, "train.steps=1", "eval.sequences=1")
    assert answer.code == 0, answer.err
    assert "train.compile" not in answer.err, "the recipe that was named, as it is"
    cold, warm = answer.out.splitlines()
    assert cold.startswith("cold")
    assert warm.startswith("warm")
    assert "s to the first step" in warm


def test_every_contender_is_a_recipe_too() -> None:
    for contender in throughput.CONTENDERS:
        for defaults in throughput.DEFAULTS.values():
            words = [*setting.UNDISTURBED, *contender.overrides, *setting.TINY, *defaults, *contender.forced]
            assert load(setting.RECIPE, words).recipe


def test_random_tokens_unless_others_are_named(tmp_path: Path) -> None:
    defaults = {"cpu": (), "cuda": ()}
    random = setting.choose_setting(None, ["train.device=cpu"], defaults).with_tokens(tmp_path / "a", 5000)
    assert random.recipe.data.source == str(tmp_path / "a")
    assert (tmp_path / "a" / "train.bin").stat().st_size == 10_000
    own = setting.choose_setting(None, ["train.device=cpu", f"data.source={tmp_path / 'a'}"], defaults)
    assert own.with_tokens(tmp_path / "b", 5000) is own
    assert not (tmp_path / "b").exists()


def test_without_our_own_figure_it_has_failed(monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    def train(*_: Any) -> Any:
        raise child.ChildError("exit status 1")

    monkeypatch.setattr(throughput, "train", train)
    monkeypatch.setattr(throughput, "ask", train)
    assert inside("bench", "throughput", "quickstart", "train.device=cpu").code == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("throughput", "train.stepz=3"), "train.steps"),
        (("startup", "nosuch"), "nosuch"),
        (("throughput", "--out", "there.json"), "there.json"),
        (("startup", "--out", "nowhere/startup.json"), "nowhere"),
        (("startup", "--out", "startup.txt"), ".json"),
        (("finetune", "train.steps=3", "--only", "x"), "make bench"),
        (("time-to-loss",), "make bench"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], part: str, inside: Any, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine")
    answer = inside("bench", *words)
    assert answer.code == 2
    assert part in answer.message
    assert (tmp_path / "there.json").read_text() == "mine"


def test_what_a_child_says_last_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(child.ChildError, match="Did you mean"):
        child.train(["quickstart", "train.stepz=3"], tmp_path / "run")
