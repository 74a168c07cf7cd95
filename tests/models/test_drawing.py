"""The weights that a model begins with."""

from __future__ import annotations

import pytest
import torch

from redline.models import decoder as drawing
from redline.models.decoder import draw_normal


def drawn(seed: int, count: int = 11) -> list[torch.Tensor]:
    tensors = [torch.empty(40 + n, 30) for n in range(count)]
    draw_normal([(tensor, 0.02 * n) for n, tensor in enumerate(tensors)], torch.Generator().manual_seed(seed))
    return tensors


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_a_seed_gives_the_same_however_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    expected = drawn(5)
    monkeypatch.setattr(drawing, "_AT_ONCE", at_once)
    assert all(torch.equal(a, b) for a, b in zip(drawn(5), expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in list(zip(drawn(6), expected, strict=True))[1:])


def test_each_has_its_own_values_and_its_spread() -> None:
    tensors = drawn(1)
    assert (tensors[0] == 0).all()
    for n, tensor in enumerate(tensors[1:], start=1):
        assert tensor.std().item() == pytest.approx(0.02 * n, rel=0.1)
    assert not torch.equal(tensors[2][:40] / 2, tensors[1][:40])
