"""The machine as the plan sees it: plain facts."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

from redline.hardware.specs import GpuSpec, spec_of


@dataclass(frozen=True)
class Machine:
    device: str  # "cuda" or "cpu"
    name: str
    memory_bytes: int
    cores: int
    capability: tuple[int, int] | None = None
    cpu_flops: float | None = None  # measured: no table knows every CPU
    fast_bf16: bool = False
    compiler: bool = True  # a C++ compiler, which torch.compile needs on a CPU

    @property
    def spec(self) -> GpuSpec | None:
        return spec_of(self.name, self.memory_bytes / 1e9) if self.device == "cuda" else None

    def peak(self, precision: str) -> float | None:
        spec = self.spec
        return spec.peak(precision) if spec else None

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "memory_gib": round(self.memory_bytes / (1 << 30), 1)}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 8 << 30
