"""Whether a figure that stands under the name of fp8 is one: a card without its units, or a loss, means bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def not_in_fp8(used: str, choices: Sequence[Mapping[str, Any]], warnings: Sequence[str]) -> str | None:
    """Why a run that was to be in fp8 is not, by what it says of itself; None when it is."""
    if used != "fp8":
        why = next((text for text in warnings if "fp8" in text), "")
        return f"here it is in {used}, not in fp8{f' ({why})' if why else ''}."
    chosen = next((choice for choice in choices if choice.get("key") == "train.fp8"), None)
    if chosen is not None and chosen.get("value") == "none":
        return f"none of its matmuls runs in fp8: {chosen.get('reason')}."
    return None
