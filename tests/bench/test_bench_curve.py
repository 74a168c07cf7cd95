"""The clock of time to loss counts training and not evaluations."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.time_to_loss import (
    EvaluationPlan,
    curve_of,
    figures,
    fitted_steps,
    median_step_ms,
    seconds_to,
)
from redline.jobs.causal_lm.objective import CausalLM
from redline.runs.events import read_events

SLOW_LOOK, SLOW_STEP = 0.3, 0.03


def test_a_slow_evaluation_takes_no_time(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = CausalLM.evaluate

    def slow(self: CausalLM, micro: int) -> Any:
        time.sleep(SLOW_LOOK)
        return evaluate(self, micro)

    monkeypatch.setattr(CausalLM, "evaluate", slow)
    from redline.training.control import RunDirectory

    words = ("train.steps=7", "eval.every=2", "monitor.log_every=2", "checkpoint.best=false")
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, *words)
        world.around(trainer, before=lambda _: time.sleep(SLOW_STEP))
        trainer.run()
        trainer.monitor.log.close()
    curve = curve_of(list(read_events(tmp_path / "run/events.jsonl")))
    assert [point["step"] for point in curve] == [0, 2, 4, 6, 7], "before, every second, and at the end"
    assert curve[0]["seconds"] == 0
    for first, second in pairwise(curve):
        steps = second["step"] - first["step"]
        assert steps * SLOW_STEP <= second["seconds"] - first["seconds"] < steps * SLOW_STEP + SLOW_LOOK
    assert curve[-1]["tokens"] == 7 * 8 * 32
    assert curve[-1]["loss"] < curve[0]["loss"]


def test_figures_are_those_of_the_last_point() -> None:
    curve = [
        {"step": 0, "tokens": 0, "seconds": 0.0, "loss": 9.0},
        {"step": 10, "tokens": 4000, "seconds": 2.0, "loss": 5.0},
    ]
    result = figures(curve, 1000)
    assert (result["steps"], result["tokens_per_s"], result["step_ms"], result["epochs"]) == (10, 2000, 200, 4)
    assert result["final_loss"] == 5.0


def test_the_step_time_ignores_the_first_window_and_outliers() -> None:
    def step(number: int, ms: float) -> dict[str, Any]:
        return {"type": "step", "step": number, "step_ms": ms}

    windows = [step(4, 90.0), {"type": "eval"}, step(8, 10.0), step(12, 300.0), step(16, 12.0)]
    assert median_step_ms(windows) == 12
    assert median_step_ms([step(1, 90.0)]) == 90
    assert fitted_steps(120, 500) == 240
    assert fitted_steps(0.001, 500) == 1


@given(st.integers(1, 200_000))
def test_evaluations_are_spread_evenly_and_fall_on_logged_steps(steps: int) -> None:
    plan = EvaluationPlan.over(steps)
    assert plan.every % plan.log_every == 0, "an evaluation follows a logged step, which waits for the GPU"
    count = -(-steps // plan.every)
    assert min(steps, 8) <= count <= 18
    assert plan.at(steps)


losses = st.lists(st.floats(0.1, 12.0), min_size=2, max_size=14, unique=True).map(lambda some: sorted(some)[::-1])


@given(losses, st.floats(0.05, 13.0))
def test_passing_is_linear_between_evaluations(falling: list[float], target: float) -> None:
    curve = [{"seconds": 10.0 * n, "loss": loss} for n, loss in enumerate(falling)]
    result = seconds_to(target, curve)
    if target < falling[-1]:
        assert result is None
    else:
        rising = [point["loss"] for point in curve[::-1]]
        assert result == pytest.approx(np.interp(target, rising, [p["seconds"] for p in curve[::-1]]), abs=1e-6)


def test_the_first_crossing_counts_even_if_the_loss_rises_again() -> None:
    curve = [{"seconds": float(n), "loss": loss} for n, loss in enumerate([9.0, None, 5.0, 6.0, 3.0])]
    assert seconds_to(5.5, curve) == 2.0, "what lies before is not known"
    assert seconds_to(4.5, curve) == pytest.approx(3.5)
    assert seconds_to(2.0, curve) is None
