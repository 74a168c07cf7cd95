"""A log of very many events: the commands that read it stay within limits of time and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LONG = [pytest.mark.soak, pytest.mark.timeout(3600)]


def write_log(run: Path, steps: int) -> None:
    """Write a log as a run does, with some checkpoints, evaluations and torn lines."""
    run.mkdir(parents=True)
    (run / "lock.json").write_text(json.dumps({"recipe": {"objective": "causal_lm"}, "name": "long"}), encoding="utf-8")
    with open(run / "events.jsonl", "w", encoding="utf-8") as file:
        file.write('{"type": "start", "time": 0.0, "schema": 1, "run_id": "a", "run_dir": "runs/long"}\n')
        for step in range(1, steps + 1):
            loss = 3 + 6 * math.exp(-step / (steps / 5)) + 0.01 * math.sin(step)
            event = {
                "type": "step", "time": 0.1 * step, "step": step, "tokens": 4096 * step, "loss": loss, "lr": 3e-4,
                "grad_norm": 1 + math.cos(step) / 3, "tokens_per_s": 40960.0 + step % 100, "mfu": 0.4,
                "mfu_causal": 0.38, "step_ms": 100.0, "data_wait_ms": 0.2, "memory_gib": 61.5,
                "hours": 0.1 * step / 3600, "skipped": 0,
            }  # fmt: skip
            file.write(json.dumps(event) + "\n")
            if step % 1000 == 0:
                file.write(f'{{"type": "eval", "time": {0.1 * step}, "step": {step}, "loss": {loss + 0.1}}}\n')
                file.write('{"type": "step", "time": torn\n')
        file.write(f'{{"type": "stop", "time": {0.1 * steps}, "reason": "steps", "step": {steps}}}\n')


@pytest.mark.parametrize("steps", [10_000, pytest.param(1_000_000, marks=LONG)], ids=["10k", "1M"])
def test_a_long_log_is_reported(measured: Callable[..., Any], tmp_path: Path, say: Any, steps: int) -> None:
    write_log(tmp_path / "runs/long", steps)
    size = (tmp_path / "runs/long/events.jsonl").stat().st_size
    listed = measured("runs", "--json")
    assert listed.code == 0, listed.err
    assert str(steps) in listed.out.replace(",", "")
    report = measured("report", "runs/long", "--out", "report.html")
    assert report.code == 0, report.err
    page = (tmp_path / "report.html").stat().st_size
    say(
        f"load: {steps:,} events ({size / 1e6:,.0f} MB): runs {listed.seconds:.1f} s, {listed.mib:,.0f} MiB;"
        f" report {report.seconds:.1f} s, {report.mib:,.0f} MiB, a page of {page / 1e3:,.0f} kB"
    )
    assert page < 2_000_000, "curves are thinned"
    assert listed.mib < 300
    assert report.mib < 400
