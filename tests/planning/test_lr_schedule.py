"""Learning-rate schedules and the horizon."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.planning.schedule import (
    SCHEDULES,
    cycled_momentum,
    horizon_steps,
    lr_factor,
    sqrt_scaled_lr,
)
from redline.training.schedule import Horizon

STEPS, WARMUP = 1000, 100
FLOOR = dict.fromkeys(SCHEDULES, 0.1) | {"constant": 1.0, "one_cycle": 1 / 25 / 1e4}  # with min_lr_ratio=0.1


def curve(schedule: str, floor: float = 0.1, warmup: int = WARMUP, decay_fraction: float = 0.4) -> list[float]:
    return [
        lr_factor(schedule, step=s, warmup=warmup, progress=s / STEPS, floor=floor, decay_fraction=decay_fraction)
        for s in range(STEPS + 1)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_warms_up_peaks_and_ends_at_the_floor(schedule: str) -> None:
    factors = curve(schedule)
    assert factors[0] < 0.05, "the first step is small, and not zero"
    assert factors[0] > 0
    assert factors[:WARMUP] == sorted(factors[:WARMUP]), "the warm-up rises"
    assert factors[WARMUP - 1] == pytest.approx(1.0), "and arrives"
    assert max(factors) <= 1.0
    assert factors[-1] == pytest.approx(FLOOR[schedule])
    assert factors[WARMUP:] == sorted(factors[WARMUP:], reverse=True), "then it only falls"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_never_jumps(schedule: str) -> None:
    for warmup in (0, WARMUP, 300):
        factors = curve(schedule, warmup=warmup)
        steepest = max(abs(b - a) for a, b in itertools.pairwise(factors))
        rise, fall = 1 / warmup if warmup else 0.0, 1 / min(0.4 * STEPS, STEPS - warmup)
        assert steepest <= 1.6 * max(rise, fall), "a half cosine is at most π/2 times as steep as a line"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_does_not_jump_when_the_horizon_moves(schedule: str) -> None:
    """The run is half as fast as planned: progress continues from where it is, in smaller steps."""
    moved = [s / STEPS if s < 400 else 0.4 + 0.6 * (s - 400) / (2 * STEPS) for s in range(2401)]
    factors = [lr_factor(schedule, step=s, warmup=WARMUP, progress=p, floor=0.1) for s, p in enumerate(moved)]
    assert max(abs(b - a) for a, b in itertools.pairwise(factors)) < 0.02
    assert factors[WARMUP:] == sorted(factors[WARMUP:], reverse=True)
    assert factors[-1] == pytest.approx(FLOOR[schedule])


@given(
    schedule=st.sampled_from(SCHEDULES),
    step=st.integers(0, 10_000),
    warmup=st.integers(0, 2000),
    progress=st.floats(-1, 2),
    floor=st.floats(0, 1),
    decay_fraction=st.floats(0.01, 1),
)
def test_it_stays_between_zero_and_one(
    schedule: str, step: int, warmup: int, progress: float, floor: float, decay_fraction: float
) -> None:
    factor = lr_factor(
        schedule, step=step, warmup=warmup, progress=progress, floor=floor, decay_fraction=decay_fraction
    )
    assert 0.0 <= factor <= 1.0 + 1e-12
    if step >= warmup and schedule != "one_cycle":
        assert factor >= floor - 1e-12


def torch_cycle(steps: int, pct_start: float) -> list[tuple[float, float]]:
    """Return the learning rate and beta1 of each step by torch's OneCycleLR with a peak of 1."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps, pct_start=pct_start)
    rates = []
    for step in range(steps):
        if step:
            optimizer.step()
            scheduler.step()
        group = optimizer.param_groups[0]
        rates.append((group["lr"], group["betas"][0]))
    return rates


@pytest.mark.parametrize("steps", [2, 7, 40, 333])
@pytest.mark.parametrize("pct_start", [0.0, 0.1, 0.3, 0.47, 1.0])
def test_one_cycle_is_that_of_torch_at_every_step(steps: int, pct_start: float) -> None:
    horizon = Horizon(steps, None)
    rates = []
    for step in range(steps):
        where = {"step": step, "warmup": 5, "progress": horizon.progress(step), "per_step": horizon.per_step(step)}
        rate = lr_factor("one_cycle", **where, pct_start=pct_start, floor=0.1)  # type: ignore[arg-type]
        momentum = cycled_momentum(0.85, 0.95, **where, pct_start=pct_start)  # type: ignore[arg-type]
        rates.append((rate, momentum))
    for ours, theirs in zip(rates, torch_cycle(steps, pct_start), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_one_cycle_with_a_counted_warm_up_peaks_at_its_end() -> None:
    """train.warmup_steps=12 of 40 steps is pct_start=0.3."""
    horizon = Horizon(40, None)
    rates = [
        lr_factor("one_cycle", step=s, warmup=12, progress=horizon.progress(s), per_step=horizon.per_step(s))
        for s in range(40)
    ]
    assert rates == pytest.approx([rate for rate, _ in torch_cycle(40, 0.3)], rel=1e-9)


def test_one_cycle_by_share_does_not_jump_when_the_horizon_moves() -> None:
    moved = [s / STEPS if s < 400 else 0.4 + 0.6 * (s - 400) / (2 * STEPS) for s in range(2401)]
    slopes = [1 / STEPS if s < 400 else 0.6 / (2 * STEPS) for s in range(2401)]
    factors = [
        lr_factor("one_cycle", step=s, warmup=0, progress=p, pct_start=0.3, per_step=u)
        for s, (p, u) in enumerate(zip(moved, slopes, strict=True))
    ]
    assert max(abs(b - a) for a, b in itertools.pairwise(factors)) < 0.02
    assert factors[-1] == pytest.approx(FLOOR["one_cycle"])


def test_cosine_cycle_is_the_former_one_cycle() -> None:
    """A half cosine from 1/25 over the warm-up, then a cosine down to the floor, as in older runs."""
    factors = curve("cosine_cycle")
    assert factors[0] == pytest.approx(0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi / WARMUP)))
    assert factors[WARMUP // 2 - 1] == pytest.approx(0.52)
    assert factors[(STEPS + WARMUP) // 2] == pytest.approx(0.55)


def test_wsd_is_stable_until_it_decays() -> None:
    factors = curve("wsd", floor=0.0)
    assert set(factors[WARMUP:600]) == {1.0}
    assert factors[800] == pytest.approx(0.5)


def test_an_unknown_schedule_raises() -> None:
    with pytest.raises(ValueError, match="zigzag"):
        lr_factor("zigzag", step=5, warmup=0, progress=0.5)


def test_the_square_root_rule_is_exact() -> None:
    assert sqrt_scaled_lr(3e-4, 256, 128) == 3e-4 * math.sqrt(2)
    assert sqrt_scaled_lr(3e-4, 128, 128) == 3e-4


@pytest.mark.parametrize(
    ("steps", "tokens", "epochs", "expected"),
    [
        (None, None, None, None),
        (10, None, None, 10),
        (None, 1001, None, 11),
        (None, 1000, None, 10),
        (None, None, 2.0, 100),
        (None, None, 0.5, 25),
        (30, 1000, 2.0, 10),
        (7, 1000, 2.0, 7),
        (700, 100_000, 2.0, 100),
    ],
)
def test_the_horizon_is_the_earliest(
    steps: int | None, tokens: int | None, epochs: float | None, expected: int | None
) -> None:
    got = horizon_steps(steps=steps, tokens=tokens, epochs=epochs, train_tokens=5000, tokens_per_step=100)
    assert got == expected


@pytest.mark.parametrize("warmup", [5, 12, 16, 40])
def test_wsd_with_a_warm_up_beyond_its_stable_phase_does_not_jump(warmup: int) -> None:
    factors = [lr_factor("wsd", step=step, warmup=warmup, progress=step / 20) for step in range(21)]
    steepest = max(1 / warmup, 1 / (20 * 0.4)) + 1e-9
    assert all(abs(b - a) <= steepest for a, b in itertools.pairwise(factors))
    assert factors[-1] == 0.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "one_cycle", "cosine_cycle", "wsd"])
@pytest.mark.parametrize("warmup", [900, 1000, 20_000])
def test_a_run_that_ends_during_warm_up_has_decayed(schedule: str, warmup: int) -> None:
    """For example when train.hours allows fewer steps than the warm-up has."""
    factors = [lr_factor(schedule, step=step, warmup=warmup, progress=step / 788) for step in range(788)]
    assert factors[-1] < 0.01
    assert max(factors) > 0.6 * 400 / warmup, "and it has risen before"
    steps = [abs(b - a) for a, b in itertools.pairwise(factors)]
    assert max(steps) < 0.01, "without a jump"


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("warmup", range(12))
def test_one_cycle_with_any_warm_up_stays_between_its_ends(steps: int, warmup: int) -> None:
    for step in range(steps):
        where = {"step": step, "warmup": warmup, "progress": step / steps, "per_step": 1 / steps, "floor": 0.1}
        assert 0.0 <= lr_factor("one_cycle", **where) <= 1.0  # type: ignore[arg-type]
