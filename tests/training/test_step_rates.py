"""Rates with a clock that the test sets: exact to the last bit."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redline.hardware.machine import Machine
from redline.jobs.base import DecoderCosts
from redline.jobs.causal_lm.objective import CausalLM
from redline.jobs.latent_prefix.objective import LatentPrefix
from redline.planning.flops import FlopsPerToken
from redline.runs.events import read_events
from redline.training.step import Throughput

FLOPS = FlopsPerToken(useful=2.404e9, executed=2.253e9)
PEAK = 989e12


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_mfu_is_rate_times_flops_over_peak(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    for _ in range(7):
        clock.now += 0.5
        rates.add(131_072)
    got = rates.read()
    assert got is not None
    assert got.tokens_per_s == 7 * 131_072 / 3.5
    assert got.mfu == 7 * 131_072 / 3.5 * 2.404e9 / 989e12
    assert got.mfu_causal == 7 * 131_072 / 3.5 * 2.253e9 / 989e12
    assert got.step_ms == 500.0


def test_cpu_time_is_a_share_of_what_the_threads_could_use(clock: Clock) -> None:
    cpu = Clock()
    rates = Throughput(FLOPS, None, clock, threads=2, cpu_clock=cpu)
    clock.now, cpu.now = clock.now + 10.0, cpu.now + 8.0
    with rates.paused():  # an evaluation
        clock.now, cpu.now = clock.now + 50.0, cpu.now + 100.0
    rates.add(1024)
    got = rates.read()
    assert got is not None
    assert got.fields()["cpu_share"] == got.cpu_share == 0.4
    clock.now, cpu.now = clock.now + 1.0, cpu.now + 5.0  # threads that write a checkpoint count too
    rates.add(1024)
    assert (again := rates.read()) is not None
    assert again.cpu_share == 1.0


def test_a_gpu_run_logs_no_cpu_time(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    clock.now += 1.0
    rates.add(1024)
    assert (got := rates.read()) is not None
    assert "cpu_share" not in got.fields()


def test_pauses_are_not_training_time(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    clock.now += 2.0
    rates.add(1024)
    with rates.paused():
        clock.now += 100.0
    with contextlib.suppress(RuntimeError), rates.paused():
        clock.now += 50.0
        raise RuntimeError("an evaluation that fails is a pause too")
    clock.now += 2.0
    rates.add(1024)
    got = rates.read()
    assert got is not None
    assert got.tokens_per_s == 512.0
    assert got.step_ms == 2000.0


def test_waiting_for_data_is_averaged_over_the_steps(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    for wait in (0.25, 0.0, 0.5, 0.25):
        clock.now += 1.0
        rates.add(64, wait)
    got = rates.read()
    assert got is not None
    assert got.data_wait_ms == 250.0
    assert got.tokens_per_s == 64.0, "waiting counts as time: the rate is what came out"


def test_each_reading_starts_from_zero(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    clock.now += 1.0
    rates.add(100, 0.5)
    assert rates.read() is not None
    clock.now += 4.0
    rates.add(100)
    got = rates.read()
    assert got is not None
    assert (got.tokens_per_s, got.data_wait_ms) == (25.0, 0.0)


def test_time_before_begin_does_not_count(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    clock.now += 60.0  # compiling
    rates.begin()
    clock.now += 1.0
    rates.add(100)
    got = rates.read()
    assert got is not None
    assert got.tokens_per_s == 100.0


def test_without_steps_or_time_there_is_no_rate(clock: Clock) -> None:
    rates = Throughput(FLOPS, PEAK, clock)
    assert rates.read() is None
    clock.now += 5.0
    assert rates.read() is None, "no step"
    rates.begin()
    rates.add(100)
    assert rates.read() is None, "no time"


def test_an_unknown_peak_gives_no_mfu(clock: Clock) -> None:
    rates = Throughput(FLOPS, None, clock)
    clock.now += 1.0
    rates.add(100)
    got = rates.read()
    assert got is not None
    assert got.tokens_per_s == 100.0
    assert got.mfu is None
    assert got.mfu_causal is None


@pytest.mark.parametrize("assumed", ["", "every row is as long as it may be"])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_of_unknown_length_give_no_mfu(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, assumed: str
) -> None:
    """The FLOPs of rows of full length would be more than were computed; those of the data's own rows are known."""
    monkeypatch.setattr(Machine, "peak", lambda *_: 1e15)
    monkeypatch.setattr(CausalLM, "whole_rows", whole)
    monkeypatch.setattr(DecoderCosts, "flops", lambda *_: replace(FLOPS, assumed=assumed))
    world.run(tmp_path / "run", "train.steps=2")
    steps = [event for event in read_events(tmp_path / "run/events.jsonl") if event["type"] == "step"]
    assert [event["mfu"] is not None for event in steps] == [whole or not assumed] * len(steps)
    assert steps
    assert not LatentPrefix.whole_rows
