"""Sampling: given tokens stay, rows do not influence each other, and the cache does not change the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.jobs.diffusion.denoise import SamplerOptions, Vocabulary, denoise, sample_tokens
from redline.kernels.attention import Attention, MaskSpec
from redline.models.decoder import Decoder
from redline.models.generate import sample_token
from redline.planning.layout import Layout, Segment, uniform
from redline.planning.shapes import DecoderShape

VOCAB = Vocabulary(mask=30, classes=30, end=29)
PLANNED = Layout((Segment("question", 6, 6, given=True), Segment("plan", 8, 8), Segment("execution", 12, 4)))
LAYOUTS = [uniform(24, 4), uniform(24, 24), uniform(24, 1), PLANNED]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(3)
    shape = DecoderShape(2, 32, 4, 2, 8, 64, 64)
    decoder = Decoder(shape, attention=Attention("dense", MaskSpec()))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return decoder.eval()


def rows(layout: Layout, count: int, seed: int = 0) -> torch.Tensor:
    """Return rows in which random positions are given and the others masked."""
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, VOCAB.classes - 1, (count, layout.length))
    shown = chance.random(tokens.shape) < 0.2
    shown[:, : layout.segments[0].length] |= layout.segments[0].given
    return torch.from_numpy(np.where(shown, tokens, VOCAB.mask))


@pytest.mark.parametrize("how", [SamplerOptions(), SamplerOptions("ancestral", 3), SamplerOptions(temperature=0.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_does_not_change_the_samples(model: Decoder, layout: Layout, how: SamplerOptions) -> None:
    start, seeds = rows(layout, 3), [5, 6, 7]
    found = [denoise(model, start, layout, VOCAB, seeds, how, cached=cached) for cached in (True, False)]
    assert torch.equal(found[0].rows, found[1].rows)
    assert found[0].forwards == found[1].forwards
    assert not (found[0].rows == VOCAB.mask).any()
    given_ = start != VOCAB.mask
    assert torch.equal(found[0].rows[given_], start[given_])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_rows_equals_single_rows(model: Decoder, layout: Layout) -> None:
    start, seeds = rows(layout, 8), list(range(8))
    how = SamplerOptions(top_p=0.9)
    together = denoise(model, start, layout, VOCAB, seeds, how)
    alone = [denoise(model, start[i : i + 1], layout, VOCAB, [seeds[i]], how) for i in range(8)]
    assert torch.equal(together.rows, torch.cat([one.rows for one in alone]))
    assert together.forwards == [one.forwards[0] for one in alone]
    assert together.ended == [one.ended[0] for one in alone]


def test_first_hitting_needs_one_forward_per_position_and_ancestral_fewer(model: Decoder) -> None:
    layout = uniform(24, 8)
    open_ = torch.full((1, 24), VOCAB.mask)
    vocabulary = Vocabulary(VOCAB.mask, VOCAB.classes)
    assert denoise(model, open_, layout, vocabulary, [1]).forwards == [24]
    assert denoise(model, open_, layout, vocabulary, [1], SamplerOptions("ancestral", 1)).forwards == [3]
    assert 3 < denoise(model, open_, layout, vocabulary, [1], SamplerOptions("ancestral", 4)).forwards[0] <= 12


def test_a_segment_is_filled_with_its_end_token(model: Decoder) -> None:
    start = rows(PLANNED, 1)
    start[0, 6:] = VOCAB.mask
    start[0, 15] = VOCAB.end  # given, in the execution's first block: no end of what is written
    found = denoise(model, start, PLANNED, VOCAB, [4])
    written = found.rows[0, 14:].tolist()
    ends = [i for i, token in enumerate(written) if token == VOCAB.end and i != 1]
    assert found.ended == [bool(ends)]
    if ends:
        assert set(written[(ends[0] // 4 + 1) * 4 :]) <= {VOCAB.end}


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), top_p=st.floats(0.05, 1.0), top_k=st.integers(1, 40))
def test_top_k_and_top_p_limit_the_samples(seed: int, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(50, 20, generator=generator)
    uniform_ = torch.rand(50, generator=generator)
    picked = sample_tokens(logits, uniform_, SamplerOptions(top_p=top_p, top_k=top_k))
    probabilities = logits.softmax(-1)
    ordered = probabilities.sort(descending=True).values
    for row, token in enumerate(picked.tolist()):
        rank = int((probabilities[row] > probabilities[row, token]).sum())
        assert rank < top_k
        kept = min(top_k, 20)
        with_it = float(ordered[row, : rank + 1].sum())
        assert rank == 0 or with_it <= top_p * float(ordered[row, :kept].sum()) + 1e-5


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.9, [5 / 8, 3 / 8, 0.0, 0.0]),  # the third token would bring the mass to 0.95: it is left out
        (0.96, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        (0.3, [1.0, 0.0, 0.0, 0.0]),  # the likeliest is always there
        (1.0, [0.5, 0.3, 0.15, 0.05]),
        (None, [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_the_nucleus_is_that_of_the_block_diffusion_authors(top_p: float | None, expected: list[float]) -> None:
    """Cumulative probability at most `top_p`, without the token that crosses it, and renormalised."""
    order = [2, 0, 3, 1]  # the token of each probability
    logits = torch.empty(4)
    logits[order] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    draws = (torch.arange(10_000) + 0.5) / 10_000
    picked = sample_tokens(logits.expand(10_000, 4), draws, SamplerOptions(top_p=top_p))
    share = (torch.bincount(picked, minlength=4) / 10_000)[order]
    torch.testing.assert_close(share, torch.tensor(expected), atol=2e-4, rtol=0)


def test_samples_have_the_frequencies_of_their_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(30_000, 3)
    draws = (torch.arange(30_000) + 0.5) / 30_000
    share: Any = torch.bincount(sample_tokens(logits, draws, SamplerOptions()), minlength=3) / 30_000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-5])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 9.0, 3.0], [-1e4, 2.0, 1e4]])
    chosen = sample_token(logits, torch.Generator().manual_seed(0), temperature=temperature, top_k=None, top_p=0.9)
    assert chosen.tolist() == [1, 2]
    assert sample_tokens(logits, torch.tensor([0.99, 0.99]), SamplerOptions(temperature=temperature)).tolist() == [1, 2]
