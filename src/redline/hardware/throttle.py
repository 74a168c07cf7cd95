"""Saying once that a card runs below its clock, and what that costs."""

from __future__ import annotations

from redline.hardware.nvml import Reading

# A card that trains well touches its power limit often; only one that never leaves it is worth a sentence. Heat and
# brakes are worth one as soon as they are not a blip.
_POWER_LINES, _HEAT_LINES = 20, 3
HEAT = {
    "thermal": "it is too hot",
    "hw_thermal": "it is too hot",
    "hw_slowdown": "its hardware slows it down",
    "power_brake": "the power supply slows it down",
}


class ThrottleWatch:
    """Counts log lines in a row in which the card is held back."""

    def __init__(self) -> None:
        self._hot_lines = self._capped_lines = 0
        self._told: set[str] = set()

    def note(self, reading: Reading) -> str | None:
        """The warning that is due now, once for heat and once for power in the life of a run."""
        words = (reading.throttle or "").split("+")
        heat = next((HEAT[word] for word in words if word in HEAT), None)
        self._hot_lines = self._hot_lines + 1 if heat else 0
        self._capped_lines = self._capped_lines + 1 if "power_cap" in words else 0
        if heat and self._hot_lines == _HEAT_LINES and self._first("heat"):
            degrees = "" if reading.temperature_c is None else f" ({reading.temperature_c:.0f} °C)"
            return f"the GPU is held back: {heat}{degrees}{_cost(reading)}. Look at its cooling and its power supply"
        if self._capped_lines == _POWER_LINES and self._first("power"):
            watts = "" if reading.power_limit_w is None else f" of {reading.power_limit_w:.0f} W"
            return f"the GPU stays at its power limit{watts}{_cost(reading)}. Only a higher limit would change that"
        return None

    def _first(self, what: str) -> bool:
        fresh = what not in self._told
        self._told.add(what)
        return fresh


def _cost(reading: Reading) -> str:
    clock, most = reading.sm_clock_mhz, reading.sm_clock_max_mhz
    if not clock or not most:
        return ""
    return f"; its clock is {clock:.0f} of {most:.0f} MHz, {clock / most:.0%} of the speed it could have".replace(
        "%", " %"
    )
