"""The checks of `redline doctor`: pure functions from the facts of a machine to lines that are ok, warn or fail.

`hardware/facts.py` collects the facts. `CHECKS` lists the checks in the order in which they are printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redline.errors import TORCH_REQUIREMENT, dependency_hint, install_hint, is_checkout
from redline.hardware.compiled_kernels import kernels_off
from redline.hardware.facts import Facts, FolderFacts, GpuFacts, Package
from redline.hardware.nvml import SLOWDOWNS
from redline.hardware.specs import spec_of
from redline.units import GIB, price_problem

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 12)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)

_CPU_WORKS = "training works on the CPU, slowly"
_MPS_FIX = "train.device=auto uses it, in fp32. If a loss looks wrong, compare with train.device=cpu, and report it."
_CUDA_TORCH = (
    "Install a torch that is built for CUDA: `make setup` selects the one that fits."
    if is_checkout()
    else "Install a torch that is built for CUDA; torch's own page has the command for each driver."
)


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: str  # ok, warn or fail
    detail: str
    fix: str = ""


def run_checks(facts: Facts) -> list[Check]:
    return [line for check in CHECKS for line in check(facts)]


# --- Python, torch, CUDA, NCCL


def check_python(facts: Facts) -> list[Check]:
    version = _dotted(facts.python)
    if facts.python[:2] < OLDEST_PYTHON:
        return [
            Check("python", "fail", f"{version} is too old", "Install Python 3.11 or 3.12 and set up redline again.")
        ]
    if facts.python[:2] > NEWEST_PYTHON:
        return [Check("python", "warn", f"{version} is not tested", "If something fails, use Python 3.11 or 3.12.")]
    return [Check("python", "ok", version)]


def check_torch(facts: Facts) -> list[Check]:
    torch = facts.torch
    tested = f"{_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}"
    install = f"Install torch {tested}: {dependency_hint(TORCH_REQUIREMENT)}."
    if not torch.version:
        return [Check("torch", "fail", f"cannot be imported: {torch.error}", install)]
    version = _numbers(torch.version.split("+")[0])[:2]
    if version < OLDEST_TORCH:
        return [Check("torch", "fail", f"{torch.version} is too old", install)]
    if version > NEWEST_TORCH:
        return [Check("torch", "warn", f"{torch.version} is not tested", f"If something fails, use {tested}.")]
    return [Check("torch", "ok", torch.version)]


def check_cuda(facts: Facts) -> list[Check]:
    """Compare the CUDA version of torch with the driver's.

    Within one major version any driver works with any build; a newer driver works with older builds.
    """
    built, driver = facts.torch.cuda, facts.driver_cuda
    if not built:
        status, fix = ("fail", _CUDA_TORCH) if facts.gpus else ("ok", "")
        return [Check("cuda", status, "torch is built without CUDA", fix)]
    if not driver and facts.torch.available:
        fix = f"Restore nvidia-ml-py: {dependency_hint('nvidia-ml-py')}. Step events then include power and clocks."
        return [
            Check(
                "cuda",
                "warn",
                f"torch is built for {built}; NVML does not report the driver",
                fix,
            )
        ]
    if not driver:
        return [Check("cuda", "warn", f"torch is built for {built}, but no driver answers", _driver_fix(facts))]
    versions = f"torch is built for {built}, driver {facts.driver} supports {driver}"
    if _driver_too_old(facts):
        fix = f"Update the driver, or install a torch that is built for CUDA {_numbers(driver)[0]}."
        return [Check("cuda", "fail", f"{versions}: the driver is too old", fix)]
    return [Check("cuda", "ok", versions)]


def check_nccl(facts: Facts) -> list[Check]:
    if facts.torch.nccl:
        return [Check("nccl", "ok", facts.torch.nccl)]
    if facts.visible > 1:
        fix = "Install a torch that is built with NCCL; all CUDA builds for Linux are."
        return [Check("nccl", "warn", "missing: several GPUs cannot train together", fix)]
    return [Check("nccl", "ok", "not in this torch; needed only for several GPUs")]


def _driver_too_old(facts: Facts) -> bool:
    built, driver = facts.torch.cuda, facts.driver_cuda
    return bool(built and driver and _numbers(driver)[0] < _numbers(built)[0])


def _driver_fix(facts: Facts) -> str:
    if not facts.pci_gpu:
        return f"Without an NVIDIA GPU, {_CPU_WORKS}."
    return "Install the NVIDIA driver. In a container, start it with the GPUs (docker run --gpus all)."


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# --- GPUs


def check_gpus(facts: Facts) -> list[Check]:
    mps = [Check("MPS", "warn", "available, untested by us", _MPS_FIX)] if facts.torch.mps else []
    return [_gpu_usable(facts), *mps, *(line for card in facts.gpus for line in _one_gpu(card))]


def _gpu_usable(facts: Facts) -> Check:
    """Return whether torch can compute on a GPU; if there is one and torch cannot use it, say why."""
    torch, count = facts.torch, len(facts.gpus)
    if torch.available:
        unsupported = next((card for card in facts.gpus if not _has_kernels(card, torch.architectures)), None)
        if unsupported:
            capability = _dotted(unsupported.capability or ())
            fix = "Install a torch that is built for this card, or exclude the card with CUDA_VISIBLE_DEVICES."
            detail = f"torch has no kernels for {unsupported.name} (compute capability {capability})"
            return Check("gpu", "fail", detail, fix)
        return Check("gpu", "ok", f"{facts.visible or count or 1} of {count or 1} visible to torch")
    if not facts.gpus:
        if facts.pci_gpu:
            detail = f"an NVIDIA card is installed, but no driver answers; {_CPU_WORKS}"
            return Check("gpu", "warn", detail, _driver_fix(facts))
        works = "training uses MPS" if torch.mps else _CPU_WORKS
        return Check("gpu", "warn", f"no NVIDIA GPU: {works}", "For large models, use a machine with one.")
    name, hidden = facts.gpus[0].name, facts.environment.get("CUDA_VISIBLE_DEVICES")
    if not torch.version:
        return Check("gpu", "fail", f"{name} is present, but torch cannot be imported", "Fix torch first.")
    if not torch.cuda:
        return Check("gpu", "fail", f"{name} is present, but torch {torch.version} is a CPU build", _CUDA_TORCH)
    if not facts.visible and hidden is not None:
        fix = "Unset it, or list cards as in CUDA_VISIBLE_DEVICES=0."
        return Check("gpu", "fail", f"CUDA_VISIBLE_DEVICES={hidden!r} hides {count} of {count} GPUs", fix)
    if not facts.visible:
        fix = "Create a slice with `nvidia-smi mig -cgi … -C`, or disable MIG with `nvidia-smi -mig 0`."
        return Check("gpu", "fail", "the card is in MIG mode and has no slice", fix)
    if _driver_too_old(facts):
        return Check("gpu", "fail", f"torch cannot use {name}: the driver is too old", check_cuda(facts)[0].fix)
    fix = "Run `nvidia-smi`. If it reports an error, restart the machine or ask its administrator."
    return Check("gpu", "fail", f"torch cannot use {name}: {torch.error or 'torch gives no reason'}", fix)


def _has_kernels(card: GpuFacts, architectures: tuple[str, ...]) -> bool:
    """Return whether a torch that is built for `architectures` runs on the card.

    Binary code (sm_) runs on cards of the same major version and the same or a newer minor version; intermediate code
    (compute_) runs on every newer card.
    """
    if card.capability is None or not architectures:
        return True
    major, minor = card.capability
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = int("".join(c for c in digits if c.isdigit()) or 0)  # "90a" is 90
        if kind == "compute" and number <= 10 * major + minor:
            return True
        if kind == "sm" and number // 10 == major and number % 10 <= minor:
            return True
    return False


def _one_gpu(card: GpuFacts) -> list[Check]:
    name = f"gpu {card.index}"
    capability = f", compute capability {_dotted(card.capability)}" if card.capability else ""
    lines = [
        Check(name, "ok", f"{card.name}{capability}, {card.memory_bytes / GIB:.1f} GiB"),
        _gpu_memory(name, card),
        _gpu_modes(name, card),
        _triton_kernels(name, card),
    ]
    slow = [word for word in card.throttle.split("+") if word in SLOWDOWNS]
    if slow:
        fix = "Check its cooling and power supply; until then it is slower than planned."
        lines.append(Check(f"{name} clock", "warn", f"throttled: {', '.join(slow)}", fix))
    return lines


def _triton_kernels(name: str, card: GpuFacts) -> Check:
    off = kernels_off(card.capability)
    if not off:
        return Check(f"{name} kernels", "ok", "every Triton kernel was compiled for this architecture")
    count = (
        "none of the Triton kernels is used" if len(set(off.values())) == 1 else f"{len(off)} Triton kernels are off"
    )
    fix = "Nothing to do: plain torch does their work, more slowly."
    return Check(f"{name} kernels", "warn", f"{count}: {next(iter(off.values()))}", fix)


def _gpu_memory(name: str, card: GpuFacts) -> Check:
    free = f"{card.free_bytes / GIB:.1f} of {card.memory_bytes / GIB:.1f} GiB free"
    if card.free_bytes >= 0.95 * card.memory_bytes - GIB:  # the driver itself uses a little
        return Check(f"{name} memory", "ok", free)
    users = ", ".join(
        f"{process.name} (process {process.pid}{'' if process.bytes is None else f', {process.bytes / GIB:.1f} GiB'})"
        for process in card.processes
    )
    fix = "Stop these processes, choose another card with CUDA_VISIBLE_DEVICES, or lower train.memory_fraction."
    return Check(f"{name} memory", "warn", f"{free}; used by {users or 'processes outside this container'}", fix)


def _gpu_modes(name: str, card: GpuFacts) -> Check:
    modes = {"ECC": card.ecc, "persistence": card.persistence, "MIG": card.mig}
    detail = ", ".join(f"{mode} {'on' if state else 'off'}" for mode, state in modes.items() if state is not None)
    fixes = []
    if card.ecc is False:
        fixes.append("Without ECC, memory errors go undetected: run nvidia-smi -e 1, then restart.")
    if card.persistence is False:
        fixes.append("Without persistence mode, every start waits for the driver: run nvidia-smi -pm 1.")
    if card.mig:
        fixes.append("A MIG slice has a part of the card's speed: nvidia-smi -mig 0 restores the whole card.")
    return Check(f"{name} modes", "warn" if fixes else "ok", detail or "unknown", " ".join(fixes))


# --- what was tested with a tiny tensor

_OTHER_ATTENTION = "model.attention=auto takes the fastest of the other backends."
_CAPABILITIES = {  # self-test → (name of the check, what to do without it)
    "bf16": ("bf16", "Without it, training falls back to fp16 or fp32; train.precision=fp32 always works."),
    "fp8": ("fp8", "Use train.precision=bf16."),
    "cudnn": ("cuDNN attention", _OTHER_ATTENTION),
    "flash": ("flash attention", _OTHER_ATTENTION),
    "efficient": ("efficient attention", _OTHER_ATTENTION),
    "flex": ("flex attention", _OTHER_ATTENTION),
    "compile": ("torch.compile", "Until then, use train.compile=false, which is slower."),
}


def check_capabilities(facts: Facts) -> list[Check]:
    return [_capability(test, facts) for test in _CAPABILITIES]


def _capability(test: str, facts: Facts) -> Check:
    name, fallback = _CAPABILITIES[test]
    result = facts.selftests.get(test)
    if result is None and test == "compile":
        return _cpu_compile(facts)
    if result is None and facts.gpus:
        return Check(name, "warn", "not tested: torch cannot use the GPU", "Fix that first.")
    if result is None:
        return Check(name, "warn", "not tested: no NVIDIA GPU")
    if result.works:
        return Check(name, "ok", "works")
    capability = next((card.capability for card in facts.gpus if card.capability), None)
    if test == "fp8" and capability is not None and capability < (8, 9):
        return Check(name, "warn", f"needs compute capability 8.9; this card has {_dotted(capability)}", fallback)
    if test == "bf16":
        expected = capability is not None and capability < (8, 0)  # cards before Ampere have no bf16
        return Check(name, "warn" if expected else "fail", result.detail, fallback)
    if "no C compiler" in result.detail or "Python.h" in result.detail:
        fallback = f"Install a C compiler and Python's headers (apt install gcc python3-dev). {fallback}"
    return Check(name, "warn", result.detail, fallback)


def _cpu_compile(facts: Facts) -> Check:
    if facts.compiler:
        return Check("torch.compile", "ok", f"{facts.compiler} found")
    fix = "Install one (apt install g++); until then, train.compile=auto disables compilation."
    return Check("torch.compile", "warn", "no C++ compiler", fix)


# --- the host

_LOW_MEMORY = 4 * GIB
_LOW_DISK, _MIN_DISK = 10 * GIB, GIB


def check_memory(facts: Facts) -> list[Check]:
    detail = f"{facts.memory / GIB:.1f} GiB"
    if facts.physical_memory is not None and facts.memory < facts.physical_memory:
        detail += f" of the machine's {facts.physical_memory / GIB:.1f} GiB, by the container's limit"
    if facts.memory_free is None:
        return [Check("memory", "ok", detail)]
    free = min(facts.memory_free, facts.memory)
    detail += f", {free / GIB:.1f} GiB free"
    if free < _LOW_MEMORY:
        fix = "Stop other programs, or raise the container's limit; otherwise the system may kill the run."
        return [Check("memory", "warn", detail, fix)]
    return [Check("memory", "ok", detail)]


def check_cores(facts: Facts) -> list[Check]:
    detail = f"{facts.cores} of {facts.machine_cores} usable"
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > facts.cores:
        fix = f"Unset OMP_NUM_THREADS, or set it to {facts.cores}: more threads than cores slow each other down."
        return [Check("cores", "warn", f"{detail}, but OMP_NUM_THREADS={threads}", fix)]
    return [Check("cores", "ok", detail)]


def check_shared_memory(facts: Facts) -> list[Check]:
    size = facts.shared_memory
    detail = "there is no /dev/shm" if size is None else f"{size / GIB:.2f} GiB"
    if facts.visible > 1 and (size or 0) < GIB:
        fix = "Start the container with --ipc=host or --shm-size=8g: GPUs of one machine exchange data through it."
        return [Check("/dev/shm", "warn", detail, fix)]
    return [Check("/dev/shm", "ok", detail)]


def check_folders(facts: Facts) -> list[Check]:
    return [_folder(folder) for folder in facts.folders]


def _folder(folder: FolderFacts) -> Check:
    other = "set REDLINE_CACHE to another folder" if folder.purpose == "cache" else "train elsewhere with --run DIR"
    move = f"{other[0].upper()}{other[1:]}"
    name, free = f"{folder.purpose} disk", folder.free_bytes
    detail = f"{folder.path}: " + ("free space unknown" if free is None else f"{free / GIB:.1f} GiB free")
    if "write" in folder.missing:
        return Check(name, "fail", f"{folder.path} is not writable", f"{move}, or fix its permissions.")
    if unsafe := [operation for operation in folder.missing if operation != "symlink"]:
        # Without fsync and rename no file can be replaced atomically.
        detail = f"{detail}, but its file system has no {' and '.join(unsafe)}"
        return Check(name, "fail", detail, f"{move}, on a local disk.")
    if free is not None and free < _MIN_DISK:
        return Check(name, "fail", detail, f"Free some space, or {other}.")
    if free is not None and free < _LOW_DISK:
        return Check(name, "warn", detail, f"Checkpoints may not fit: free some space, or {other}.")
    if folder.missing:
        return Check(
            name, "warn", f"{detail}, no symbolic links", "Nothing to do: `latest` still finds the newest run."
        )
    return Check(name, "ok", detail)


# --- packages and environment variables


def check_packages(facts: Facts) -> list[Check]:
    return [_package(package) for package in facts.packages]


def _package(package: Package) -> Check:
    if package.version:
        return Check(package.name, "ok", package.version)
    detail = f"not installed; needed for {package.purpose}"
    if package.required:
        return Check(package.name, "warn", detail, f"Install it: {dependency_hint(package.name)}.")
    return Check(package.name, "ok", f"{detail} (optional, extra {package.extra})")


@dataclass(frozen=True)
class Extra:
    """An extra of redline: its packages that are missing, and the shipped recipes that need it."""

    name: str
    missing: list[str]
    recipes: list[str]
    fix: str  # the command that installs it; empty if nothing is missing


def extras_of(facts: Facts) -> list[Extra]:
    extras = []
    for name in dict.fromkeys(package.extra for package in facts.packages if package.extra):
        missing = [p.name for p in facts.packages if p.extra == name and not p.version]
        extras.append(Extra(name, missing, facts.recipes.get(name, []), install_hint(name) if missing else ""))
    return extras


def check_extras(facts: Facts) -> list[Check]:
    """Return a line for each extra. One that is missing is no fault: most recipes need none."""
    lines = []
    for extra in extras_of(facts):
        needed = f"needed by {', '.join(extra.recipes)}" if extra.recipes else "no shipped recipe needs it"
        detail = f"{', '.join(extra.missing)} not installed; {needed}" if extra.missing else f"installed; {needed}"
        fix = f"To install it: {extra.fix}." if extra.fix else ""
        lines.append(Check(f"extra {extra.name}", "ok", detail, fix))
    return lines


def check_environment(facts: Facts) -> list[Check]:
    variables = facts.environment
    lines = [Check(name, "ok", "set" if name in variables else "not set") for name in ("HF_HOME", "HF_TOKEN")]
    offline = variables.get("HF_HUB_OFFLINE", "")
    disabled = ": downloads are disabled" if offline.lower() in ("1", "true", "yes", "on") else ""
    lines.append(Check("HF_HUB_OFFLINE", "ok", f"{offline}{disabled}" or "not set"))
    for name, value in variables.items():
        if name == "REDLINE_PRICE" and (problem := price_problem(value)):
            fix = "Write USD per hour as a number: REDLINE_PRICE=2.5."
            lines.append(Check(name, "warn", f"{value!r} is {problem}, so no cost is shown", fix))
        elif name.startswith("REDLINE_"):
            lines.append(Check(name, "ok", value))
    return lines


# --- measured rates

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_COPIES = {"copy": "copy within memory", "to_device": "copy to the GPU", "to_host": "copy from the GPU"}


def check_rates(facts: Facts) -> list[Check]:
    """Show the measured rates (`--probe`) as shares of the card's dense peak and bandwidth where those are known."""
    probe = facts.selftests.get("probe")
    if probe is not None and not probe.works:
        return [Check("measured", "warn", probe.detail, "Try again when nothing else uses the machine.")]
    rates = facts.measured or {}
    spec = spec_of(facts.device_name, facts.gpus[0].memory_bytes / 1e9 if facts.gpus else None)
    lines = []
    for name in (name for name in _PRECISIONS if name in rates):
        peak = spec.peak(name) if spec and name != "tf32" else None  # the table has no tf32 peaks
        share = _share(rates[name], peak, "dense peak")
        lines.append(Check(f"matmul {name}", "ok", f"{rates[name] / 1e12:.4g} TFLOP/s{share}"))
    for name, shown in ((name, shown) for name, shown in _COPIES.items() if name in rates):
        share = _share(rates[name], spec.bandwidth if spec and name == "copy" else None, "bandwidth")
        lines.append(Check(shown, "ok", f"{rates[name] / 1e9:.4g} GB/s{share}"))
    return lines


def _share(rate: float, peak: float | None, what: str) -> str:
    return "" if peak is None else f", {100 * rate / peak:.0f} % of the card's {what}"


CHECKS: tuple[Callable[[Facts], list[Check]], ...] = (
    check_python,
    check_torch,
    check_cuda,
    check_nccl,
    check_gpus,
    check_capabilities,
    check_memory,
    check_cores,
    check_shared_memory,
    check_folders,
    check_packages,
    check_extras,
    check_environment,
    check_rates,
)
