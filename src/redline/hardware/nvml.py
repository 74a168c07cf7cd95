"""Read GPUs through NVML: the visible devices, their sensors during a run, and warnings about throttling.

A missing library, a missing GPU and a missing permission all give None: a sensor reading must never stop a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from redline.units import GIB

T = TypeVar("T")

_NOTICED_BYTES = 2 * GIB  # in use by others before a run starts; drivers and desktops need less
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0  # NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU

# Bits of NVML's clock event reasons → the words in `throttle` of step events.
_THROTTLE_REASONS = {
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
# Reasons that point to a fault of the machine, unlike the power cap, which a busy card reaches often.
SLOWDOWNS = {
    "thermal": "it is too hot",
    "hw_thermal": "it is too hot",
    "hw_slowdown": "its hardware slows it down",
    "power_brake": "the power supply slows it down",
}


@dataclass(frozen=True)
class Reading:
    """The sensors of a card at one moment. None: the card does not report that value."""

    gpu_util: float | None = None  # percent of the time in which any kernel ran
    gpu_memory_gib: float | None = None  # used by all processes
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None  # why the clock is below its maximum: reasons joined by +, or empty
    energy_j: float | None = None  # since the driver was loaded: the difference of two readings is the energy between

    def fields(self) -> dict[str, float | str | None]:
        """Return the fields that a step event carries."""
        names = ("gpu_util", "gpu_memory_gib", "power_w", "sm_clock_mhz", "temperature_c", "throttle", "energy_j")
        return {name: getattr(self, name) for name in names}

    def numbers(self) -> list[float | None]:
        """Return all values as numbers, for ranks to exchange; the throttle reasons as NVML's bits."""
        values = vars(self) | {"throttle": None if self.throttle is None else float(_bits(self.throttle))}
        return list(values.values())

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Reading:
        """Return the reading of which `numbers` returned these; NaN stands for None."""
        known = [None if math.isnan(value) else round(value, 3) for value in numbers]
        values: dict[str, Any] = dict(zip((field.name for field in fields(cls)), known, strict=True))
        bits = values["throttle"]
        return cls(**values | {"throttle": None if bits is None else throttle_names(int(bits))})


@dataclass(frozen=True)
class GpuInfo:
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    driver: str | None


class Nvml:
    """Read the sensors of a visible GPU repeatedly. `number` counts in CUDA's order."""

    def __init__(self, number: int = 0) -> None:
        self._nvml = open_nvml()
        handles = none_on_error(lambda: visible_handles(self._nvml)) if self._nvml else None
        # A scheduler may show each process only its own GPU.
        self._handle: Any = handles[number if number < len(handles) else 0] if handles else None
        # A MIG slice has its own memory and utilisation; power, clocks and temperature belong to the whole card.
        self._whole: Any = _whole_card(self._nvml, self._handle) if handles else None
        self._limit = self._read_card("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)
        self._max_clock = self._read_card("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)

    def read(self) -> Reading:
        if self._handle is None:
            return Reading()
        nvml, handle = self._nvml, self._handle
        bits = none_on_error(lambda: throttle_bits(nvml, self._whole))
        return Reading(
            gpu_util=none_on_error(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            gpu_memory_gib=none_on_error(lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, 3)),
            power_w=self._read_card("nvmlDeviceGetPowerUsage", scale=1e-3),
            power_limit_w=self._limit,
            sm_clock_mhz=self._read_card("nvmlDeviceGetClockInfo", _SM_CLOCK),
            sm_clock_max_mhz=self._max_clock,
            memory_clock_mhz=self._read_card("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            temperature_c=self._read_card("nvmlDeviceGetTemperature", _GPU_SENSOR),
            throttle=None if bits is None else throttle_names(bits),
            energy_j=self._read_card("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
        )

    def _read_card(self, function: str, *arguments: int, scale: float = 1.0) -> float | None:
        if self._whole is None:
            return None
        return none_on_error(lambda: round(getattr(self._nvml, function)(self._whole, *arguments) * scale, 3))


def open_nvml() -> Any:
    """Return the initialised library, or None if the library, the driver or the permission is missing."""

    def start() -> Any:
        import pynvml

        pynvml.nvmlInit()
        return pynvml

    return none_on_error(start)


def none_on_error(query: Callable[[], T]) -> T | None:
    """Return the result of `query`, or None if it fails.

    NVML raises many error classes of its own, and a card may refuse one value and report the others.
    """
    try:
        return query()
    except Exception:
        return None


def visible_handles(nvml: Any) -> list[Any]:
    """Return the cards, or MIG slices of cards, that CUDA shows to this process, in CUDA's order.

    CUDA_VISIBLE_DEVICES holds indices and UUID prefixes; CUDA ignores everything from the first invalid entry on. NVML
    counts in PCI bus order. CUDA does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID: without it, different cards in one
    machine can be swapped.
    """
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [device for card in cards for device in _devices(nvml, card)]
    found = []
    for entry in listed.split(","):
        handle = _visible_device(nvml, cards, entry.strip())
        if handle is None:
            break
        found.append(handle)
    return found


def _visible_device(nvml: Any, cards: list[Any], entry: str) -> Any:
    """Return the device that an entry of CUDA_VISIBLE_DEVICES names, or None."""
    if entry.isdigit():
        return next(iter(_devices(nvml, cards[int(entry)])), None) if int(entry) < len(cards) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    exact = none_on_error(lambda: nvml.nvmlDeviceGetHandleByUUID(entry))
    if exact is not None:
        return exact
    candidates = [*cards, *(device for card in cards for device in _devices(nvml, card))]
    return next((handle for handle in candidates if (_uuid(nvml, handle) or "").startswith(entry)), None)


def _devices(nvml: Any, card: Any) -> list[Any]:
    """Return the card itself, or its slices if it is in MIG mode."""
    if not none_on_error(lambda: nvml.nvmlDeviceGetMigMode(card)[0]):
        return [card]
    count = none_on_error(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(card)) or 0
    slices = [none_on_error(partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, index)) for index in range(count)]
    return [handle for handle in slices if handle is not None]


def _whole_card(nvml: Any, handle: Any) -> Any:
    is_slice = none_on_error(lambda: bool(nvml.nvmlDeviceIsMigDeviceHandle(handle)))
    return none_on_error(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) if is_slice else handle


def throttle_bits(nvml: Any, handle: Any) -> int:
    # The library renamed this function; an old driver knows only the old name.
    old, new = "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons"
    return int(getattr(nvml, old if hasattr(nvml, old) else new)(handle))


def _bits(names: str) -> int:
    return sum(bit for bit, name in _THROTTLE_REASONS.items() if name in names.split("+"))


def throttle_names(bits: int) -> str:
    return "+".join(name for bit, name in _THROTTLE_REASONS.items() if bits & bit)


def _uuid(nvml: Any, handle: Any) -> str | None:
    return none_on_error(lambda: text(nvml.nvmlDeviceGetUUID(handle)))


def text(value: str | bytes) -> str:
    """Return a string of NVML, which older versions of the library return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def driver_version() -> str | None:
    nvml = open_nvml()
    return none_on_error(lambda: text(nvml.nvmlSystemGetDriverVersion())) if nvml else None


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports."""
    nvml = open_nvml()
    number = none_on_error(lambda: int(nvml.nvmlSystemGetCudaDriverVersion())) if nvml else None
    return None if number is None else (number // 1000, number % 1000 // 10)  # 12040 is 12.4


def foreign_use() -> str:
    """Return a warning if other processes hold memory of the first visible GPU; "" if they hold next to none.

    Call it before this process uses the GPU. In a container NVML reports process ids of the host, so this process could
    not tell its own memory from that of others later.
    """
    nvml = open_nvml()
    handles = none_on_error(lambda: visible_handles(nvml)) if nvml else None
    if not handles:
        return ""
    memory = none_on_error(lambda: nvml.nvmlDeviceGetMemoryInfo(handles[0], nvml.nvmlMemory_v2))
    memory = memory or none_on_error(lambda: nvml.nvmlDeviceGetMemoryInfo(handles[0]))
    if memory is None or memory.used < _NOTICED_BYTES:
        return ""
    processes = none_on_error(lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handles[0]))) or []
    who = ", ".join(f"process {process.pid}" for process in processes[:5]) or "another program"
    held = f"{memory.used / GIB:.1f} of {memory.total / GIB:.1f} GiB of the GPU's memory are in use already ({who})"
    return f"{held}: the run may run out of memory and will be slower. Stop the other program, or choose another GPU"


def first_gpu() -> GpuInfo | None:
    """Return the first visible GPU: the one that a run on one GPU uses."""
    nvml = open_nvml()
    handles = none_on_error(lambda: visible_handles(nvml)) if nvml else None
    return none_on_error(lambda: _gpu_info(nvml, handles[0])) if handles else None


def _gpu_info(nvml: Any, handle: Any) -> GpuInfo:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(_whole_card(nvml, handle))
    driver = none_on_error(lambda: text(nvml.nvmlSystemGetDriverVersion()))
    return GpuInfo(text(nvml.nvmlDeviceGetName(handle)), usable_memory(nvml, handle), (major, minor), driver)


def usable_memory(nvml: Any, handle: Any) -> int:
    """Return the memory that CUDA can allocate: the card's memory without the driver's own part."""
    memory = none_on_error(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2))
    if memory is not None:
        return int(memory.total - memory.reserved)
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


# Consecutive log lines after which a run warns. A well-used card touches its power limit often, so only one that never
# leaves it is worth a warning; heat and power brakes are worth one as soon as they are not a blip.
_POWER_LINES, _SLOWDOWN_LINES = 20, 3


@dataclass(frozen=True)
class ThrottleWarning:
    kind: str  # slowdown or power
    text: str


class ThrottleWatch:
    """Warn once in a run that the card is slowed down, and once that it stays at its power limit."""

    def __init__(self) -> None:
        self._slowdown_lines = self._power_lines = 0
        self._warned: set[str] = set()

    def note(self, reading: Reading) -> ThrottleWarning | None:
        """Count the reading of one log line; return the warning that is due now, if any."""
        reasons = (reading.throttle or "").split("+")
        slowdown = next((SLOWDOWNS[reason] for reason in reasons if reason in SLOWDOWNS), None)
        self._slowdown_lines = self._slowdown_lines + 1 if slowdown else 0
        self._power_lines = self._power_lines + 1 if "power_cap" in reasons else 0
        if slowdown and self._slowdown_lines == _SLOWDOWN_LINES and self._first_time("slowdown"):
            degrees = "" if reading.temperature_c is None else f" ({reading.temperature_c:.0f} °C)"
            what = f"the GPU is throttled: {slowdown}{degrees}{_clock(reading)}. Check its cooling and power supply"
            return ThrottleWarning("slowdown", what)
        if self._power_lines == _POWER_LINES and self._first_time("power"):
            watts = "" if reading.power_limit_w is None else f" of {reading.power_limit_w:.0f} W"
            what = f"the GPU stays at its power limit{watts}{_clock(reading)}. Only a higher limit would make it faster"
            return ThrottleWarning("power", what)
        return None

    def _first_time(self, kind: str) -> bool:
        first = kind not in self._warned
        self._warned.add(kind)
        return first


def _clock(reading: Reading) -> str:
    clock, most = reading.sm_clock_mhz, reading.sm_clock_max_mhz
    if not clock or not most:
        return ""
    return f"; its clock is {clock:.0f} of {most:.0f} MHz ({100 * clock / most:.0f} %)"
