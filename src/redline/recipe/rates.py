"""AdamW's peak learning rate by the role of what it trains, and how long it rises."""

from __future__ import annotations

import math

from redline.fields import AUTO
from redline.recipe.schema import Recipe, Train

UNKNOWN_WARMUP = 100


def role_rate(train: Train, role: str) -> float:
    """Of such parameters; `auto` is the one rate for all."""
    rates = {"embedding": train.embedding_lr, "head": train.head_lr, "scalar": train.scalar_lr}
    rate = rates.get(role, AUTO)
    return float(train.lr if rate == AUTO else rate)


def resolved_rates(recipe: Recipe, lr: float) -> dict[str, float]:
    """Every rate as a number, where `lr` is the one for all. A tied head has the embedding's."""
    train = recipe.train.model_copy(update={"lr": lr})
    rates = {role: role_rate(train, role) for role in ("embedding", "head", "scalar")}
    if recipe.model.tied:
        rates["head"] = rates["embedding"]
    return {"lr": lr, **{f"{role}_lr": rate for role, rate in rates.items()}}


def usual_warmup(expected_steps: float) -> tuple[int, str]:
    """Steps, and why so many."""
    if math.isinf(expected_steps):
        return UNKNOWN_WARMUP, "the length of the run is not known yet"
    value = min(1000, max(min(5, expected_steps // 2), expected_steps // 50, 1))
    least = ", at least 5" if 10 <= expected_steps < 250 else ""
    return int(value), f"about 2 % of an expected {expected_steps:.0f} steps{least}"


def long_warmup(asked: int, expected_steps: float) -> list[str]:
    """What is to be said of a warm-up that was asked for, in a run of so many steps."""
    if asked <= expected_steps / 2:
        return []
    what = f"train.warmup_steps={asked} is more than half of an expected {expected_steps:.0f} steps"
    tenth = f"{max(1, expected_steps // 10):.0f} would be a tenth."
    return [f"{what}: the learning rate hardly reaches its peak. {tenth}"]
