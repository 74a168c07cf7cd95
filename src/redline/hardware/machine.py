"""The machine as the plan sees it: plain facts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from redline.hardware.host import available_cores, compiler, cpu_name, host_memory_bytes
from redline.hardware.measured import Measured
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
    measured: Measured | None = field(default=None, hash=False)  # by `probe`, on this very machine

    @property
    def spec(self) -> GpuSpec | None:
        return spec_of(self.name, self.memory_bytes / 1e9) if self.device == "cuda" else None

    @property
    def fp8(self) -> bool:
        """Tensor cores for fp8: Ada, Hopper and newer."""
        return self.capability is not None and self.capability >= (8, 9)

    def peak(self, precision: str) -> float | None:
        spec = self.spec
        return spec.peak(precision) if spec else None

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "memory_gib": round(self.memory_bytes / (1 << 30), 1)}


def cpu_machine(measured: Measured) -> Machine:
    bf16, fp32 = measured.get("bf16", 0.0), measured.get("fp32", 0.0)
    return Machine(
        "cpu",
        cpu_name(),
        host_memory_bytes(),
        available_cores(),
        cpu_flops=max(bf16, fp32),
        fast_bf16=bf16 > 1.5 * fp32,  # AMX or AVX512-BF16; elsewhere bf16 is emulated and slower
        compiler=compiler() is not None,
        measured=measured,
    )


def gpu_machine(name: str, memory_bytes: int, capability: tuple[int, int], measured: Measured | None) -> Machine:
    return Machine(
        "cuda",
        name,
        memory_bytes,
        available_cores(),
        capability,
        fast_bf16=capability >= (8, 0),
        measured=measured,
    )
