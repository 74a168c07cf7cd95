"""Learning-rate schedules. Warm-up counts steps; decay follows progress, which is 0 at the start and 1 at the horizon.

`one_cycle` is torch's OneCycleLR with its defaults (Smith and Topin, arXiv 1708.07120), step for step. `cosine_cycle`
is the shape that older versions called one_cycle; runs that began with it keep it.

To add a schedule, add its name to `SCHEDULES` and its shape to `lr_factor`. Tests require of every schedule that it
ends at `floor` when progress is 1, follows a horizon that moves, and never jumps.
"""

from __future__ import annotations

import math

ONE_CYCLE, COSINE_CYCLE = "one_cycle", "cosine_cycle"
SCHEDULES = ("cosine", ONE_CYCLE, COSINE_CYCLE, "wsd", "linear", "constant")
PCT_START = 0.3  # of OneCycleLR
_INITIAL = 1.0 / 25.0  # of OneCycleLR: div_factor
_FINAL = _INITIAL / 1e4  # of OneCycleLR: final_div_factor


def lr_factor(
    schedule: str,
    *,
    step: int,
    warmup: int,
    progress: float,
    floor: float = 0.0,
    decay_fraction: float = 0.4,
    pct_start: float | None = None,
    per_step: float = 0.0,
) -> float:
    """Return the factor on the peak LR at `step` (0-based).

    `one_cycle` also reads `pct_start`, which replaces `warmup`, and `per_step`, the progress that this step makes.
    """
    progress = min(1.0, max(0.0, progress))
    if schedule == ONE_CYCLE:
        rising, done = _cycle_phase(step, warmup, progress, pct_start, per_step)
        return _anneal(_INITIAL, 1.0, done) if rising else _anneal(1.0, _FINAL, done)
    rise = _rise(schedule, (step + 1) / warmup) if step < warmup else 1.0
    if schedule == "wsd":  # warm-up, stable, decay; in a short run the decay may begin before the peak
        return min(rise, floor + (1.0 - floor) * min(1.0, (1.0 - progress) / decay_fraction))
    if schedule == "constant":
        return rise
    if step >= warmup:
        return _fall(schedule, _since_warmup(step, warmup, progress), floor)
    # If the run ends during warm-up, the LR still decays towards the end instead of stopping at its highest.
    return min(rise, _fall(schedule, progress, floor)) if step < progress * warmup else rise


def cycled_momentum(
    low: float, high: float, *, step: int, warmup: int, progress: float, pct_start: float | None, per_step: float
) -> float:
    """Return the momentum of `one_cycle` at `step`: it falls to `low` while the LR rises, and rises again after."""
    rising, done = _cycle_phase(step, warmup, min(1.0, max(0.0, progress)), pct_start, per_step)
    return _anneal(high, low, done) if rising else _anneal(low, high, done)


def _cycle_phase(
    step: int, warmup: int, progress: float, pct_start: float | None, per_step: float
) -> tuple[bool, float]:
    """Return whether the LR rises at `step`, and which share of that phase is done.

    OneCycleLR counts so that its peak is step `pct_start·N - 1` and its end step `N - 1`, the last one that is taken.
    With N = 1 / per_step this follows progress, so that the LR does not jump when the horizon moves.
    """
    if pct_start is not None:
        if progress + per_step <= pct_start and pct_start > per_step:
            return True, progress / (pct_start - per_step)
        return False, (min(1.0, (progress + per_step - pct_start) / (1.0 - pct_start)) if pct_start < 1.0 else 0.0)
    if step + 1 >= warmup:
        return False, _since_warmup(step + 1, warmup, min(1.0, progress + per_step))
    risen = step / (warmup - 1)
    # If the horizon comes before the peak, the LR follows the lower of the two phases and has decayed by the end.
    if step < progress * warmup and _anneal(1.0, _FINAL, progress) < _anneal(_INITIAL, 1.0, risen):
        return False, progress
    return True, risen


def _anneal(start: float, end: float, done: float) -> float:
    """Interpolate from `start` to `end` on a half cosine."""
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * done))


def _fall(schedule: str, fallen: float, floor: float) -> float:
    if schedule == "linear":
        return floor + (1.0 - floor) * (1.0 - fallen)
    if schedule in ("cosine", COSINE_CYCLE):
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fallen))
    raise ValueError(f"unknown schedule {schedule!r}")


def _rise(schedule: str, share: float) -> float:
    if schedule == COSINE_CYCLE:
        return _anneal(_INITIAL, 1.0, share)
    return share


def _since_warmup(step: int, warmup: int, progress: float) -> float:
    """Return the progress counted from the end of the warm-up, so that decay begins at the peak LR without a jump.

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
    """Return the earliest of the stop conditions in steps; None if only `train.hours` ends the run."""
    limits = [tokens, None if epochs is None else epochs * train_tokens]
    counted = [math.ceil(limit / tokens_per_step) for limit in limits if limit is not None]
    return min([*counted, *([steps] if steps is not None else [])], default=None)
