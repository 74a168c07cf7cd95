"""`python -m benchmarks …` with a tiny recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_accuracy
from redline.bench import child, throughput
from redline.errors import UserError
from redline.recipe.load import load

FACTS = {"benchmark", "date", "machine", "versions", "git", "rows"}
MEASURED = {"tokens_per_s": 1000.0, "memory_gib": 2.0, "step_ms": 5.0, "compile_s": 0.1, "micro": 4, "choices": []}


def test_throughput_compares_the_real_loop_with_its_peers(compare: Any, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="one of the contenders")
    answer = compare("throughput", recipe, "train.steps=3", "--json", "--out", "t.json")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert set(result) >= FACTS
    assert json.loads((tmp_path / "t.json").read_text()) == result
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["redline", "redline-fp8", "plain", "transformers"]
    assert "not in fp8" in rows.pop("redline-fp8")["error"], "no CPU has units for it, and bf16 is not fp8"
    for row in rows.values():
        assert "error" not in row, row
        # of three steps the median and the whole differ by what else the machine does, but not by a unit
        assert 0.02 < row["tokens_per_s"] * row["step_ms"] / (8 * 32 * 1000) < 50
        assert row["redline_is"] == pytest.approx(rows["redline"]["tokens_per_s"] / row["tokens_per_s"])
        assert row["steps"] == 3
        assert 0 <= row["data_wait_share"] < 1
        assert row["power_w"] is row["joules_per_step"] is row["sm_clock_mhz"] is None
        assert "kernel_share" not in row
    page = (tmp_path / "t.md").read_text()
    assert "![tokens per second](t.svg)" in page
    assert "| redline: redline train, as the recipe ships | fp32, not compiled |" in page
    assert "- redline-fp8: no figure." in page
    assert "<svg" in (tmp_path / "t.svg").read_text()
    ours, plain, peer = (row["first_loss"] for row in rows.values())
    assert ours == plain, "the same loop on the same data"
    assert peer == pytest.approx(ours, abs=0.15), "the same shape, initialised by another"


def test_plan_accuracy_compares_plan_and_steps(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def steps(resolved: Any, facts: Any, **_: Any) -> dict[str, Any]:
        seen.append(resolved.recipe.model.d_model)
        if len(seen) == 2:
            raise UserError("no room.", where="--probe")
        return MEASURED

    monkeypatch.setattr(plan_accuracy, "ask_trial", steps)
    answer = compare("plan-accuracy", "train.device=cpu", "model.d_model=128", "--json")
    assert answer.code == 0, answer.err
    rows = json.loads(answer.out)["rows"]
    assert len(rows) == len(plan_accuracy.CASES["cpu"])
    assert seen == [128] * len(rows), "overrides hold for every row"
    first = rows[0]
    assert first["memory_gib_error"] == pytest.approx(first["planned"]["memory_gib"] / 2.0 - 1)
    assert rows[1]["error"] == "no room."
    text = compare("plan-accuracy", "quickstart", "model.size=5m", "train.device=cpu").out
    assert text.count("\n") == 1
    assert "GiB (" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_configuration_is_a_recipe(device: str) -> None:
    chosen = plan_accuracy.cases(None, [], device)
    assert len(set(chosen.values())) == len(chosen)
    for case in chosen.values():
        name, *overrides = case.split()
        assert load(name, overrides).recipe
    assert device == "cpu" or len(chosen) >= 12


def test_the_list_for_a_gpu_has_some_of_each_kind() -> None:
    words = " ".join(plan_accuracy.CASES["cuda"].values())
    for kind in ("pretrain-125m", "d_model=2048", "seq_len=512", "seq_len=4096", "precision=fp8", "micro_batch=16"):
        assert kind in words
    for kind in ("grad_checkpointing=selective", "grad_checkpointing=full", "kernels=torch", "kernels=fused"):
        assert kind in words


def test_a_long_list_is_measured_in_two_calls(compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    def steps(resolved: Any, facts: Any, **_: Any) -> dict[str, Any]:
        measured.append(f"{resolved.recipe.model.d_model}x{resolved.recipe.data.seq_len}")
        if len(measured) == 1:
            raise UserError("no room.")
        return MEASURED

    monkeypatch.setattr(plan_accuracy, "ask_trial", steps)
    three = {name: plan_accuracy.CASES["cpu"][name] for name in ("5m", "5m-t512", "2-layers")}
    monkeypatch.setitem(plan_accuracy.CASES, "cpu", three)
    words = ("plan-accuracy", "train.device=cpu", "--out", "plan.json")
    assert compare(*words, "--only", "2-layers,5m").code == 0
    assert measured == ["128x256", "256x256"]
    answer = compare(*words)
    assert "2 rows exist, 2 to measure" in answer.err
    assert measured[2:] == ["256x512", "128x256"], "what is missing, and what failed"
    result = json.loads((tmp_path / "plan.json").read_text())
    assert [row["name"] for row in result["rows"]] == list(plan_accuracy.CASES["cpu"]), "in the list's order"
    assert not any("error" in row or "from" in row for row in result["rows"])
    compare(*words, "--only", "5m")
    assert measured[4:] == ["256x256"], "what is named is measured anew"
    page = (tmp_path / "plan.md").read_text()
    assert page.count("GiB") == 2
    assert "2-layers<br>`quickstart model.layers=2" in page
    assert (tmp_path / "plan.svg").exists()


def test_rows_of_another_commit_are_marked(compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_accuracy, "ask_trial", lambda *_, **__: MEASURED)
    words = ("plan-accuracy", "train.device=cpu", "--out", "plan.json")
    compare(*words, "--only", "5m")
    result = json.loads((tmp_path / "plan.json").read_text())
    result["git"], result["date"] = {"commit": "feed123", "dirty": False}, "2001-02-03"
    (tmp_path / "plan.json").write_text(json.dumps(result))
    compare(*words, "--only", "2-layers")
    rows = {row["name"]: row for row in json.loads((tmp_path / "plan.json").read_text())["rows"]}
    assert rows["5m"]["from"]["git"]["commit"] == "feed123"
    assert "from" not in rows["2-layers"]
    assert "- 5m: measured on 2001-02-03, commit `feed123`." in (tmp_path / "plan.md").read_text()


def test_the_trial_returns_all_fields_of_a_row(compare: Any, recipe: str) -> None:
    answer = compare("plan-accuracy", recipe, "--json")
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)["rows"]
    assert row["name"] == row["case"] == recipe
    assert set(row["measured"]) == set(MEASURED)
    assert row["measured"]["micro"] == row["planned"]["micro"] == 4
    assert row["tokens_per_s_error"] == pytest.approx(
        row["planned"]["tokens_per_s"] / row["measured"]["tokens_per_s"] - 1
    )


def test_a_case_called_fp8_that_runs_in_bf16_has_no_figure(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_accuracy, "ask_trial", lambda *_, **__: pytest.fail("measured all the same"))
    answer = compare("plan-accuracy", "quickstart", "train.device=cpu", "train.precision=fp8")
    assert answer.code == 1
    assert "not in fp8" in answer.out


def test_a_failed_contender_has_its_reason_and_the_others_run(monkeypatch: pytest.MonkeyPatch, compare: Any) -> None:
    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        raise child.ChildError("the package transformers is not installed.")

    figures = {"tokens_per_s": 10.0, "step_ms": 1.0, "micro_batch": 1, "precision": "fp32", "compiled": False}
    monkeypatch.setattr(throughput, "ask", ask)
    monkeypatch.setattr(throughput, "train", lambda *_: None)
    monkeypatch.setattr(throughput, "_measure", lambda *_: figures)
    answer = compare("throughput", "quickstart", "train.device=cpu")
    assert answer.code == 0
    assert "failed: the package transformers is not installed." in answer.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan-accuracy", "a", "b"), "expected one recipe"),
        (("throughput", "--out", "there.json"), "exists already"),
        (("throughput", "--out", "page.json"), "page.md: exists already"),
        (("plan-accuracy", "train.device=cpu", "--out", "there.json"), "not a result of plan-accuracy"),
        (("plan-accuracy", "train.device=cpu", "--out", "page.json"), "page.md: exists already"),
        (("plan-accuracy", "train.device=cpu", "--out", "other.json"), "was measured on NVIDIA H200"),
        (("plan-accuracy", "train.device=cpu", "--only", "5m-t51"), "Did you mean '5m-t512'?"),
        (("plan-accuracy", "quickstart", "--only", "5m"), "a recipe is measured alone"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], message: str, compare: Any, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "page.md").write_text("mine")
    other = {"benchmark": "plan-accuracy", "machine": {"name": "NVIDIA H200"}, "rows": [{"name": "350m"}]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    answer = compare(*words)
    assert answer.code == 2
    assert message in answer.message
    assert (tmp_path / "there.json").read_text() == (tmp_path / "page.md").read_text() == "mine"
    assert json.loads((tmp_path / "other.json").read_text()) == other


def test_the_held_out_configurations_are_apart(compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_accuracy, "ask_trial", lambda *_, **__: MEASURED)
    answer = compare("plan-accuracy", "train.device=cpu", "--held-out", "--out", "held.json", "--json")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert result["benchmark"] == "plan-accuracy-held-out"
    assert [row["name"] for row in result["rows"]] == list(plan_accuracy.HELD_OUT["cpu"])
    assert "nothing was fitted" in (tmp_path / "held.md").read_text()
    mixed = compare("plan-accuracy", "train.device=cpu", "--out", "held.json")
    assert mixed.code == 2, "fitted and held-out configurations are never in one file"
    alone = compare("plan-accuracy", "quickstart", "train.device=cpu", "--held-out")
    assert (alone.code, "--held-out" in alone.message) == (2, True)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_held_out_configuration_was_ever_measured_for_a_fit(device: str) -> None:
    """A measured result of one is a report. Once it is among the results that constants are fitted to, it is not."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    files = [path for path in results.glob("plan-*.json") if "held-out" not in path.name]
    used = {row["case"] for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    held = plan_accuracy.HELD_OUT[device]
    assert not {*held.values()} & (used | {*plan_accuracy.CASES[device].values()})
    assert not held.keys() & plan_accuracy.CASES[device].keys()
    assert len({*held.values()}) == len(held)
    for words in held.values():
        name, *overrides = words.split()
        assert load(name, overrides).recipe
