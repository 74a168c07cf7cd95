"""A run has one speed: the report, the live page and the table of a sweep show the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from live_logs import start, step, write_run

from redline.runs.live.watch import Cursor, WatchedRun
from redline.runs.report.compare import sweep_row
from redline.runs.report.page import report_data
from redline.runs.speed import RunSpeed

STOP = {"type": "stop", "time": 1300.0, "reason": "steps", "step": 120, "tokens": 120_000, "hours": 0.1}


def rates_of(run: Path) -> tuple[Any, Any, Any]:
    """Return tokens/s and MFU as the live page, the report and a sweep show them."""
    page, headline = WatchedRun(run, "run").update(Cursor(), 2000.0), report_data(run)["headline"]
    return (
        (page["tokens_per_s"], page["mfu"]),
        (headline["tokens_per_s_median"], headline["mfu_median"]),
        sweep_row(run, {}, 0).tokens_per_s,
    )


def test_report_live_page_and_sweep_show_the_same_speed(tmp_path: Path) -> None:
    changing = [step(n, tokens_per_s=200_000.0 + 1000 * n, mfu=0.3 + n / 1000) for n in range(1, 121)]
    live, report, sweep = rates_of(write_run(tmp_path / "run", [start(), *changing, STOP]))
    assert live == report == (261_000.0, 0.361), "the median of steps 2 to 120"
    assert sweep == live[0]


def test_steps_that_a_resume_repeats_do_not_count(tmp_path: Path) -> None:
    slow = [step(n, tokens_per_s=100.0) for n in range(1, 101)]
    fast = [step(n, tokens_per_s=900.0) for n in range(11, 121)]
    live, report, sweep = rates_of(write_run(tmp_path / "run", [start(), *slow, start(1200.0, 10), *fast, STOP]))
    assert live[0] == report[0] == sweep == 900.0


def test_the_first_step_counts_only_if_it_is_alone() -> None:
    assert RunSpeed([step(1, tokens_per_s=5.0)]).median("tokens_per_s") == 5.0
    assert RunSpeed([step(1, tokens_per_s=5.0), step(2, tokens_per_s=50.0)]).median("tokens_per_s") == 50.0
    assert RunSpeed().median("tokens_per_s") is None


def test_a_long_run_needs_no_more_memory_and_keeps_its_median() -> None:
    speed = RunSpeed(step(n, tokens_per_s=float(n)) for n in range(1, 50_001))
    median = speed.median("tokens_per_s")
    assert median is not None
    assert abs(median - 25_000) < 50
    assert len(speed._kept) <= 4096
