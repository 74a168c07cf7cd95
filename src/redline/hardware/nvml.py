"""Readings of the running GPU. Missing library, missing GPU and missing rights all give None."""

from __future__ import annotations

import os
from typing import Any


class Nvml:
    """Utilisation and power of the first visible GPU."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(_first_visible())
            self._nvml = pynvml
        except Exception:  # NVML raises its own zoo of errors; a reading is never worth a run
            self._nvml = None

    def read(self) -> dict[str, float | None]:
        return {"gpu_util": self._value(self._utilisation), "power_w": self._value(self._power)}

    def _value(self, reading: Any) -> float | None:
        if self._nvml is None:
            return None
        try:
            return float(reading())
        except Exception:  # a card may refuse one reading and give the others
            return None

    def _utilisation(self) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def _power(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000.0


def _first_visible() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(visible) if visible.isdigit() else 0
