"""One run from training to its report and resume, from the command line."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kinds(run: Path) -> list[str]:
    return [event["type"] for event in read_events(run / "events.jsonl")]


def test_what_training_leaves(home: Path) -> None:
    run = home / "runs/latest"
    assert (run / "report.html").stat().st_size > 10_000
    assert [p.name for p in sorted((run / "checkpoints").iterdir())][-1] == "step-00000006"
    lock = json.loads((run / "lock.json").read_text())
    assert lock["recipe_name"] == "toy"
    (plan,) = (event for event in read_events(run / "events.jsonl") if event["type"] == "plan")
    assert lock["choices"] == plan["choices"]
    assert "model.attention" in {choice["key"] for choice in lock["choices"]}  # found while the model was built
    assert {"start", "plan", "step", "eval", "sample", "checkpoint"} <= set(kinds(run))
    assert kinds(run)[-1] == "stop"


def test_runs(home: Path, inside: Any) -> None:
    (row,) = json.loads(inside("runs", "--json", cwd=home).out)
    assert (row["status"], row["step"], row["tokens"]) == ("finished", 6, 6 * 8 * 32)
    assert math.isfinite(row["loss"])
    assert row["name"].startswith("toy-")
    assert row["disk_bytes"] > 100_000
    table = inside("runs", cwd=home).out
    assert "finished" in table


def test_no_runs(inside: Any) -> None:
    assert json.loads(inside("runs", "--json").out) == []
    assert "redline train" in inside("runs").out


def test_evaluating(home: Path, redline: Any, inside: Any) -> None:
    answer = redline("eval", "latest", "--json", cwd=home)
    assert answer.code == 0, answer.err
    metrics = json.loads(answer.out)
    assert metrics["step"] == 6
    assert metrics["weights"] == "raw"
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert 0 < metrics["bits_per_byte"] < 20
    earlier = json.loads(inside("eval", "latest@3", "--json", cwd=home).out)
    assert earlier["step"] == 3
    assert earlier["loss"] > metrics["loss"], "it learnt something in between"
    assert "perplexity" in inside("eval", "latest@best", "--sequences", "2", cwd=home).out


def test_sampling(home: Path, inside: Any, redline: Any) -> None:
    words = ("sample", "latest", "--prompt", "red ", "--tokens", "5", "--count", "2", "--seed", "7", "--json")
    first = json.loads(inside(*words, cwd=home).out)
    assert [sample["prompt"] for sample in first["samples"]] == ["red ", "red "]
    assert all(0 < len(sample["text"]) <= 20 for sample in first["samples"])
    assert json.loads(redline(*words, cwd=home).out) == first, "the same seed writes the same in another process"


def test_reporting(home: Path, inside: Any, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert inside("report", "latest", "--out", str(out), cwd=home).code == 0
    assert "<html" in out.read_text()
    assert json.loads(inside("report", "latest", "--json", cwd=home).out)


def test_a_dry_run_leaves_nothing(recipe: str, inside: Any, tmp_path: Path) -> None:
    answer = inside("train", recipe, "--dry-run")
    assert answer.code == 0
    assert "train.lr" in answer.err + answer.out
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_a_run_is_refused_untouched(home: Path, recipe: str, redline: Any) -> None:
    before = digests(home)
    answer = redline("train", recipe, "--run", "runs/latest", cwd=home)
    assert answer.code == 2
    assert "holds a run" in answer.message
    assert "--resume" in answer.message
    assert digests(home) == before


def test_resuming(recipe: str, inside: Any, redline: Any, tmp_path: Path) -> None:
    begun = inside("train", recipe, "train.steps=2", "train.micro_batch_size=2")
    assert begun.code == 0
    assert "train.micro_batch_size is an alias of train.micro_batch" in begun.err
    answer = redline("train", "--resume", "latest", "train.steps=4", cwd=tmp_path)
    assert answer.code == 0, answer.err
    events = read_events(tmp_path / "runs/latest/events.jsonl")
    starts = [event for event in events if event["type"] == "start"]
    assert [start["resumed_from"] for start in starts] == [None, 2]
    assert starts[0]["run_id"] == starts[1]["run_id"]
    assert starts[1]["overrides"] == ["train.steps=4"]
    assert [event["step"] for event in events if event["type"] == "step"] == [1, 2, 3, 4]
    stops = [event for event in events if event["type"] == "stop"]
    assert [(stop["reason"], stop["step"]) for stop in stops] == [("steps", 2), ("steps", 4)]


def wait_for_steps(run: Path, process: subprocess.Popen[str], count: int = 3) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if kinds(run).count("step") >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no steps: {process.communicate()[1] if process.poll() is not None else 'too slow'}")


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGINT, EXIT_INTERRUPTED, "interrupted"), (signal.SIGTERM, EXIT_PREEMPTED, "preempted")],
)
def test_signals(
    start: Callable[..., subprocess.Popen[str]], recipe: str, tmp_path: Path, number: int, code: int, reason: str
) -> None:
    process = start("train", recipe, "train.steps=1M", "--run", "run", cwd=tmp_path)
    run = tmp_path / "run"
    wait_for_steps(run, process)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert "redline train --resume run" in error
    stop = read_events(run / "events.jsonl")[-1]
    assert (stop["type"], stop["reason"]) == ("stop", reason)
    checkpoint = newest_valid(run / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == f"step-{stop['step']:08d}"


def test_stopping_from_another_process(
    start: Callable[..., subprocess.Popen[str]], recipe: str, tmp_path: Path, inside: Any
) -> None:
    process = start("train", recipe, "train.steps=1M", "--run", "runs/mine", cwd=tmp_path)
    wait_for_steps(tmp_path / "runs/mine", process)
    assert json.loads(inside("runs", "--json").out)[0]["status"] == "running"
    answer = inside("stop", "latest")
    assert answer.code == 0
    assert "redline train --resume runs/mine" in answer.out
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert read_events(tmp_path / "runs/mine/events.jsonl")[-1]["reason"] == "requested"
    assert json.loads(inside("runs", "--json").out)[0]["status"] == "stopped"
    assert inside("stop", "latest").code == 1


def test_finished_members_are_not_repeated(recipe: str, inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped while it writes its report has nothing left to resume."""
    from redline.launch import session

    monkeypatch.setattr(session, "print_next_steps", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert inside("train", recipe, "train.steps=1").code == 0
