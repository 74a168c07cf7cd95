"""The ranks of a run side by side: what their readings say about the rank that slows the others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_logs import step

from redline.runs.cards import cards_of

COOL = {"temperature_c": [60.0] * 8, "power_w": [600.0] * 8, "throttle": [""] * 8, "forward_ms": [100.0] * 8}


def with_value(key: str, rank: int, value: Any) -> dict[str, list[Any]]:
    return {**COOL, key: [value if n == rank else old for n, old in enumerate(COOL[key])]}


def test_the_spread_of_eight_cards() -> None:
    found = cards_of([step(1, ranks={"power_w": [500.0, 610, 620, 630, 640, 650, 660, None]})])
    assert found is not None
    (spread,) = found.spreads
    assert (found.count, spread.low, spread.median, spread.high) == (8, 500, 630, 660)
    assert (spread.low_rank, spread.high_rank) == (0, 6)
    assert found.stragglers == ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("forward_ms", 130.0, "Rank 5 is the slowest: forward passes and data take it 130.0 ms"),
        ("temperature_c", 88.0, "Rank 5 has the hottest card: 88 °C"),
        ("throttle", "hw_thermal", "rank 5 (60 °C)"),
        ("throttle", "power_cap+idle", "At its power limit, unlike the others: the card of rank 5"),
    ],
)
def test_the_straggler_is_named(key: str, value: Any, words: str) -> None:
    found = cards_of([step(n, ranks=with_value(key, 5, value)) for n in range(5)])
    assert found is not None
    assert len(found.stragglers) == 1
    assert words in found.stragglers[0]


def test_one_slow_log_line_names_nobody() -> None:
    lines = [COOL, COOL, with_value("forward_ms", 3, 500.0), COOL, COOL]
    found = cards_of([step(n, ranks=line) for n, line in enumerate(lines)])
    assert found is not None
    assert found.stragglers == ()


def test_all_cards_at_their_power_limit_are_no_stragglers() -> None:
    found = cards_of([step(1, ranks={**COOL, "throttle": ["power_cap"] * 8})])
    assert found is not None
    assert found.stragglers == ()


def test_a_rank_that_waits_for_data() -> None:
    ranks = {"forward_ms": [10.0, 10.0, 10.0], "data_wait_ms": [0.0, 90.0, 0.0]}
    found = cards_of([step(1, ranks=ranks)])
    assert found is not None
    assert "take it 100.0 ms a step, most of it waiting for data" in found.stragglers[0]


def test_another_number_of_ranks_after_a_resume() -> None:
    before = step(1, ranks={"power_w": [1.0] * 4})
    found = cards_of([before, step(2, ranks={"power_w": [600.0, 610.0]})])
    assert found is not None
    assert (found.count, found.spreads[0].low) == (2, 600)
    assert cards_of([before, step(2)]) is None, "the run continues on one card"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(JSON | st.dictionaries(st.sampled_from([*COOL, "gpu_util"]), JSON, max_size=4), max_size=4))
def test_no_log_breaks_it(columns: list[Any]) -> None:
    found = cards_of([step(n, ranks=column) for n, column in enumerate(columns)])
    assert found is None or found.lines()
