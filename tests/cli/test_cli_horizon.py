"""What a run says about its length: when it resumes, and when its time budget ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.runs.events import read_events


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(tmp_path / "runs/toy/events.jsonl") if event["type"] == kind]


def test_a_resumed_run_says_what_remains(recipe: str, inside: Any, tmp_path: Path) -> None:
    words = ("eval.samples=0", "--run", "runs/toy")
    assert inside("train", recipe, "train.epochs=2", "train.steps=4", *words).code == 0
    first = events(tmp_path, "plan")[0]
    assert "remaining" not in first["horizon"]
    shown = inside("train", "--resume", "toy", "train.steps=10", "--dry-run")
    done = inside("train", "--resume", "toy", "train.steps=10")
    assert done.code == 0
    last = events(tmp_path, "plan")[-1]["horizon"]
    assert last["steps"] == 10, "the resume's steps replace the epochs"
    step = first["batch"]["tokens_per_step"]
    assert last["remaining"]["steps"] == 6
    assert last["remaining"]["tokens"] == 6 * step
    assert last["remaining"]["epochs"] == pytest.approx(0.6 * last["epochs"], rel=1e-3)
    assert last["remaining"]["seconds"] > 0
    for text in (shown.err, done.err):
        (line,) = [line for line in text.splitlines() if line.strip().startswith("remaining")]
        assert "6 of 10 steps" in line
    assert events(tmp_path, "start")[-1]["stops"] == {"steps": 10, "tokens": None, "epochs": None}
    again = inside("train", "--resume", "toy", "eval.every=3")
    assert "already, at step 10 (steps)" in again.err, "what a resume replaced stays replaced"


def test_a_run_ended_by_its_time_budget_says_so(recipe: str, inside: Any, tmp_path: Path) -> None:
    words = ("train.steps=1000000000", "train.hours=0.2s", "eval.every=1000000", "eval.samples=0")
    done = inside("train", recipe, *words, "--run", "runs/toy")
    assert done.code == 0
    (stop,) = events(tmp_path, "stop")
    assert stop["reason"] == "hours"
    assert "train.hours" in stop["message"]
    assert f"{stop['step']:,} of 1,000,000,000" in stop["message"]
    assert stop["message"] in done.err
    assert json.loads(inside("runs", "--json").out)[0]["status"] == "finished"
