"""Mask probabilities are stratified over a step, do not depend on its split, and give the expected share of masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.jobs.diffusion.data import Clip, expand_to_positions, mask_probabilities, masked_positions, noised_blocks
from redline.planning.layout import Layout, Segment, uniform

RECORDS = Layout((Segment("question", 6, 6, given=True), Segment("plan", 8, 8), Segment("execution", 12, 4)))
WHOLE = Clip(0.0, 1.0)

seeds, steps, batches, blocks = st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 12)


def samples_of(step: int, batch: int) -> np.ndarray:
    return step * batch + np.arange(batch)


@given(seeds, steps, batches, blocks)
def test_each_stratum_has_one_mask_probability(seed: int, step: int, batch: int, count: int) -> None:
    u = mask_probabilities(seed, samples_of(step, batch), batch, count, WHOLE)
    assert u.shape == (batch, count)
    assert u.dtype == np.float64
    strata = np.floor(u.ravel() * batch * count).astype(int)
    assert sorted(strata) == list(range(batch * count))
    gaps = np.diff(np.sort(u.ravel()))
    assert np.allclose(gaps, 1 / (batch * count)), "one offset is shared"


@given(seeds, steps, batches, blocks, st.data())
def test_noise_does_not_depend_on_the_split_of_a_step(
    seed: int, step: int, batch: int, count: int, data: st.DataObject
) -> None:
    layout = Layout((Segment("question", 3, 3, given=True), Segment("solution", 4 * count, 4)))
    samples = samples_of(step, batch)
    whole = mask_probabilities(seed, samples, batch, count, Clip(0.1, 0.9))
    masked = masked_positions(seed, samples, layout, whole)
    order = np.array(data.draw(st.permutations(range(batch))))
    for some in np.array_split(order, data.draw(st.integers(1, batch))):
        part = mask_probabilities(seed, samples[some], batch, count, Clip(0.1, 0.9))
        assert np.array_equal(part, whole[some])
        assert np.array_equal(masked_positions(seed, samples[some], layout, part), masked[some])


def test_samples_of_several_steps_at_once() -> None:
    together = mask_probabilities(5, np.arange(24), 8, 3, WHOLE)
    for step in range(3):
        assert np.array_equal(
            together[8 * step : 8 * step + 8], mask_probabilities(5, samples_of(step, 8), 8, 3, WHOLE)
        )


def test_steps_and_seeds_have_different_orders_and_offsets() -> None:
    found = [mask_probabilities(seed, samples_of(step, 16), 16, 4, WHOLE) for seed in range(2) for step in range(20)]
    orders = {tuple(np.argsort(u.ravel()).tolist()) for u in found}
    offsets = {round(float(u.min()), 12) for u in found}
    assert len(orders) == len(offsets) == 40


def test_each_block_sees_all_noise_levels_equally() -> None:
    """Over many steps, the p of one block of one sample is uniform (Kolmogorov–Smirnov test at the 0.1 % level)."""
    batch, count, many = 4, 3, 4000
    u = mask_probabilities(1, np.arange(batch * many), batch, count, WHOLE).reshape(many, batch * count)
    for place in (0, 5, 11):
        distance = np.abs(np.sort(u[:, place]) - (np.arange(many) + 0.5) / many).max()
        assert distance < 1.95 / np.sqrt(many)
    assert np.abs(np.corrcoef(u[1:, 0], u[:-1, 0])[0, 1]) < 0.06


def test_mask_probabilities_stay_within_the_clip() -> None:
    p = mask_probabilities(3, np.arange(512), 512, 8, Clip(0.3, 0.8))
    assert p.min() > 0.3
    assert p.max() < 0.8
    assert abs(p.mean() - 0.55) < 1e-3
    assert np.all(mask_probabilities(3, np.arange(8), 8, 2, Clip(1.0, 1.0)) == 1.0)
    for low, high in ((-0.1, 1.0), (0.5, 0.4), (0.0, 1.1)):
        with pytest.raises(ValueError, match="not an interval"):
            Clip(low, high)


def test_stratified_means_vary_less_than_independent_ones() -> None:
    """A step estimates a mean over noise levels, here of a loss that falls with p."""
    many, batch, count = 500, 8, 4

    def loss(p: np.ndarray) -> np.ndarray:
        return -np.log(p)

    clip = Clip(1e-3, 1.0)
    stratified = loss(mask_probabilities(2, np.arange(many * batch), batch, count, clip)).reshape(many, -1).mean(1)
    draws = np.random.default_rng(0).uniform(clip.low, clip.high, (many, batch * count))
    independent = loss(draws).mean(1)
    assert abs(stratified.mean() - independent.mean()) < 4 * independent.std() / np.sqrt(many)
    assert stratified.var() < independent.var() / 5, "measured: a ninth"


@given(seeds, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_the_share_of_masked_positions_is_p(seed: int, p: list[float]) -> None:
    many = 2000
    masked = masked_positions(seed, np.arange(many), RECORDS, np.tile(p, (many, 1)))
    assert masked.shape == (many, RECORDS.length)
    assert masked.dtype == bool
    assert not masked[:, :6].any(), "given segments are never masked"
    for one, (begin, end) in zip(p, ((6, 14), (14, 18), (18, 22), (22, 26)), strict=True):
        draws = many * (end - begin)
        assert abs(masked[:, begin:end].mean() - one) <= 5 * np.sqrt(one * (1 - one) / draws) + 1 / draws


def test_positions_and_samples_are_masked_independently() -> None:
    many = 20_000
    masked = masked_positions(9, np.arange(many), uniform(8, 8), np.full((many, 1), 0.5)).astype(float)
    assert np.abs(np.corrcoef(masked.T) - np.eye(8)).max() < 0.04
    assert np.abs(np.corrcoef(masked[1:, 0], masked[:-1, 0])[0, 1]) < 0.04
    assert not np.array_equal(masked, masked_positions(10, np.arange(many), uniform(8, 8), np.full((many, 1), 0.5)))


def test_p_of_one_masks_all_and_p_of_zero_none() -> None:
    samples = np.arange(50)
    assert masked_positions(0, samples, uniform(8, 4), np.ones((50, 2))).all()
    assert not masked_positions(0, samples, uniform(8, 4), np.zeros((50, 2))).any()
    never = np.zeros((50, 8), dtype=bool)
    never[:, 0] = True
    masked = masked_positions(0, samples, uniform(8, 4), np.ones((50, 2)), never)
    assert not masked[:, 0].any()
    assert masked[:, 1:].all()


def test_mask_probabilities_belong_to_the_noised_blocks_in_order() -> None:
    assert noised_blocks(RECORDS) == 4
    p = expand_to_positions(np.array([[0.1, 0.2, 0.3, 0.4]]), RECORDS)
    assert p.tolist() == [[0.0] * 6 + [0.1] * 8 + [0.2] * 4 + [0.3] * 4 + [0.4] * 4]
    with pytest.raises(ValueError, match="5 mask probabilities for 4 noised blocks"):
        expand_to_positions(np.ones((1, 5)), RECORDS)
