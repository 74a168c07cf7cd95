"""What the card said while it was timed: watts, joules and clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Reading = dict[str, Any]  # `step` and `time`, and NVML's fields as step events carry them


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def card_figures(readings: Sequence[Reading], tokens_per_step: int) -> dict[str, float | None]:
    """Energy from the card's own counter, between the first reading and the last; power from it, else as sampled."""
    steady = readings[1:] or readings
    figures = {
        "power_w": median([reading.get("power_w") for reading in steady]),
        "sm_clock_mhz": median([reading.get("sm_clock_mhz") for reading in steady]),
        "joules_per_step": None,
        "joules_per_token": None,
    }
    counted = [reading for reading in readings if reading.get("energy_j") is not None]
    if len(counted) < 2:
        return figures
    first, last = counted[0], counted[-1]
    joules, steps, seconds = (last[key] - first[key] for key in ("energy_j", "step", "time"))
    if joules <= 0 or steps <= 0 or seconds <= 0:  # a counter that stands still, or began again
        return figures
    per_step = joules / steps
    return figures | {
        "power_w": joules / seconds,
        "joules_per_step": per_step,
        "joules_per_token": per_step / tokens_per_step,
    }


def data_wait_share(figures: dict[str, Any]) -> float | None:
    wait, step = figures.get("data_wait_ms"), figures.get("step_ms")
    return wait / step if wait is not None and step else None
