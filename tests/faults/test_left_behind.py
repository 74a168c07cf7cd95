"""Files that a killed process leaves behind, and how the next process handles them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from redline.runs.events import EventLog, read_events
from redline.runs.summary import run_status
from redline.training.checkpoint import transaction
from redline.training.control import RunDirectory, preemption_signals


def test_a_run_that_was_moved_away_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), transaction(tmp_path / "gone" / "checkpoints", 1):
        pass
    assert not (tmp_path / "gone").exists()


def test_a_run_moved_while_it_trains_warns_of_unsaved_steps(world: Any, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with RunDirectory(run) as directory:
        trainer = world.trainer(directory, "train.steps=4", "checkpoint.every=2")
        world.around(trainer, before=lambda n: n == 2 and run.rename(moved))
        outcome = trainer.run()
        trainer.monitor.log.close()
    assert not outcome.saved
    assert outcome.exit_code == 1
    assert not run.exists()
    events = read_events(moved / "events.jsonl")
    assert run_status(moved, events) == "failed"
    assert any("could not be written" in event["message"] for event in events if event["type"] == "warning")


def test_nohup_is_respected() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in preemption_signals()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in preemption_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_evaluations_that_a_resume_repeats_appear_once(tmp_path: Path) -> None:
    """A run is killed before its first checkpoint and restarted at step 0; another is resumed after its end."""
    log = EventLog(tmp_path / "events.jsonl")
    look = [("eval", {"step": 0, "loss": 9.0}), *[("sample", {"step": 0, "label": "before", "text": "x"})] * 2]
    last = [("eval", {"step": 4, "loss": 5.0}), ("sample", {"step": 4, "label": "after", "text": "y"})]
    for resumed, some in ((None, look), (0, [*look, *last]), (4, last)):
        log.emit("start", resumed_from=resumed)
        for kind, fields in some:
            log.emit(kind, **fields)
    log.close()
    events = read_events(tmp_path / "events.jsonl")
    assert [event["step"] for event in events if event["type"] == "eval"] == [0, 4]
    assert [event["step"] for event in events if event["type"] == "sample"] == [0, 0, 4]
