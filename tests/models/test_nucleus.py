"""Nucleus and top-k sampling, token by token, against transformers."""

from __future__ import annotations

import pytest
import torch

from redline.models.generate import sample_token

transformers = pytest.importorskip("transformers", reason="compared with transformers")


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 0.9), (0.7, None, 0.5), (1.3, 4, None), (0.8, 5, 0.8), (1.0, None, 0.05)],
)
def test_the_same_tokens_can_be_drawn_as_by_transformers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """And as often: each token's share of many draws is its probability after transformers' own filters."""
    logits = 2 * torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    filters = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(temperature)])
    filters += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    filters += [transformers.TopPLogitsWarper(top_p)] if top_p else []
    expected = filters(torch.zeros(6, 1, dtype=torch.long), logits.clone()).softmax(-1)
    draws, chance = 4000, torch.Generator().manual_seed(2)
    for row, probabilities in zip(logits, expected, strict=True):
        many = sample_token(row.expand(draws, 12), chance, temperature=temperature, top_k=top_k, top_p=top_p)
        share = torch.bincount(many, minlength=12) / draws
        assert not share[probabilities == 0].any()
        torch.testing.assert_close(share, probabilities, atol=0.035, rtol=0)
