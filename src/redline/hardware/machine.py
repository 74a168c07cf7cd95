"""The machine that a plan is for: one device with its memory, rates and peaks, and the cores around it.

Three sources: this machine without importing torch (`local_machine`, for commands that must answer at once), this
machine through torch (`probe.detect_machine`), and the table of known cards (`named_gpu`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from redline.errors import UsageError, did_you_mean
from redline.hardware.host import available_cores, cpp_compiler, cpu_name, host_memory_bytes
from redline.hardware.measurements import Rates, cpu_key, gpu_key, installed_torch_version, read_rates
from redline.hardware.nvml import first_gpu
from redline.hardware.specs import SPECS, GpuSpec, spec_of
from redline.units import GIB

_ROWS, _INNER, _COLUMNS = 2048, 256, 768  # a layer of a small model, as `probe.measure` uses
_CALLS = 20  # of each measurement by numpy
_CORES = 16  # of the machine around a card from the table; the plan only derives loader threads from it


@dataclass(frozen=True)
class Machine:
    device: str  # "cuda", "mps" (the GPU of a Mac) or "cpu"
    name: str
    memory_bytes: int  # of the GPU, or of the host if it trains on the CPU
    cores: int
    capability: tuple[int, int] | None = None
    cpu_flops: float | None = None  # measured, because no table covers every CPU
    fast_bf16: bool = False
    compiler: bool = True  # there is a C++ compiler, which torch.compile needs on a CPU
    measured: Rates | None = field(default=None, hash=False)  # by hardware/probe.py on this machine
    fused_failure: str = ""  # why the fused kernels failed their trial on this card (models/fused_trial.py)

    @property
    def spec(self) -> GpuSpec | None:
        return spec_of(self.name, self.memory_bytes / 1e9) if self.device == "cuda" else None

    @property
    def fp8(self) -> bool:
        """Return whether the GPU has fp8 tensor cores (Ada, Hopper and newer)."""
        return self.capability is not None and self.capability >= (8, 9)

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in FLOP/s, or None if the card is not in the table."""
        spec = self.spec
        return spec.peak(precision) if spec else None

    def facts(self) -> dict[str, Any]:
        """Return the fields that lock.json records."""
        facts = {**asdict(self), "memory_gib": round(self.memory_bytes / GIB, 1)}
        if not self.fused_failure:
            del facts["fused_failure"]
        return facts


def cpu_machine(measured: Rates) -> Machine:
    bf16, fp32 = measured.get("bf16", 0.0), measured.get("fp32", 0.0)
    return Machine(
        "cpu",
        cpu_name(),
        host_memory_bytes(),
        available_cores(),
        cpu_flops=max(bf16, fp32),
        fast_bf16=bf16 > 1.5 * fp32,  # AMX or AVX512-BF16; other CPUs emulate bf16, which is slower than fp32
        compiler=cpp_compiler() is not None,
        measured=measured,
    )


def gpu_machine(name: str, memory_bytes: int, capability: tuple[int, int], measured: Rates | None) -> Machine:
    fast_bf16 = capability >= (8, 0)  # Ampere and newer
    return Machine("cuda", name, memory_bytes, available_cores(), capability, fast_bf16=fast_bf16, measured=measured)


def mps_machine(memory_bytes: int) -> Machine:
    """Return a Mac with its GPU. Nothing of it was measured, so a plan for it has no speed and no MFU."""
    name = f"{cpu_name()} GPU (MPS)"
    return Machine("mps", name, memory_bytes, available_cores(), compiler=cpp_compiler() is not None)


def local_machine() -> Machine | None:
    """Return this machine's first visible GPU, else its CPU if that has been measured before, else None."""
    # A CPU build of torch cannot use the GPU, whatever the driver shows.
    gpu = None if installed_torch_version().endswith("+cpu") else first_gpu()
    if gpu is not None:
        return gpu_machine(gpu.name, gpu.memory_bytes, gpu.capability, read_rates(gpu_key(gpu.name, gpu.driver)))
    if sys.platform == "darwin":
        return None  # only torch knows whether MPS can be used
    return local_cpu()


def local_cpu() -> Machine | None:
    """Return this machine's CPU if it has been measured before; `probe.detect_machine` measures it."""
    measured = read_rates(cpu_key())
    return cpu_machine(measured) if measured else None


def numpy_cpu() -> Machine:
    """Measure this machine's CPU by numpy, for a plan where torch is not installed.

    The result is not stored: torch, which trains, measures the CPU itself once it is installed.
    """
    import numpy as np

    a, b = np.ones((_ROWS, _INNER), np.float32), np.ones((_INNER, _COLUMNS), np.float32)
    target = np.empty_like(a)
    rates = {
        "fp32": 2.0 * _ROWS * _INNER * _COLUMNS / _fastest_seconds(lambda: a @ b),
        "copy": 2.0 * a.nbytes / _fastest_seconds(lambda: np.copyto(target, a)),
    }
    return cpu_machine(rates)


def _fastest_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls: other programs only slow a call down."""
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def named_gpu(name: str) -> Machine:
    """Return a machine with the named card of the table, for planning a run elsewhere."""
    spec = SPECS.get(name.lower())
    if spec is None:
        hint = did_you_mean(name, SPECS) or f"Known: auto, cpu, {', '.join(SPECS)}."
        raise UsageError(
            f"the card {name!r} is not in the table.",
            where="--gpu",
            fix=f"{hint} On a machine with that card, use --gpu auto with --probe, which measures it.",
        )
    bf16 = spec.capability >= (8, 0)
    return Machine("cuda", spec.name, int(spec.memory_gib * GIB), _CORES, spec.capability, fast_bf16=bf16)
