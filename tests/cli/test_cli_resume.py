"""Resumed runs: recipe keys, the clock, and arguments that are checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redline.runs.events import read_events


def test_resumes_may_use_different_aliases_of_a_key(inside: Any, world: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "runs/one")
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=1"]
    assert inside("train", *words, "--run", run).code == 0
    assert inside("train", "--resume", run, "train.steps=2", "train.hours=1h").code == 0
    assert inside("train", "--resume", run, "train.steps=3", "max_hours=2h").code == 0
    assert inside("train", "--resume", run, "--dry-run").code == 0


def test_hours_never_decrease_over_resumes(inside: Any, world: Any, tmp_path: Path) -> None:
    """The time of generating samples after the last save counts."""
    run = tmp_path / "runs/one"
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=2", "eval.every=2"]
    assert inside("train", *words, "eval.samples=30", "eval.sample_tokens=60", "--run", str(run)).code == 0
    assert inside("train", "--resume", str(run), "train.steps=3", "eval.samples=0").code == 0
    stops = [event["hours"] for event in read_events(run / "events.jsonl") if event["type"] == "stop"]
    assert stops == sorted(stops)


def test_commands_that_take_a_run_refuse_a_checkpoint(inside: Any, world: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "runs/one")
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=1"]
    assert inside("train", *words, "--run", run).code == 0
    for command in (["report"], ["watch", "--once"], ["stop"]):
        refused = inside(*command, f"{run}@best")
        assert refused.code == 2
        assert "Leave out @best" in refused.message


def test_the_best_loss_is_reset_if_the_validation_windows_change(inside: Any, recipe: str, tmp_path: Path) -> None:
    """A resume may change the number of evaluated sequences; the lowest loss before is then of other text."""
    assert inside("train", recipe, "--run", "runs/one", "eval.sequences=1").code == 0
    state = tmp_path / "runs/one/checkpoints/step-00000006/state.json"
    lowest = json.loads(state.read_text())["best"]["loss"]
    more = inside(
        "train", "--resume", "one", "train.steps=7", "eval.sequences=8", f"train.target_loss={lowest + 0.001}"
    )
    assert "eval.sequences was 1" in more.err
    evals = {e["step"]: e["loss"] for e in read_events(tmp_path / "runs/one/events.jsonl") if e["type"] == "eval"}
    assert evals[7] > lowest + 0.001, "else this shows nothing"
    assert "finished: " in more.err
    state = tmp_path / "runs/one/checkpoints/step-00000007/state.json"
    assert json.loads(state.read_text())["best"] == {"step": 7, "loss": evals[7]}
    report = json.loads(inside("report", "one", "--json").out)
    assert report["headline"]["best_val_loss"] == evals[7]
    assert inside("train", recipe, "--run", "runs/two", "eval.sequences=1").code == 0
    verdict = json.loads(inside("report", "one", "two", "--json").out)["verdict"]
    assert any("eval.sequences" in sentence for sentence in verdict)


def test_dropped_rows_are_reported(inside: Any, recipe: str, tmp_path: Path) -> None:
    rows = [{"text": f"the {n}th of many rows, which are all alike in all but this"} for n in range(200)]
    rows[1:60:2] = [{"words": "under another key"}] * 30
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "30 of 200 rows are left out; the first is odd.jsonl:2"
    assert told in inside("train", recipe, "data.source=odd.jsonl", "--run", "runs/one").err
    assert told in inside("train", recipe, "data.source=odd.jsonl", "--dry-run").err
    scored = inside("eval", "one", "--data", "odd.jsonl", "--json")
    assert any(told in note for note in json.loads(scored.out)["notes"])
