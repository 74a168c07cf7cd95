"""`eval.patience` from the command line: what a resume may change, and the messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redline.runs.events import Event, read_events

# At this learning rate no weight changes in float32: no evaluation is better than the one before the first step.
STUCK = ("train.optimizer=adamw", "train.lr=1e-30", "train.steps=20", "eval.every=1", "eval.samples=0")


def stops(run: Path) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["type"] == "stop"]


def test_a_resume_may_change_it(inside: Any, recipe: str, tmp_path: Path) -> None:
    stuck = [*STUCK, "train.steps=4", "eval.patience=2"]
    assert inside("train", recipe, *stuck, "--run", "runs/one").code == 0
    log = tmp_path / "runs/one"
    again = inside("train", "--resume", "one")
    assert (again.code, len(stops(log))) == (0, 1), "it has reached its end, and stays as it is"
    assert "eval.patience=" in again.err, "the key that would let it go on"
    still = inside("train", "--resume", "one", "train.steps=9")
    assert (still.code, len(stops(log))) == (0, 1), "more steps do not help while its patience is used up"
    assert inside("train", "--resume", "one", "eval.patience=3").code == 0
    assert (stops(log)[-1]["reason"], stops(log)[-1]["step"]) == ("patience", 3)
    assert inside("train", "--resume", "one", "eval.patience=null").code == 0
    assert (stops(log)[-1]["reason"], stops(log)[-1]["step"]) == ("steps", 4)
    assert json.loads(inside("report", "one", "--json").out)["status"] == "finished"


def test_other_validation_windows_start_the_count_again(inside: Any, recipe: str, tmp_path: Path) -> None:
    assert inside("train", recipe, *STUCK, "eval.patience=2", "eval.sequences=1", "--run", "runs/one").code == 0
    assert inside("train", "--resume", "one", "eval.sequences=2").code == 0
    stop = stops(tmp_path / "runs/one")[-1]
    assert (stop["reason"], stop["step"]) == ("patience", 5), "the first evaluation of the new windows is the best"


def test_no_held_out_data_is_warned_of(inside: Any, recipe: str) -> None:
    said = inside("train", recipe, "eval.patience=2", "data.val_fraction=0", "train.steps=1", "--dry-run").message
    assert "eval.patience" in said
