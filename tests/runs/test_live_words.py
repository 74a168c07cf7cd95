"""The headline: true, in words, and never wrong about who is alive."""

from __future__ import annotations

import fcntl
import math
from pathlib import Path
from typing import Any

import pytest
from live_logs import PLAN, evaluation, start, step, write_run

from redline.runs.live.watch import Cursor, Watch, WatchedRun, snapshot

NOW = 1112.0
BEGUN = [start(), PLAN, {"type": "warmup", "time": 1005.0, "message": "warmed up in 4s"}]
GOING = [*BEGUN, *(step(n) for n in range(1, 101)), evaluation(100)]


@pytest.fixture
def running(tmp_path: Path) -> Any:
    """The answers about a run with these events, while a process holds it."""
    held = []

    def ask(events: list[dict[str, Any]], now: float = NOW) -> dict[str, Any]:
        run = write_run(tmp_path / f"run-{len(held)}", events)
        handle = open(run / ".lock", "w")  # noqa: SIM115 — held until the test is over
        fcntl.flock(handle, fcntl.LOCK_EX)
        held.append(handle)
        return WatchedRun(run, "run").update(Cursor(), now)

    yield ask
    for handle in held:
        handle.close()


def test_a_run_that_goes_well(running: Any) -> None:
    told = running(GOING)
    answers = told["answers"]
    assert answers["far"] == "50 % done: step 100 of about 200, 1m38s left"
    assert "285k tokens/s: 50.0 % MFU, 95 % of the plan" in answers["fast"]
    assert "81 % of the best known kernels" in answers["fast"]
    assert answers["health"] == "Healthy: last event 2.0s ago"
    assert answers["cost"] == "$1.00 so far, about $1.98 in total: 1m40s of training"
    assert (answers["mood"], told["status"], told["val_loss"]) == ("good", "running", 4.0)
    assert told["plan"]["memory"]["activations"] == 61.2
    assert told["held_lines"] == {"all": 100, "power": 67, "heat": 0}


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (step(101, loss=None), "not finite"),
        (step(101, skipped=2), "2 updates skipped"),
    ],
)
def test_what_is_not_well_is_said(running: Any, last: dict[str, Any], says: str) -> None:
    answers = running([*GOING, last])["answers"]
    assert says in answers["health"]
    assert answers["mood"] == "careful"


def test_a_slow_loader_and_heat_are_said(running: Any) -> None:
    slow = [step(n, data_wait_ms=100.0, throttle="power_cap+thermal") for n in range(101, 160)]
    health = running([*GOING, *slow], now=1171.0)["answers"]["health"]
    assert "20 % of a step is waiting for data" in health
    assert "heat or the power supply" in health


def test_silence_is_judged_by_who_holds_the_run(running: Any, tmp_path: Path) -> None:
    held = running(GOING, now=NOW + 300)
    assert "No event for 5m02s" in held["answers"]["health"]
    assert held["answers"]["mood"] == "careful"
    gone = WatchedRun(write_run(tmp_path / "gone", GOING), "gone").update(Cursor(), NOW + 300)
    assert gone["status"] == "crashed"
    assert "last event was 5m02s ago" in gone["answers"]["health"]
    assert f"redline train --resume {tmp_path / 'gone'}" in gone["answers"]["health"]
    assert gone["answers"]["mood"] == "bad"
    assert gone["eta_s"] is None, "who is gone promises nothing"


def test_compiling_may_take_minutes(running: Any) -> None:
    told = running(BEGUN, now=1005.0 + 400)
    assert told["answers"]["mood"] == "good"
    assert told["answers"]["far"] == "Not started: warmed up in 4s"
    assert "first logged step" in told["answers"]["fast"]


@pytest.mark.parametrize(
    ("reason", "status", "mood", "far"),
    [
        ("steps", "finished", "over", "Finished: reached the last step · 100 steps · 100k tokens · 1m40s"),
        ("preempted", "preempted", "careful", "Preempted: "),
        ("nonfinite", "failed", "bad", "Failed: "),
    ],
)
def test_how_it_ended(tmp_path: Path, reason: str, status: str, mood: str, far: str) -> None:
    stop = {"type": "stop", "time": 1111.0, "reason": reason, "step": 100, "tokens": 100_000, "hours": 100 / 3600}
    told = WatchedRun(write_run(tmp_path / "run", [*GOING, stop]), "run").update(Cursor(), NOW)
    assert (told["status"], told["answers"]["mood"]) == (status, mood)
    assert told["answers"]["far"].startswith(far)


def test_a_resumed_run_goes_on(running: Any) -> None:
    told = running([*GOING, start(time=1200.0, resumed_from=60)], now=1201.0)
    assert told["steps"]["x"]["step"][-1] == 60
    assert told["step"] == 60
    assert told["notes"][-1]["message"] == "resumed from the checkpoint of step 60"
    later = running([*GOING, start(time=1200.0, resumed_from=60), step(61, time=1202.0)], now=1203.0)
    assert later["steps"]["x"]["step"][-2:] == [60, 61]
    assert later["answers"]["mood"] == "good"


def test_odd_logs_are_answered(running: Any) -> None:
    odd = [
        {"type": "step"},
        {"type": "step", "step": "7", "loss": []},
        {"type": "plan", "memory_gib": 5, "horizon": None, "warnings": "x"},
        {"type": "eval", "step": 10**400, "loss": 1e308},
        {"type": "stop", "reason": None},
        {"type": "start", "resumed_from": {}},
        {"type": "step", "step": 3, "loss": 10**400, "tokens_per_s": 0, "hours": 0, "cost_usd": 0, "eta_s": 1},
        {"type": "step", "step": 2, "time": math.pi, "step_ms": 0, "data_wait_ms": 1},
        {"type": "step", "step": 2},
    ]
    told = running(odd)
    assert told["steps"]["x"]["step"] == [2]


def test_a_snapshot_reads_like_the_console(tmp_path: Path) -> None:
    warned = [*GOING, {"type": "warning", "time": 1111.0, "message": "hot\x1b[31m\nGPU"}]
    summary, lines = snapshot(WatchedRun(write_run(tmp_path / "run", warned), "run"), NOW)
    assert summary["step"] == 100
    text = "\n".join(lines)
    assert "speed      285k tokens/s" in text
    assert "79.8 of 139.8 GiB" in text
    assert "warning    hot�[31m GPU" in text
    assert "\x1b" not in text


def test_runs_that_begin_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.runs.live.watch._FIND_RUNS_S", -1.0)
    watch = Watch(tmp_path / "runs")
    assert watch.answer([], [])["runs"] == []
    write_run(tmp_path / "runs/a", GOING)
    assert [run["name"] for run in watch.answer([], [])["runs"]] == ["a"]
    outside = write_run(tmp_path / "outside", GOING)
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/events.jsonl").symlink_to(outside / "events.jsonl")
    assert [run["name"] for run in watch.answer([], [])["known"]] == ["a"], "a run with links to outside is none"
