"""Segments and blocks: which positions are computed, and how many pairs the mask allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.planning.layout import Layout, Segment, uniform

HDP = Layout(
    (Segment("question", 128, 128, given=True), Segment("plan", 128, 128), Segment("execution", 256, 16, weight=2.0))
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    segments = []
    for i in range(draw(st.integers(1, 4))):
        block = draw(st.integers(1, 6))
        segments.append(Segment(str(i), block * draw(st.integers(1, 5)), block, draw(st.booleans())))
    return Layout(tuple(segments))


def test_a_text_of_equal_blocks() -> None:
    layout = uniform(1024, 16)
    assert layout.length == 1024
    assert layout.sizes == (16,) * 64
    assert layout.noisy == layout.clean == tuple(range(1024))
    assert layout.read == 2048
    assert layout.pairs == 1024**2 + 1024 * 16


@given(st.integers(2, 12), st.integers(1, 9))
def test_pairs_of_equal_blocks(blocks: int, size: int) -> None:
    n = blocks * size
    assert uniform(n, size).pairs == n * n + n * size


@pytest.mark.parametrize("n", [1, 7, 64])
def test_one_block_needs_no_clean_copy(n: int) -> None:
    layout = uniform(n, n)
    assert layout.sizes == (n,)
    assert layout.noisy == tuple(range(n))
    assert layout.clean == ()
    assert layout.read == n
    assert layout.pairs == n * n


def test_question_plan_and_execution() -> None:
    assert HDP.length == 512
    assert HDP.starts == (0, 128, 256)
    assert HDP.sizes == (128, 128, *(16,) * 16)
    assert HDP.noisy == tuple(range(128, 512))
    assert HDP.clean == tuple(range(512))
    assert [HDP.block_of[place] for place in (0, 127, 128, 255, 256, 271, 272, 511)] == [0, 0, 1, 1, 2, 2, 3, 17]
    fine = sum(16 * (256 + 16 * (i + 1)) for i in range(16))
    assert HDP.pairs == 128 * 256 + fine + 128 * 128 + 128 * 256 + fine


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_parts_of_any_layout_agree(layout: Layout) -> None:
    assert sum(layout.sizes) == layout.length == len(layout.block_of) == len(layout.noised)
    assert list(layout.block_of) == sorted(layout.block_of)
    assert len({*layout.block_of}) == len(layout.sizes)
    for segment, start in zip(layout.segments, layout.starts, strict=True):
        inside = range(start, start + segment.length)
        assert {layout.noised[place] for place in inside} == {not segment.given}
        assert len({layout.block_of[place] for place in inside}) == segment.blocks
        assert segment.blocks * segment.size == segment.length
    assert [layout.noised[place] for place in layout.noisy] == [True] * len(layout.noisy)
    assert len(layout.noisy) == sum(layout.noised) == layout.denoised
    assert layout.read == len(layout.noisy) + len(layout.clean)
    assert layout.clean in ((), tuple(range(layout.length)))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_pairs_are_counted_one_by_one(layout: Layout) -> None:
    noisy, clean = ([layout.block_of[place] for place in copy] for copy in (layout.noisy, layout.clean))
    own = sum(q == k for q in noisy for k in noisy)
    before = sum(q > k for q in noisy for k in clean)
    causal = sum(q >= k for q in clean for k in clean)
    assert layout.pairs == own + before + causal
