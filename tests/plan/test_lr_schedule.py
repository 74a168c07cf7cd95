"""Learning-rate shapes and the horizon they are laid over."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.plan.schedule import SCHEDULES, horizon_steps, lr_factor, sqrt_scaled_lr

STEPS, WARMUP = 1000, 100


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
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
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
    """The run turns out half as fast as thought: progress goes on from where it is, in smaller steps."""
    moved = [s / STEPS if s < 400 else 0.4 + 0.6 * (s - 400) / (2 * STEPS) for s in range(2401)]
    factors = [lr_factor(schedule, step=s, warmup=WARMUP, progress=p, floor=0.1) for s, p in enumerate(moved)]
    assert max(abs(b - a) for a, b in itertools.pairwise(factors)) < 0.02
    assert factors[WARMUP:] == sorted(factors[WARMUP:], reverse=True)
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


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
    if step >= warmup:
        assert factor >= floor - 1e-12


def test_wsd_is_stable_until_it_decays() -> None:
    factors = curve("wsd", floor=0.0)
    assert set(factors[WARMUP:600]) == {1.0}
    assert factors[800] == pytest.approx(0.5)


def test_an_unknown_shape_is_our_own_mistake() -> None:
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
def test_a_stable_phase_that_a_long_warm_up_leaves_no_room_for_does_not_jump(warmup: int) -> None:
    factors = [lr_factor("wsd", step=step, warmup=warmup, progress=step / 20) for step in range(21)]
    steepest = max(1 / warmup, 1 / (20 * 0.4)) + 1e-9
    assert all(abs(b - a) <= steepest for a, b in itertools.pairwise(factors))
    assert factors[-1] == 0.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "one_cycle", "wsd"])
@pytest.mark.parametrize("warmup", [900, 1000, 20_000])
def test_a_rate_whose_end_comes_before_its_peak_has_decayed_by_then(schedule: str, warmup: int) -> None:
    """As where a clock leaves room for fewer steps than the warm-up has."""
    factors = [lr_factor(schedule, step=step, warmup=warmup, progress=step / 788) for step in range(788)]
    assert factors[-1] < 0.01
    assert max(factors) > 0.6 * 400 / warmup, "and it has risen before"
    steps = [abs(b - a) for a, b in itertools.pairwise(factors)]
    assert max(steps) < 0.01, "without a jump"
