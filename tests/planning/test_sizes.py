"""The page about what fits how many cards, and what it must hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import sizes


def test_the_page_is_up_to_date() -> None:
    assert sizes.PAGE.read_text(encoding="utf-8") == sizes.page()


@pytest.mark.parametrize(
    ("model", "method", "gpu", "cards"),
    [
        ("70B", "QLoRA", "h100", 2),
        ("70B", "QLoRA", "l40s", 4),
        ("70B", "full", "h100", 64),
        ("32B", "full", "h100", 16),
        ("13B", "full", "h100", 4),
        ("8B", "full", "h100", 4),
    ],
)
def test_these_fit(model: str, method: str, gpu: str, cards: int) -> None:
    assert sizes.plan(sizes.MODELS[model], sizes.METHODS[method], gpu, cards).fits


def test_no_speed_is_above_the_published_one_without_a_reason() -> None:
    """torchtitan: about 6,700 tokens/s per H100 with 8B, 8,192 tokens, FSDP2 and recomputation."""
    recomputed = ("train.grad_checkpointing=full", "parallel=fsdp")
    for cards in (4, 8, 64):
        cell = sizes.plan(sizes.MODELS["8B"], recomputed, "h100", cards)
        assert cell.per_card is not None
        assert 6000 < cell.per_card <= 6700
