"""The closing lines of a run, and its cost in the list of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.launch.session import answers_kind
from redline.recipe.load import load
from redline.runs.monitor import price_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (("latentwire-smollm2",), "f1"),
        (("latentwire-smollm2", "data.source=problems:easy"), "f1"),
        (("problems-hdp",), "gsm8k"),
        (("qlora-smollm2",), "gsm8k"),
        (("qlora-smollm2", "data.source=orders.jsonl"), "match"),
    ],
)
def test_answers_are_compared_as_the_job_asks_for(name: tuple[str, ...], kind: str) -> None:
    assert answers_kind(load(name[0], [*name[1:]]).recipe) == kind


def test_the_commands_it_names_are_those_of_the_job(recipe: str, inside: Any) -> None:
    said = inside("train", recipe, "--run", "runs/toy").err.splitlines()
    assert [line for line in said if line.startswith("next")] == [
        "next    redline sample runs/toy",
        "next    redline eval runs/toy@best",
        "next    redline export runs/toy --out toy-model",
    ]


def test_names_with_spaces_can_be_pasted_back(recipe: str, inside: Any) -> None:
    said = inside("train", recipe, "data.val_fraction=0", "--run", "runs/my run").err.splitlines()
    assert [line for line in said if line.startswith("next")] == [
        "next    redline sample 'runs/my run'",
        "next    redline eval 'runs/my run'",
        "next    redline export 'runs/my run' --out 'my run-model'",
    ]


def test_a_diverged_run_is_not_advised_to_resume(recipe: str, inside: Any) -> None:
    words = ("train.lr=1e30", "train.clip=null", "train.max_nonfinite=2", "train.steps=60")
    done = inside("train", recipe, *words, "--run", "runs/toy")
    assert done.code == 1
    assert "--resume" not in done.err
    assert "train.lr; model.init_from=runs/toy" in done.err


def test_keys_changed_on_resume_hold_for_later_resumes(recipe: str, inside: Any, tmp_path: Path) -> None:
    inside("train", recipe, "--run", "runs/toy")
    assert "step 9" in inside("train", "--resume", "toy", "train.steps=9", "monitor.price_per_hour=36").err
    assert "already, at step 9" in inside("train", "--resume", "toy", "eval.every=3").err
    assert "step 12" in inside("train", "--resume", "toy", "train.steps=12").err
    events = [json.loads(line) for line in (tmp_path / "runs/toy/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["type"] == "stop"] == [6, 9, 12]
    assert [e["cost_usd"] is None for e in events if e["type"] == "stop"] == [True, False, False]


def test_hours_keep_the_price_they_were_paid_at(recipe: str, inside: Any, tmp_path: Path) -> None:
    inside("train", recipe, "monitor.price_per_hour=3600000", "--run", "runs/toy")
    inside("train", "--resume", "toy", "train.steps=9", "monitor.price_per_hour=3600")
    events = [json.loads(line) for line in (tmp_path / "runs/toy/events.jsonl").read_text().splitlines()]
    first, second = [e for e in events if e["type"] == "stop"]
    assert first["cost_usd"] == pytest.approx(3.6e6 * first["hours"])
    assert second["cost_usd"] == pytest.approx(first["cost_usd"] + 3600 * (second["hours"] - first["hours"]))


def test_an_unwritable_report_does_not_fail_the_run(recipe: str, inside: Any, tmp_path: Path) -> None:
    (tmp_path / "runs/toy/report.html/in-the-way").mkdir(parents=True)
    done = inside("train", recipe, "--run", "runs/toy")
    assert done.code == 0
    assert "report  not written: The report cannot be written" in done.err
    assert "next    redline eval runs/toy@best" in done.err


def run_that_cost(folder: Path, cost: float | None) -> None:
    folder.mkdir(parents=True)
    (folder / "lock.json").write_text("{}")
    step = {"type": "step", "time": 1.0, "step": 9, "loss": 2.0, "hours": 0.1, "cost_usd": cost}
    (folder / "events.jsonl").write_text(json.dumps(step) + "\n")


def cost_column(table: str) -> dict[str, str]:
    heads, *rows = [line.split() for line in table.splitlines()]
    return {row[0]: row[heads.index("cost")] for row in rows}


@pytest.mark.parametrize("name", ["x[red]y", "a-name-that-is-longer-than-a-narrow-terminal", "two\nlines"])
def test_the_list_shows_the_full_name_of_a_run(name: str, inside: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run_that_cost(tmp_path / "runs" / name, 2.0)
    monkeypatch.setenv("COLUMNS", "40")
    heads, row = inside("runs").out.splitlines()
    assert row.startswith(" ".join(name.split()))
    assert heads.split() == ["run", "status", "step", "loss", "time", "cost", "disk"]
    assert "$2.00" in row


def test_json_output_contains_no_nan(inside: Any, tmp_path: Path) -> None:
    run_that_cost(tmp_path / "runs/odd", 2.0)
    (tmp_path / "runs/odd/lock.json").write_text('{"recipe": {"train": {"lr": NaN, "betas": [0.9, Infinity]}}}')

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(inside("report", "odd", "--json").out, parse_constant=refuse)


def test_a_run_without_a_price_has_no_cost(tmp_path: Path, inside: Any) -> None:
    run_that_cost(tmp_path / "runs/unknown", None)
    run_that_cost(tmp_path / "runs/nothing", 0.0)
    assert "cost" not in inside("runs").out
    run_that_cost(tmp_path / "runs/little", 0.001)
    run_that_cost(tmp_path / "runs/much", 12.5)
    shown = cost_column(inside("runs").out.replace(" KiB", "KiB").replace(" B", "B"))
    assert shown == {"unknown": "–", "nothing": "–", "little": "<$0.01", "much": "$12.50"}


@pytest.mark.parametrize(("text", "price"), [("2.5", 2.5), ("0", None), ("-1", None), ("nan", None), ("free", None)])
def test_a_price_must_be_positive(text: str, price: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_PRICE", text)
    assert price_of(None) == price
    assert price_of(3.0) == 3.0


def test_a_finished_run_is_reported_and_unchanged(recipe: str, inside: Any, tmp_path: Path) -> None:
    inside("train", recipe, "--run", "runs/toy")
    log = tmp_path / "runs/toy/events.jsonl"
    before = log.read_bytes()
    again = inside("train", "--resume", "toy")
    assert (again.code, log.read_bytes()) == (0, before)
    more = "next    redline train --resume runs/toy train.steps=…"
    said = ["finished   already, at step 6 (steps): nothing to do", more]
    assert again.err.splitlines() == said


def test_a_finished_run_with_a_damaged_last_checkpoint_resumes_from_the_one_before(
    recipe: str, inside: Any, tmp_path: Path
) -> None:
    inside("train", recipe, "checkpoint.every=2", "checkpoint.best=false", "--run", "runs/toy")
    (weights,) = (tmp_path / "runs/toy/checkpoints/step-00000006").glob("model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    again = inside("train", "--resume", "toy")
    assert again.code == 0
    assert "step-00000006 is damaged" in again.err
    assert "already" not in again.err
    assert "already" in inside("train", "--resume", "toy").err


def test_a_finished_run_without_a_new_limit_is_unchanged(recipe: str, inside: Any, tmp_path: Path) -> None:
    """The changed key does not set a later end."""
    inside("train", recipe, "--run", "runs/toy")
    log = tmp_path / "runs/toy/events.jsonl"
    before = log.read_bytes()
    for word in ("train.tokens=1k", "train.steps=3"):
        again = inside("train", "--resume", "toy", word)
        assert "finished   already, at step 6 (steps)" in again.err
        assert (again.code, log.read_bytes()) == (0, before)
    assert "already" not in inside("train", "--resume", "toy", "train.steps=7").err
    assert log.read_bytes() != before


def test_only_a_run_on_python_code_suggests_a_python_prompt(recipe: str, inside: Any) -> None:
    shown = inside("train", recipe, "data.source=embedded", "data.tokenizer=bytes", "--run", "runs/toy").err
    assert "next    redline sample runs/toy --prompt 'import '\n" in shown


@pytest.mark.parametrize("words", [("plan",), ("train", "--dry-run")])
def test_an_invalid_price_is_reported(words: Any, recipe: str, inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_PRICE", "abc")
    done = inside(*words, recipe)
    assert "REDLINE_PRICE='abc' is not a number, so no cost is shown" in done.out + done.err
    assert "REDLINE_PRICE" not in (given := inside(*words, recipe, "monitor.price_per_hour=2")).out + given.err
