"""The head of the live page: progress, speed, health and cost in sentences, and whether the process is alive."""

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
    """Return a function that gives the page's answer about a run with these events, while a process holds its lock."""
    held = []

    def answer(events: list[dict[str, Any]], now: float = NOW) -> dict[str, Any]:
        run = write_run(tmp_path / f"run-{len(held)}", events)
        handle = open(run / ".lock", "w")  # noqa: SIM115 — held until the test is over
        fcntl.flock(handle, fcntl.LOCK_EX)
        held.append(handle)
        return WatchedRun(run, "run").update(Cursor(), now)

    yield answer
    for handle in held:
        handle.close()


def test_a_healthy_run(running: Any) -> None:
    page = running(GOING)
    answers = page["answers"]
    assert answers["far"] == "50 % done: step 100 of about 200, 1m38s left"
    assert "285k tokens/s: 50.0 % MFU, 95 % of the plan" in answers["fast"]
    assert "81 % of the best known kernels" in answers["fast"]
    assert answers["health"] == "Healthy: last event 2.0s ago"
    assert answers["cost"] == "$1.00 so far, about $1.98 in total: 1m40s of training"
    assert (answers["mood"], page["status"], page["val_loss"]) == ("good", "running", 4.0)
    assert page["plan"]["memory"]["activations"] == 61.2
    assert page["held_lines"] == {"all": 100, "power": 67, "heat": 0}


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (step(101, loss=None), "not finite"),
        (step(101, skipped=2), "2 updates skipped"),
    ],
)
def test_a_bad_step_is_reported(running: Any, last: dict[str, Any], words: str) -> None:
    answers = running([*GOING, last])["answers"]
    assert words in answers["health"]
    assert answers["mood"] == "careful"


def test_slow_data_and_heat_are_reported(running: Any) -> None:
    slow = [step(n, data_wait_ms=100.0, throttle="power_cap+thermal") for n in range(101, 160)]
    health = running([*GOING, *slow], now=1171.0)["answers"]["health"]
    assert "20 % of a step is waiting for data" in health
    assert "heat or the power supply" in health


def test_a_run_that_lacks_cpu_time_is_told_so(running: Any) -> None:
    def health(share: float) -> dict[str, str]:
        answers: dict[str, str] = running([start(), *(step(n, cpu_share=share) for n in range(1, 30))])["answers"]
        return answers

    assert health(0.4)["mood"] == "careful"
    assert "40 %" in health(0.4)["health"]
    assert health(0.95)["mood"] == "good"


def test_a_speed_that_changes_is_reported_beside_that_of_the_run(running: Any) -> None:
    slower = [step(n, tokens_per_s=285_000.0 if n < 80 else 90_000.0) for n in range(1, 101)]
    assert running([start(), *slower])["answers"]["fast"].endswith("; 90k in the last log lines")
    assert "log lines" not in running(GOING)["answers"]["fast"]


def test_a_run_without_events_hangs_if_its_lock_is_held_and_has_crashed_otherwise(running: Any, tmp_path: Path) -> None:
    held = running(GOING, now=NOW + 300)
    assert "No event for 5m02s" in held["answers"]["health"]
    assert held["answers"]["mood"] == "careful"
    gone = WatchedRun(write_run(tmp_path / "gone", GOING), "gone").update(Cursor(), NOW + 300)
    assert gone["status"] == "crashed"
    assert "last event was 5m02s ago" in gone["answers"]["health"]
    assert f"redline train --resume {tmp_path / 'gone'}" in gone["answers"]["health"]
    assert gone["answers"]["mood"] == "bad"
    assert gone["eta_s"] is None, "a crashed run has no remaining time"


def test_compiling_for_minutes_is_healthy(running: Any) -> None:
    page = running(BEGUN, now=1005.0 + 400)
    assert page["answers"]["mood"] == "good"
    assert page["answers"]["far"] == "Not started: warmed up in 4s"
    assert "first logged step" in page["answers"]["fast"]


@pytest.mark.parametrize(
    ("reason", "status", "mood", "far"),
    [
        ("steps", "finished", "over", "Finished: reached the last step · 100 steps · 100k tokens · 1m40s"),
        ("preempted", "preempted", "careful", "Preempted: "),
        ("nonfinite", "failed", "bad", "Failed: "),
    ],
)
def test_the_end_of_a_run_is_described(tmp_path: Path, reason: str, status: str, mood: str, far: str) -> None:
    stop = {"type": "stop", "time": 1111.0, "reason": reason, "step": 100, "tokens": 100_000, "hours": 100 / 3600}
    page = WatchedRun(write_run(tmp_path / "run", [*GOING, stop]), "run").update(Cursor(), NOW)
    assert (page["status"], page["answers"]["mood"]) == (status, mood)
    assert page["answers"]["far"].startswith(far)


def test_a_resumed_run_continues_its_curves(running: Any) -> None:
    page = running([*GOING, start(time=1200.0, resumed_from=60)], now=1201.0)
    assert page["steps"]["x"]["step"][-1] == 60
    assert page["step"] == 60
    assert page["notes"][-1]["message"] == "resumed from the checkpoint of step 60"
    later = running([*GOING, start(time=1200.0, resumed_from=60), step(61, time=1202.0)], now=1203.0)
    assert later["steps"]["x"]["step"][-2:] == [60, 61]
    assert later["answers"]["mood"] == "good"


def test_odd_logs_have_an_answer(running: Any) -> None:
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
    page = running(odd)
    assert page["steps"]["x"]["step"] == [2]


def test_a_snapshot_is_printed_like_the_console(tmp_path: Path) -> None:
    warned = [*GOING, {"type": "warning", "time": 1111.0, "message": "hot\x1b[31m\nGPU"}]
    summary, lines = snapshot(WatchedRun(write_run(tmp_path / "run", warned), "run"), NOW)
    assert summary["step"] == 100
    text = "\n".join(lines)
    assert "speed      285k tokens/s" in text
    assert "79.8 of 139.8 GiB" in text
    assert "warning    hot�[31m GPU" in text
    assert "\x1b" not in text


def test_runs_that_start_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.runs.live.watch._FIND_RUNS_S", -1.0)
    watch = Watch(tmp_path / "runs")
    assert watch.answer([], [])["runs"] == []
    write_run(tmp_path / "runs/a", GOING)
    assert [run["name"] for run in watch.answer([], [])["runs"]] == ["a"]
    outside = write_run(tmp_path / "outside", GOING)
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/events.jsonl").symlink_to(outside / "events.jsonl")
    assert [run["name"] for run in watch.answer([], [])["known"]] == ["a"], "a run with links to outside is refused"
