"""Micro-batch × accumulation × world is the global batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from redline.errors import Problem
from redline.planning.batch import BatchPlan, largest_micro_batch, solve_batch

some = st.integers(1, 512)


@given(micro=some, accumulation=some, world=st.integers(1, 16))
def test_any_two_give_the_third(micro: int, accumulation: int, world: int) -> None:
    total = micro * accumulation * world
    plan = BatchPlan(micro, accumulation, world)
    assert plan.global_batch == total
    for given_values in (
        (total, micro, None),
        (total, None, accumulation),
        (None, micro, accumulation),
        (total, micro, accumulation),
    ):
        assert solve_batch(*given_values, world) == plan


@given(total=st.integers(1, 100_000), micro=some, accumulation=some, world=st.integers(1, 16))
def test_three_must_agree(total: int, micro: int, accumulation: int, world: int) -> None:
    got = solve_batch(total, micro, accumulation, world)
    agrees = micro * accumulation * world == total
    assert isinstance(got, BatchPlan if agrees else Problem)
    if isinstance(got, Problem):
        assert got.key == "train.global_batch"
        assert str(micro * accumulation * world) in got.what
        assert got.fix


@given(total=st.integers(1, 100_000), part=some, world=st.integers(1, 16))
def test_the_stated_part_must_divide_the_batch(total: int, part: int, world: int) -> None:
    for name, got in (
        ("train.micro_batch", solve_batch(total, part, None, world)),
        ("train.accumulation", solve_batch(total, None, part, world)),
    ):
        if total % (part * world):
            assert isinstance(got, Problem)
            assert got.key == ("train.global_batch" if total % world else name)
        else:
            assert isinstance(got, BatchPlan)
            assert got.global_batch == total


def test_the_plan_chooses_if_fewer_than_two_are_stated() -> None:
    assert solve_batch(None, None, None) is None
    assert solve_batch(64, None, None) is None
    assert solve_batch(None, 8, None) is None


@given(total=st.integers(1, 5000), limit=st.integers(0, 6000), cap=st.none() | st.integers(1, 6000))
def test_the_largest_divisor_that_fits(total: int, limit: int, cap: int | None) -> None:
    plan = largest_micro_batch(total, 1, lambda micro: micro <= limit, cap)
    assert plan.global_batch == total
    allowed = [m for m in range(1, total + 1) if total % m == 0 and m <= limit and (cap is None or m <= cap)]
    assert plan.micro == max(allowed, default=1)


def test_a_huge_batch_is_divided_quickly() -> None:
    assert largest_micro_batch(1 << 31, 1, lambda micro: micro <= 100).micro == 64


@given(micro=some, accumulation=some, world=st.integers(1, 8))
def test_halving_keeps_the_global_batch(micro: int, accumulation: int, world: int) -> None:
    plan = BatchPlan(micro, accumulation, world)
    half = plan.halved()
    if half is None:
        assert micro == 1
    else:
        assert half.global_batch == plan.global_batch
        assert half.micro == max(n for n in range(1, micro // 2 + 1) if micro % n == 0)
