"""A run that goes on: its words, its clock, and what a checkpoint of it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redline.monitor.events import read_events


def test_a_resume_may_spell_a_key_in_another_way_than_the_one_before(inside: Any, world: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "runs/one")
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=1"]
    assert inside("train", *words, "--run", run).code == 0
    assert inside("train", "--resume", run, "train.steps=2", "train.hours=1h").code == 0
    assert inside("train", "--resume", run, "train.steps=3", "max_hours=2h").code == 0
    assert inside("train", "--resume", run, "--dry-run").code == 0


def test_the_clock_never_goes_back(inside: Any, world: Any, tmp_path: Path) -> None:
    """Texts are written after the last save, and count."""
    run = tmp_path / "runs/one"
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=2", "eval.every=2"]
    assert inside("train", *words, "eval.samples=30", "eval.sample_tokens=60", "--run", str(run)).code == 0
    assert inside("train", "--resume", str(run), "train.steps=3", "eval.samples=0").code == 0
    stops = [event["hours"] for event in read_events(run / "events.jsonl") if event["type"] == "stop"]
    assert stops == sorted(stops)


def test_a_step_of_a_run_is_refused_where_the_run_is_meant(inside: Any, world: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "runs/one")
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=1"]
    assert inside("train", *words, "--run", run).code == 0
    for command in (["report"], ["watch", "--once"], ["stop"]):
        refused = inside(*command, f"{run}@best")
        assert refused.code == 2
        assert "Leave out @best" in refused.said
