from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data.loader import WindowIndex, permute
from redline.errors import UserError


@given(n=st.integers(1, 5000), key=st.integers(-(2**70), 2**70))
def test_permute_is_a_bijection(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), i=st.integers(0, 2**62))
def test_permute_stays_in_range_and_does_not_depend_on_the_batch(n: int, key: int, i: int) -> None:
    several = np.array([i % n, (i + 1) % n, (i * 7) % n])
    together = permute(several, n, key)
    assert np.all((together >= 0) & (together < n))
    assert [int(permute(several[j : j + 1], n, key)[0]) for j in range(3)] == together.tolist()


def test_permute_mixes() -> None:
    n = 20_000
    order = permute(np.arange(n), n, 3)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.03
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
    assert np.mean(order == permute(np.arange(n), n, 4)) < 0.001
    orders = {tuple(permute(np.arange(4), 4, key).tolist()) for key in range(2000)}
    assert len(orders) == 24, "every order of four must be reachable"


def test_permute_refuses_positions_outside() -> None:
    for bad in ([-1], [5]):
        with pytest.raises(ValueError, match=r"range\(5\)"):
            permute(np.array(bad), 5, 0)


def test_each_epoch_visits_every_window_once_in_an_order_of_its_own() -> None:
    index = WindowIndex(tokens=1001, seq_len=10, seed=1)
    assert len(index) == 100
    epochs = index.starts(np.arange(300)).reshape(3, 100)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(0, 1000, 10), (3, 1)))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])
    assert not np.array_equal(epochs[0], WindowIndex(1001, 10, seed=2).starts(np.arange(100)))


@given(
    tokens=st.integers(20, 10**12), seq_len=st.integers(1, 19), seed=st.integers(0, 2**63), step=st.integers(0, 10**9)
)
def test_starts_are_a_function_of_the_sample_alone(tokens: int, seq_len: int, seed: int, step: int) -> None:
    samples = step * 8 + np.arange(8)
    starts = WindowIndex(tokens, seq_len, seed).starts(samples)
    halves = [WindowIndex(tokens, seq_len, seed).starts(half) for half in (samples[:4], samples[4:])]
    assert np.array_equal(starts, np.concatenate(halves))
    assert np.array_equal(starts[::-1], WindowIndex(tokens, seq_len, seed).starts(samples[::-1]))
    assert np.all((starts >= 0) & (starts + seq_len + 1 <= tokens))


def test_in_order_without_shuffling() -> None:
    index = WindowIndex(tokens=41, seq_len=10, seed=5, shuffle=False)
    assert index.starts(np.arange(6)).tolist() == [0, 10, 20, 30, 0, 10]


def test_too_little_data_for_one_sequence() -> None:
    with pytest.raises(UserError, match=r"10 tokens, less than one sequence of 11\. .*at most 9"):
        WindowIndex(tokens=10, seq_len=10, seed=0)
    assert len(WindowIndex(tokens=11, seq_len=10, seed=0)) == 1
    with pytest.raises(ValueError, match="not negative"):
        WindowIndex(tokens=11, seq_len=10, seed=0).starts(np.array([-1]))
