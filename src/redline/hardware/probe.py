"""Detect this machine through torch, and measure its matmul and copy rates.

`hardware/machine.py` answers without torch, from what this module measured and stored before.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator

import torch

from redline.errors import UserError
from redline.hardware.host import host_memory_bytes
from redline.hardware.machine import Machine, cpu_machine, gpu_machine, mps_machine
from redline.hardware.measurements import Rates, cpu_key, gpu_key, measurement_count, read_rates, store_rates
from redline.hardware.nvml import driver_cuda_version, driver_version, first_gpu

Work = Callable[[], object]

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_SHAPE = (2048, 256, 768)  # rows, inner, columns: a layer of a small model
_GPU_SIZE = 8192  # rows and columns: large enough that current cards reach their full rate
_CPU_MEASUREMENTS = 3  # other programs may have slowed the first ones down
_CPU_COPY, _GPU_COPY, _HOST_COPY = 64 << 20, 1 << 30, 256 << 20  # bytes


def detect_machine(device: str = "auto", option: str = "train.device=") -> Machine:
    """Return what this process can train on.

    The first few calls measure a CPU's rates; a GPU's are measured only by `redline doctor --probe`. `option` is what
    the user wrote before the device, for the error message.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if device == "cpu" and torch.version.cuda is not None and first_gpu() is not None:
            device = "cuda"  # refused below: to train on the CPU of a machine with a GPU, without a word, wastes hours
    if device == "cpu":
        known = read_rates(cpu_key()) if measurement_count(cpu_key()) >= _CPU_MEASUREMENTS else None
        return cpu_machine(known or measure_and_store("cpu"))
    if device == "mps":
        return _detect_mps(option)
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise UserError(
            _driver_too_old() or f"torch {torch.__version__} ({built}) finds no GPU that it can use.",
            where=option.rstrip("= "),
            fix=f"`redline doctor` says why. To train on the CPU, use {option}cpu.",
        )
    card = torch.cuda.get_device_properties(0)
    _check_capability(card.name, (card.major, card.minor), option)
    measured = read_rates(gpu_key(card.name, driver_version()))
    return gpu_machine(card.name, card.total_memory, (card.major, card.minor), measured)


def _detect_mps(option: str) -> Machine:
    if not torch.backends.mps.is_available():
        built = (
            "this Mac or its macOS is too old" if torch.backends.mps.is_built() else "this torch is built without MPS"
        )
        what = f"torch {torch.__version__} cannot use MPS, the GPU of Apple silicon: {built}."
        raise UserError(what, where=option.rstrip("= "), fix=f"To train on the CPU, use {option}cpu.")
    # CPU and GPU share the memory; Metal recommends how much of it the GPU should take.
    return mps_machine(torch.mps.recommended_max_memory() or host_memory_bytes())


def _driver_too_old() -> str:
    """Return how the driver is too old for this build of torch, or "" if it is not."""
    supported = driver_cuda_version()
    if torch.version.cuda is None or supported is None:
        return ""
    built = tuple(int(part) for part in torch.version.cuda.split("."))
    if built[0] <= supported[0]:  # within a major version every driver works with every build
        return ""
    driver = f"the NVIDIA driver {driver_version() or ''} supports CUDA {'.'.join(map(str, supported))}"
    return f"{driver}: too old for torch {torch.__version__}, which is built for CUDA {torch.version.cuda}."


def _check_capability(name: str, capability: tuple[int, int], option: str) -> None:
    """Refuse a card that is older than every one that this build of torch has kernels for."""
    built = [re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]*", arch) for arch in torch.cuda.get_arch_list()]
    oldest = min((int(found[1]), int(found[2])) for found in built if found) if any(built) else (0, 0)
    if capability < oldest:
        needs = f"torch {torch.__version__} needs {oldest[0]}.{oldest[1]} or newer"
        what = f"the {name} has compute capability {capability[0]}.{capability[1]}; {needs}."
        fix = f"Install a build of torch that supports the card, or train on the CPU with {option}cpu."
        raise UserError(what, where=option.rstrip("= "), fix=fix)


def measure(device: str = "cpu") -> Rates:
    """Return FLOP/s by precision and bytes/s by direction. What the device cannot do is left out."""
    return _measure_gpu() if device == "cuda" else _measure_cpu()


def measure_and_store(device: str = "cpu") -> Rates:
    """Measure a device and store its rates.

    Of a GPU, store the current rates, which depend on its power limit. Of a CPU, store the fastest so far, because
    other programs may slow down any single measurement.
    """
    rates = measure(device)
    if device == "cuda":
        return store_rates(gpu_key(torch.cuda.get_device_properties(0).name, driver_version()), rates)
    before = read_rates(cpu_key()) or {}
    return store_rates(cpu_key(), {name: max(rate, before.get(name, 0.0)) for name, rate in rates.items()})


# --- CPU


def _measure_cpu() -> Rates:
    rows, inner, columns = _CPU_SHAPE
    work: dict[str, Work] = {}
    for name in ("fp32", "bf16"):  # most CPUs emulate fp16, and no run uses it there
        a, b = torch.randn(rows, inner).to(_DTYPES[name]), torch.randn(inner, columns).to(_DTYPES[name])
        work[name] = lambda a=a, b=b: a @ b  # type: ignore[misc]
    source = torch.ones(_CPU_COPY, dtype=torch.uint8)
    target = torch.empty_like(source)
    work["copy"] = lambda: target.copy_(source)
    x, y, z = (torch.ones(rows, inner) for _ in range(3))
    in_caches: dict[str, Work] = {"cached": lambda: torch.mul(x, y, out=z)}  # as between two matmuls of a small model
    flops = 2.0 * rows * inner * columns
    done = {"fp32": flops, "bf16": flops, "copy": 2.0 * _CPU_COPY, "cached": 3.0 * x.nbytes}
    seconds = {**_fastest(work), **_fastest(in_caches)}  # apart, because the copy empties the caches
    return {name: done[name] / seconds[name] for name in done}


def _fastest(work: dict[str, Work], seconds: float = 0.3) -> dict[str, float]:
    """Return the seconds of the fastest single call of each; call them in turns.

    Disturbances only slow a call down, and the result is stored: a busy minute must not decide for later runs.
    """
    best = {}
    for name, call in work.items():
        call()
        best[name] = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in work.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


# --- GPU


def _measure_gpu() -> Rates:
    rates = {}
    for name, work in {**_matmuls(), "fp8": _fp8_matmul}.items():
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # the card may lack the precision
            rates[name] = 2.0 * _GPU_SIZE**3 / _median(work())
    with contextlib.suppress(RuntimeError):  # the card is full, or the host cannot pin memory
        rates |= _copies()
    torch.cuda.empty_cache()
    return rates


def _matmuls() -> dict[str, Callable[[], Work]]:
    """Return the matmuls that the card has units for; cards before Ampere would emulate tf32 and bf16."""
    modern = torch.cuda.get_device_capability() >= (8, 0)
    names = [name for name in _DTYPES if modern or name not in ("tf32", "bf16")]
    return {name: lambda name=name: _matmul(name) for name in names}  # type: ignore[misc]


def _matmul(name: str) -> Work:
    a, b = (torch.randn(_GPU_SIZE, _GPU_SIZE, device="cuda").to(_DTYPES[name]) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        with _tf32(name == "tf32"):
            torch.mm(a, b, out=out)

    return work


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _fp8_matmul() -> Work:
    a = torch.randn(_GPU_SIZE, _GPU_SIZE, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(_GPU_SIZE, _GPU_SIZE, device="cuda").to(torch.float8_e4m3fn).t()  # _scaled_mm wants b column-major
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _copies() -> Rates:
    source = torch.ones(_GPU_COPY, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    host = torch.ones(_HOST_COPY, dtype=torch.uint8).pin_memory()
    part = target[:_HOST_COPY]
    return {
        "copy": 2.0 * _GPU_COPY / _median(lambda: target.copy_(source)),  # each byte is read once and written once
        "to_device": _HOST_COPY / _median(lambda: part.copy_(host, non_blocking=True)),
        "to_host": _HOST_COPY / _median(lambda: host.copy_(part, non_blocking=True)),
    }


def _median(work: Work, seconds: float = 0.3) -> float:
    """Return the median seconds of a call by the GPU's clock, after it ran long enough to be as warm as in training."""
    once = min(_timed(work, 3))
    count = min(500, max(10, round(seconds / once)))
    _timed(work, count)
    spent = sorted(_timed(work, count))
    return spent[count // 2]


def _timed(work: Work, count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000.0 for before, after in itertools.pairwise(marks)]
