"""`redline bench` as it is typed, on a toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.bench import child, plan_accuracy, setting, throughput
from redline.errors import UserError
from redline.recipe.forecast import Measured
from redline.recipe.load import load

FACTS = {"benchmark", "date", "machine", "versions", "git", "rows"}


def test_throughput_puts_the_real_loop_beside_its_peers(inside: Any, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="one of the contenders")
    answer = inside("bench", "throughput", recipe, "train.steps=3", "--json", "--out", "t.json")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert set(result) >= FACTS
    assert json.loads((tmp_path / "t.json").read_text()) == result
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["redline", "plain", "transformers"]
    for row in rows.values():
        assert "error" not in row, row
        assert row["tokens_per_s"] == pytest.approx(8 * 32 * 1000 / row["step_ms"], rel=0.3)
        assert row["redline_is"] == pytest.approx(rows["redline"]["tokens_per_s"] / row["tokens_per_s"])
        assert row["steps"] == 3
    ours, plain, peer = (row["first_loss"] for row in rows.values())
    assert ours == plain, "the same loop on the same data"
    assert peer == pytest.approx(ours, abs=0.15), "the same shape, initialised by another"


def test_startup_is_measured_cold_and_warm(inside: Any, recipe: str) -> None:
    answer = inside("bench", "startup", recipe, "train.steps=1", "eval.sequences=1")
    assert answer.code == 0, answer.err
    assert "train.compile" not in answer.err, "the recipe that was named, as it is"
    cold, warm = answer.out.splitlines()
    assert cold.startswith("cold")
    assert warm.startswith("warm")
    assert "s to the first step" in warm


def test_plan_accuracy_compares_plan_and_steps(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def steps(resolved: Any, facts: Any) -> Measured:
        seen.append(resolved.recipe.model.d_model)
        if len(seen) == 2:
            raise UserError("no room.", where="--probe")
        return Measured(tokens_per_s=1000.0, memory_gib=2.0, step_ms=5.0, compile_s=0.1)

    monkeypatch.setattr(plan_accuracy, "run_trial", steps)
    answer = inside("bench", "plan-accuracy", "train.device=cpu", "model.d_model=128", "--json")
    assert answer.code == 0, answer.err
    rows = json.loads(answer.out)["rows"]
    assert len(rows) == len(plan_accuracy.CASES["cpu"])
    assert seen == [128] * len(rows), "overrides hold for every row"
    first = rows[0]
    assert first["memory_gib_error"] == pytest.approx(first["planned"]["memory_gib"] / 2.0 - 1)
    assert "no room." in rows[1]["error"]
    text = inside("bench", "plan-accuracy", "quickstart", "model.size=5m", "train.device=cpu").out
    assert text.count("\n") == 1
    assert "GiB (" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_configuration_is_a_recipe(device: str) -> None:
    chosen = plan_accuracy.cases(None, [], device)
    assert len(chosen) == len(set(chosen))
    for case in chosen:
        name, *overrides = case.split()
        assert load(name, overrides).recipe
    assert device == "cpu" or len(chosen) >= 12


def test_every_contender_is_a_recipe_too() -> None:
    for contender in throughput.CONTENDERS:
        for defaults in throughput.DEFAULTS.values():
            assert load(setting.RECIPE, [*setting.UNDISTURBED, *contender.overrides, *setting.TINY, *defaults]).recipe


def test_random_tokens_unless_others_are_named(tmp_path: Path) -> None:
    defaults = {"cpu": (), "cuda": ()}
    random = setting.choose_setting(None, ["train.device=cpu"], defaults).with_tokens(tmp_path / "a", 5000)
    assert random.recipe.data.source == str(tmp_path / "a")
    assert (tmp_path / "a" / "train.bin").stat().st_size == 10_000
    own = setting.choose_setting(None, ["train.device=cpu", f"data.source={tmp_path / 'a'}"], defaults)
    assert own.with_tokens(tmp_path / "b", 5000) is own
    assert not (tmp_path / "b").exists()


def test_a_contender_that_fails_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        raise child.ChildError("the package transformers is not installed.")

    figures = dict.fromkeys(("mfu", "memory_gib")) | {"tokens_per_s": 10.0, "step_ms": 1.0, "micro_batch": 1}
    monkeypatch.setattr(throughput, "ask", ask)
    monkeypatch.setattr(throughput, "train", lambda *_: None)
    monkeypatch.setattr(throughput, "_figures", lambda _: figures)
    answer = inside("bench", "throughput", "quickstart", "train.device=cpu")
    assert answer.code == 0
    assert "no figure: the package transformers is not installed." in answer.out


def test_without_our_own_figure_it_has_failed(monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    def train(*_: Any) -> Any:
        raise child.ChildError("exit status 1")

    monkeypatch.setattr(throughput, "train", train)
    monkeypatch.setattr(throughput, "ask", train)
    assert inside("bench", "throughput", "quickstart", "train.device=cpu").code == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("throughput", "train.stepz=3"), "Did you mean 'train.steps'?"),
        (("startup", "nosuch"), "there is no recipe"),
        (("plan-accuracy", "a", "b"), "one recipe at a time"),
        (("throughput", "--out", "there.json"), "is there already"),
        (("startup", "--out", "nowhere/startup.json"), "there is no such folder"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], said: str, inside: Any, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine")
    answer = inside("bench", *words)
    assert answer.code == 2
    assert said in answer.said
    assert (tmp_path / "there.json").read_text() == "mine"


def test_what_a_child_says_last_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(child.ChildError, match="Did you mean"):
        child.train(["quickstart", "train.stepz=3"], tmp_path / "run")
