"""The initial weights of a model."""

from __future__ import annotations

import pytest
import torch

from redline.models import decoder
from redline.models.decoder import fill_normal, tensor_seeds


def filled(seed: int, count: int = 11) -> list[torch.Tensor]:
    """Return tensors of different sizes; tensor n has standard deviation 0.02·n."""
    tensors = [torch.empty(40 + n, 30) for n in range(count)]
    seeds = tensor_seeds(len(tensors), torch.Generator().manual_seed(seed))
    fill_normal([(tensor, 0.02 * n) for n, tensor in enumerate(tensors)], seeds)
    return tensors


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_values_depend_on_the_seed_and_not_on_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    expected = filled(5)
    monkeypatch.setattr(decoder, "_DRAWN_AT_ONCE", at_once)
    assert all(torch.equal(a, b) for a, b in zip(filled(5), expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in list(zip(filled(6), expected, strict=True))[1:])


def test_each_tensor_has_its_own_values_and_its_standard_deviation() -> None:
    tensors = filled(1)
    assert (tensors[0] == 0).all()
    for n, tensor in enumerate(tensors[1:], start=1):
        assert tensor.std().item() == pytest.approx(0.02 * n, rel=0.1)
    assert not torch.equal(tensors[2][:40] / 2, tensors[1][:40])
