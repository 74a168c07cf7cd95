"""Readings of the running GPU. Missing library, missing GPU and missing rights all give None."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redline.units import GIB

T = TypeVar("T")

# bits of NVML's clock event reasons
_REASONS = {
    0x01: "idle",
    0x02: "clock_setting",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display",
}


@dataclass(frozen=True)
class Reading:
    """One look at a card; None is what it did not tell."""

    gpu_util: float | None = None  # percent of the time in which any kernel ran
    gpu_memory_gib: float | None = None  # of all processes
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None  # why the clock is below its maximum, as words joined by +; empty when it is not
    energy_j: float | None = None  # spent since the driver was loaded: two readings give what lies between them

    def fields(self) -> dict[str, float | str | None]:
        """What a step event carries."""
        names = ("gpu_util", "gpu_memory_gib", "power_w", "sm_clock_mhz", "temperature_c", "throttle", "energy_j")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class GpuInfo:
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    driver: str | None


class Nvml:
    """The first visible GPU, read again and again."""

    def __init__(self) -> None:
        self._nvml = open_nvml()
        handles = none_on_error(lambda: visible_handles(self._nvml)) if self._nvml else None
        self._handle: Any = handles[0] if handles else None
        # a slice of a card has memory and processes of its own; power, clocks and heat are the whole card's
        self._whole: Any = whole_card(self._nvml, self._handle) if handles else None
        self._limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)
        self._max_clock = self._ask("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)

    def read(self) -> Reading:
        if self._handle is None:
            return Reading()
        nvml, handle = self._nvml, self._handle
        bits = none_on_error(lambda: throttle_bits(nvml, self._whole))
        return Reading(
            gpu_util=none_on_error(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            gpu_memory_gib=none_on_error(lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, 3)),
            power_w=self._ask("nvmlDeviceGetPowerUsage", scale=1e-3),
            power_limit_w=self._limit,
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", _SM_CLOCK),
            sm_clock_max_mhz=self._max_clock,
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            temperature_c=self._ask("nvmlDeviceGetTemperature", _ON_THE_CHIP),
            throttle=None if bits is None else throttle_names(bits),
            energy_j=self._ask("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
        )

    def _ask(self, question: str, *about: int, scale: float = 1.0) -> float | None:
        if self._whole is None:
            return None
        return none_on_error(lambda: round(getattr(self._nvml, question)(self._whole, *about) * scale, 3))


_SM_CLOCK, _MEMORY_CLOCK, _ON_THE_CHIP = 1, 2, 0  # NVML's own numbers


def open_nvml() -> Any:
    """The library, ready; None when it, the driver or the right to ask is missing."""

    def start() -> Any:
        import pynvml

        pynvml.nvmlInit()
        return pynvml

    return none_on_error(start)


def none_on_error(question: Callable[[], T]) -> T | None:
    """NVML raises its own zoo of errors, and a card may refuse one reading and give the others."""
    try:
        return question()
    except Exception:  # a reading is never worth a run
        return None


def visible_handles(nvml: Any) -> list[Any]:
    """The cards, or slices of cards, that CUDA shows this process, in its order.

    CUDA takes indices and beginnings of UUIDs, and stops at the first that means nothing. Its indices follow the bus
    only with CUDA_DEVICE_ORDER=PCI_BUS_ID; unlike cards in one machine can be swapped without it.
    """
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return [part for card in cards for part in _parts(nvml, card)]
    found = []
    for word in (word.strip() for word in asked.split(",")):
        handle = _named(nvml, cards, word)
        if handle is None:
            break
        found.append(handle)
    return found


def _named(nvml: Any, cards: list[Any], word: str) -> Any:
    if word.isdigit():
        return next(iter(_parts(nvml, cards[int(word)])), None) if int(word) < len(cards) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    exact = none_on_error(lambda: nvml.nvmlDeviceGetHandleByUUID(word))
    if exact is not None:
        return exact
    everything = [*cards, *(part for card in cards for part in _parts(nvml, card))]
    return next((handle for handle in everything if (uuid_of(nvml, handle) or "").startswith(word)), None)


def _parts(nvml: Any, card: Any) -> list[Any]:
    """The card itself, or in MIG mode its slices."""
    mode = none_on_error(lambda: nvml.nvmlDeviceGetMigMode(card)[0])
    if not mode:
        return [card]
    count = none_on_error(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(card)) or 0
    slices = [none_on_error(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, index)) for index in range(count)]
    return [handle for handle in slices if handle is not None]


def whole_card(nvml: Any, handle: Any) -> Any:
    is_slice = none_on_error(lambda: bool(nvml.nvmlDeviceIsMigDeviceHandle(handle)))
    return none_on_error(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) if is_slice else handle


def throttle_bits(nvml: Any, handle: Any) -> int:
    # the library renamed it; an old driver knows the old name only
    old, new = "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons"
    return int(getattr(nvml, old if hasattr(nvml, old) else new)(handle))


def throttle_names(bits: int) -> str:
    return "+".join(word for bit, word in _REASONS.items() if bits & bit)


def uuid_of(nvml: Any, handle: Any) -> str | None:
    return none_on_error(lambda: text(nvml.nvmlDeviceGetUUID(handle)))


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def driver_version() -> str | None:
    nvml = open_nvml()
    return none_on_error(lambda: text(nvml.nvmlSystemGetDriverVersion())) if nvml else None


def first_gpu() -> GpuInfo | None:
    """The card that a run would use."""
    nvml = open_nvml()
    handles = none_on_error(lambda: visible_handles(nvml)) if nvml else None
    return none_on_error(lambda: _card(nvml, handles[0])) if handles else None


def _card(nvml: Any, handle: Any) -> GpuInfo:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole_card(nvml, handle))
    driver = none_on_error(lambda: text(nvml.nvmlSystemGetDriverVersion()))
    return GpuInfo(text(nvml.nvmlDeviceGetName(handle)), usable_memory(nvml, handle), (major, minor), driver)


def usable_memory(nvml: Any, handle: Any) -> int:
    """What CUDA can give: the card's memory without the driver's own part of it."""
    whole = none_on_error(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2))
    if whole is not None:
        return int(whole.total - whole.reserved)
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


# ----------------------------------------------------------------------------------------------------
# Saying once that a card runs below its clock, and what that costs.


# A card that trains well touches its power limit often; only one that never leaves it is worth a sentence. Heat and
# brakes are worth one as soon as they are not a blip.
_POWER_LINES, _HEAT_LINES = 20, 3
SLOWDOWNS = {
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
        heat = next((SLOWDOWNS[word] for word in words if word in SLOWDOWNS), None)
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
