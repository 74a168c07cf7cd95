"""Cards that are not there."""

# ruff: noqa: N802, N815 - the library's own names

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class FakeCard:
    """One card, or a slice of one; `None` is a question that it refuses."""

    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa-0000"
    capability: tuple[int, int] | None = (9, 0)
    total: int = 143 << 30
    reserved: int = 1 << 30
    used: int = 2 << 30
    util: int | None = 97
    milliwatts: int | None = 412_500
    limit: int | None = 700_000
    clock: int | None = 1500
    max_clock: int | None = 1980
    memory_clock: int | None = 3201
    temperature: int | None = 61
    throttle: int | None = 0
    millijoules: int | None = 90_000_500
    ecc: bool | None = True
    persistence: bool | None = True
    mig: bool | None = None
    slices: list[FakeCard] = field(default_factory=list)
    parent: FakeCard | None = None
    processes: list[Any] = field(default_factory=list)


class NVMLError(Exception):
    pass


def given(value: Any) -> Any:
    if value is None:
        raise NVMLError("Not Supported")
    return value


class FakeNvml:
    """NVML's own names, over invented cards."""

    nvmlMemory_v2 = 2

    def __init__(self, *cards: FakeCard, driver: str = "580.95.05", cuda: int = 13000) -> None:
        self.cards, self.driver, self.cuda = cards, driver, cuda
        for card in cards:
            for part in card.slices:
                part.parent = card

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        everything = [*self.cards, *(part for card in self.cards for part in card.slices)]
        return given(next((card for card in everything if card.uuid == uuid), None))

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> bytes:
        return card.name.encode()  # as old versions of the library give it

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        return [int(given(card.mig)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeCard:
        return given(card.slices[index] if index < len(card.slices) else None)

    def nvmlDeviceIsMigDeviceHandle(self, card: FakeCard) -> int:
        return int(card.parent is not None)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: FakeCard) -> FakeCard:
        return given(card.parent)

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        return given(card.capability)

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:
        return SimpleNamespace(
            total=card.total, used=card.used, free=card.total - card.reserved - card.used, reserved=card.reserved
        )

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        return SimpleNamespace(gpu=given(card.util))

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:
        return given(card.milliwatts)

    def nvmlDeviceGetTotalEnergyConsumption(self, card: FakeCard) -> int:
        return given(card.millijoules)

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:
        return given(card.limit)

    def nvmlDeviceGetClockInfo(self, card: FakeCard, kind: int) -> int:
        return given({1: card.clock, 2: card.memory_clock}[kind])

    def nvmlDeviceGetMaxClockInfo(self, card: FakeCard, kind: int) -> int:
        return given({1: card.max_clock}[kind])

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:
        return given({0: card.temperature}[sensor])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: FakeCard) -> int:
        return given(card.throttle)

    def nvmlDeviceGetEccMode(self, card: FakeCard) -> list[int]:
        return [int(given(card.ecc)), 0]

    def nvmlDeviceGetPersistenceMode(self, card: FakeCard) -> int:
        return int(given(card.persistence))

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[Any]:
        return card.processes


@pytest.fixture
def card() -> type[FakeCard]:
    return FakeCard


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Put cards into this machine, and with `visible` set CUDA_VISIBLE_DEVICES."""

    def plug(*cards: FakeCard, visible: str | None = None, **options: Any) -> FakeNvml:
        fake = FakeNvml(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return plug


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache of one's own."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
