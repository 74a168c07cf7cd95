"""Presets: how much of the memory to fill, and how large a batch, in one word."""

from __future__ import annotations

from typing import Any

from redline.plan.batch import PRESETS


def with_preset(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The recipe's keys with those of the command line over them, and the preset's in between.

    A preset scales the batch that the recipe gives. What stands beside it, in the same place or nearer to the
    user, wins over what it sets.
    """
    preset = extra.get("train.preset", base.get("train.preset"))
    if not isinstance(preset, str) or preset not in PRESETS:
        return {**base, **extra}  # none, or one that validation complains about
    fraction, factor = PRESETS[preset]
    given = dict(base)
    if "train.preset" in extra or "train.memory_fraction" not in base:
        given["train.memory_fraction"] = fraction
    given |= _scaled_batch(given, factor)
    return {**given, **extra}


def _scaled_batch(given: dict[str, Any], factor: float) -> dict[str, int]:
    """The global batch, in as many micro-batches as before where the recipe says how large those are."""
    total, micro, accumulation = (
        value if isinstance(value := given.get(f"train.{key}"), int) and not isinstance(value, bool) else None
        for key in ("global_batch", "micro_batch", "accumulation")
    )
    if total and micro and not accumulation and total % micro == 0 and (micro * factor).is_integer():
        return {"train.global_batch": round(total * factor), "train.micro_batch": round(micro * factor)}
    if total is not None:
        return {"train.global_batch": max(1, round(total * factor))}
    return {} if accumulation is None else {"train.accumulation": max(1, round(accumulation * factor))}


def preset_factor(preset: str | None) -> float:
    return PRESETS[preset][1] if preset else 1.0


def preset_text(preset: str) -> str:
    fraction, factor = PRESETS[preset]
    return f"{fraction:.0%} of the memory, the recipe's batch × {factor:g}"
