"""Learning-rate shapes: warm-up counts steps, decay follows progress (0 at the start, 1 at the horizon)."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "one_cycle", "wsd", "linear", "constant")


def lr_factor(
    schedule: str, *, step: int, warmup: int, progress: float, floor: float = 0.0, decay_fraction: float = 0.4
) -> float:
    """What the peak LR is multiplied by at `step` (0-based)."""
    progress = min(1.0, max(0.0, progress))
    rise = _rise(schedule, (step + 1) / warmup) if step < warmup else 1.0
    if schedule == "wsd":  # warm-up, stable, decay: which may begin before the peak in a short run
        return min(rise, floor + (1.0 - floor) * min(1.0, (1.0 - progress) / decay_fraction))
    if schedule == "constant":
        return rise
    if step >= warmup:
        return _fall(schedule, _since_warmup(step, warmup, progress), floor)
    # where the end comes before the peak, the rate has decayed by then all the same
    return min(rise, _fall(schedule, progress, floor)) if step < progress * warmup else rise


def _fall(schedule: str, fallen: float, floor: float) -> float:
    if schedule == "linear":
        return floor + (1.0 - floor) * (1.0 - fallen)
    if schedule in ("cosine", "one_cycle"):
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fallen))
    raise ValueError(f"unknown schedule {schedule!r}")


def _rise(schedule: str, share: float) -> float:
    if schedule == "one_cycle":  # Smith's one-cycle begins at 1/25 and rises on a half cosine
        return 0.04 + 0.96 * 0.5 * (1.0 - math.cos(math.pi * share))
    return share


def _since_warmup(step: int, warmup: int, progress: float) -> float:
    """Progress counted from the warm-up's end, so that the decay begins at the peak and the LR does not jump.

    (step − warmup) / (total − warmup) with total = step / progress; it stays continuous when the horizon moves.
    """
    if not warmup or not 0.0 < progress < 1.0:
        return progress
    return progress * (step - warmup) / (step - progress * warmup)


def sqrt_scaled_lr(lr_base: float, batch: int, batch_base: int) -> float:
    return lr_base * math.sqrt(batch / batch_base)


def horizon_steps(
    *, steps: int | None, tokens: int | None, epochs: float | None, train_tokens: int, tokens_per_step: int
) -> int | None:
    """The earliest of the counted stops, in steps; None when only a clock stops the run."""
    limits = [tokens, None if epochs is None else epochs * train_tokens]
    counted = [math.ceil(limit / tokens_per_step) for limit in limits if limit is not None]
    return min([*counted, *([steps] if steps is not None else [])], default=None)
