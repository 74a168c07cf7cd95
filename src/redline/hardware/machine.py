"""The machine as the plan sees it: plain facts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from redline.errors import UsageError, did_you_mean
from redline.hardware.host import available_cores, cpp_compiler, cpu_name, host_memory_bytes
from redline.hardware.measurements import Rates, cpu_key, gpu_key, installed_torch_version, read_rates
from redline.hardware.nvml import first_gpu
from redline.hardware.specs import SPECS, GpuSpec, spec_of
from redline.units import GIB


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
    measured: Rates | None = field(default=None, hash=False)  # by `probe`, on this very machine

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


def cpu_machine(measured: Rates) -> Machine:
    bf16, fp32 = measured.get("bf16", 0.0), measured.get("fp32", 0.0)
    return Machine(
        "cpu",
        cpu_name(),
        host_memory_bytes(),
        available_cores(),
        cpu_flops=max(bf16, fp32),
        fast_bf16=bf16 > 1.5 * fp32,  # AMX or AVX512-BF16; elsewhere bf16 is emulated and slower
        compiler=cpp_compiler() is not None,
        measured=measured,
    )


def gpu_machine(name: str, memory_bytes: int, capability: tuple[int, int], measured: Rates | None) -> Machine:
    return Machine(
        "cuda",
        name,
        memory_bytes,
        available_cores(),
        capability,
        fast_bf16=capability >= (8, 0),
        measured=measured,
    )


# ----------------------------------------------------------------------------------------------------
# The machine at hand, asked without torch: for what must answer at once.


def local_machine() -> Machine | None:
    """The first visible GPU, else the CPU as it was measured; None when it was not yet: `detect` measures it."""
    card = None if installed_torch_version().endswith("+cpu") else first_gpu()  # a torch for CPUs sees no GPU
    if card is not None:
        measured = read_rates(gpu_key(card.name, card.driver))
        return gpu_machine(card.name, card.memory_bytes, card.capability, measured)
    return local_cpu()


def local_cpu() -> Machine | None:
    measured = read_rates(cpu_key())
    return cpu_machine(measured) if measured else None


# ----------------------------------------------------------------------------------------------------
# Cards by name, for planning a run on one that is not here.


_CORES = 16  # of the machine around it; the plan uses it for nothing but loader threads


def named_gpu(name: str) -> Machine:
    """The machine that a card of the table makes."""
    spec = SPECS.get(name.lower())
    if spec is None:
        hint = did_you_mean(name, SPECS) or f"Known: auto, cpu, {', '.join(SPECS)}."
        raise UsageError(
            f"no figures are known for a {name!r}.",
            where="--gpu",
            fix=f"{hint} On the card itself use --gpu auto with --probe, which measures it.",
        )
    bf16 = spec.capability >= (8, 0)
    return Machine("cuda", spec.name, int(spec.memory_gib * GIB), _CORES, spec.capability, fast_bf16=bf16)
