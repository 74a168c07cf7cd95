"""What a loss in nats means."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, tokens: int, utf8_bytes: int) -> float:
    """The figure that can be compared across tokenizers."""
    return loss / math.log(2) * tokens / utf8_bytes
