"""Judging a machine's facts: pure functions to lines that say ok, warn or fail, and how to mend it."""

from __future__ import annotations

from redline.errors import install_hint
from redline.hardware.collect import Check, Facts, GpuFacts, Package, Place
from redline.hardware.nvml import SLOWDOWNS
from redline.hardware.specs import spec_of
from redline.units import GIB, price_problem

# ----------------------------------------------------------------------------------------------------
# Judging the NVIDIA side of a machine: driver, cards, and what really worked on them. Pure, as in checks.py.


ON_THE_CPU = "training works on the CPU, slowly"


def cuda(facts: Facts) -> Check:
    """Within one major version any driver serves any build; a newer driver serves older builds."""
    built, driver = facts.torch.cuda, facts.driver_cuda
    if not built:
        return Check("cuda", "ok" if not facts.gpus else "fail", "torch is built without it", _cuda_build(facts))
    if not driver and facts.torch.available:
        fix = "pip install nvidia-ml-py, or `make setup` again: step events then tell power and clocks too."
        return Check("cuda", "warn", f"torch is built for {built}; NVML does not answer for the driver", fix)
    if not driver:
        return Check("cuda", "warn", f"torch is built for {built}, and no driver answers", _no_driver(facts))
    said = f"torch is built for {built}, driver {facts.driver} for {driver}"
    if _numbers(driver)[0] < _numbers(built)[0]:
        major = _numbers(driver)[0]
        fix = f"Update the driver, or install a torch that is built for CUDA {major}."
        return Check("cuda", "fail", f"{said}: the driver is too old", fix)
    return Check("cuda", "ok", said)


def _cuda_build(facts: Facts) -> str:
    return "Install a torch that is built for CUDA: `make setup` finds the one that fits." if facts.gpus else ""


def _no_driver(facts: Facts) -> str:
    if not facts.card_on_the_bus:
        return f"Without an NVIDIA GPU {ON_THE_CPU}."
    return "Install the NVIDIA driver; in a container, start it with the GPUs (docker run --gpus all)."


# --- the cards


def gpu(facts: Facts) -> list[Check]:
    return [gpu_use(facts), *(check for card in facts.gpus for check in one_gpu(card))]


def gpu_use(facts: Facts) -> Check:
    """Whether torch can compute on a GPU, and if there is one and it cannot, why."""
    about, count = facts.torch, len(facts.gpus)
    if about.available:
        lacking = [card for card in facts.gpus if not _has_kernels(card, about.architectures)]
        if lacking:
            card = lacking[0]
            fix = "Install a torch built for this card, or leave it out with CUDA_VISIBLE_DEVICES."
            said = f"torch has no kernels for {card.name} (compute capability {dotted(card.capability or ())})"
            return Check("gpu", "fail", said, fix)
        return Check("gpu", "ok", f"{facts.visible or count or 1} of {count or 1} visible to torch")
    if not facts.gpus:
        if facts.card_on_the_bus:
            said = f"an NVIDIA card is plugged in, but no driver answers; {ON_THE_CPU}"
            return Check("gpu", "warn", said, _no_driver(facts))
        return Check("gpu", "warn", f"no NVIDIA GPU: {ON_THE_CPU}", "For large models use a machine with one.")
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if not about.version:
        return Check("gpu", "fail", f"{facts.gpus[0].name} is here, and torch cannot be imported", "Mend torch first.")
    if not about.cuda:
        said = f"{facts.gpus[0].name} is here, but torch {about.version} is a CPU build"
        return Check("gpu", "fail", said, _cuda_build(facts))
    if not facts.visible and hidden is not None:
        fix = "Unset it, or name cards as in CUDA_VISIBLE_DEVICES=0."
        return Check("gpu", "fail", f"CUDA_VISIBLE_DEVICES={hidden!r} hides {count} of {count} GPUs", fix)
    if not facts.visible:
        fix = "Make a slice with `nvidia-smi mig -cgi … -C`, or turn MIG off with `nvidia-smi -mig 0`."
        return Check("gpu", "fail", "the card is in MIG mode and has no slice", fix)
    if cuda(facts).status == "fail":
        return Check("gpu", "fail", f"torch cannot use {facts.gpus[0].name}: the driver is too old", cuda(facts).fix)
    reason = about.complaint or "without saying why"
    fix = "`nvidia-smi` should show it without an error; if not, restart the machine or ask who runs it."
    return Check("gpu", "fail", f"torch cannot use {facts.gpus[0].name}: {reason}", fix)


def _has_kernels(card: GpuFacts, architectures: tuple[str, ...]) -> bool:
    """Kernels of the same generation that are not newer run; so does intermediate code (compute_) of any older one."""
    if card.capability is None or not architectures:
        return True
    major, minor = card.capability
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = int("".join(c for c in digits if c.isdigit()) or 0)
        if kind == "compute" and number <= 10 * major + minor:
            return True
        if kind == "sm" and number // 10 == major and number % 10 <= minor:
            return True
    return False


def one_gpu(card: GpuFacts) -> list[Check]:
    name = f"gpu {card.index}"
    capability = f", compute capability {dotted(card.capability)}" if card.capability else ""
    lines = [Check(name, "ok", f"{card.name}{capability}, {card.memory_bytes / GIB:.1f} GiB"), _gpu_memory(name, card)]
    states = {"ECC": card.ecc, "persistence": card.persistence, "MIG": card.mig}
    said = ", ".join(f"{what} {'on' if state else 'off'}" for what, state in states.items() if state is not None)
    wishes = []
    if card.ecc is False:
        wishes.append("Without ECC flipped bits go unnoticed: nvidia-smi -e 1, then restart.")
    if card.persistence is False:
        wishes.append("Without persistence every start waits for the driver: nvidia-smi -pm 1.")
    if card.mig:
        wishes.append("A slice has a part of the card's speed: nvidia-smi -mig 0 gives the whole card.")
    lines.append(Check(f"{name} modes", "warn" if wishes else "ok", said or "unknown", " ".join(wishes)))
    slow = [word for word in card.throttle.split("+") if word in SLOWDOWNS]
    if slow:
        fix = "Look at its cooling and its power supply; until then it is slower than planned."
        lines.append(Check(f"{name} clock", "warn", f"held back now: {', '.join(slow)}", fix))
    return lines


def _gpu_memory(name: str, card: GpuFacts) -> Check:
    said = f"{card.free_bytes / GIB:.1f} of {card.memory_bytes / GIB:.1f} GiB free"
    if card.free_bytes >= 0.95 * card.memory_bytes - GIB:
        return Check(f"{name} memory", "ok", said)
    users = ", ".join(
        f"{user.name} (process {user.pid}{'' if user.bytes is None else f', {user.bytes / GIB:.1f} GiB'})"
        for user in card.users
    )
    fix = "Stop what uses it, choose another card with CUDA_VISIBLE_DEVICES, or lower train.memory_fraction."
    return Check(f"{name} memory", "warn", f"{said}; used by {users or 'processes that this one may not see'}", fix)


# --- what it can do

_ABILITIES = {
    "bf16": ("bf16", "Without it training falls back to fp16 or fp32: train.precision=fp32 always works."),
    "fp8": ("fp8", "Use train.precision=bf16."),
    "cudnn": ("cuDNN attention", "model.attention=auto takes the fastest of the others."),
    "flash": ("flash attention", "model.attention=auto takes the fastest of the others."),
    "efficient": ("efficient attention", "model.attention=auto takes the fastest of the others."),
    "flex": ("flex attention", "model.attention=auto takes the fastest of the others."),
    "compile": ("torch.compile", "Until then use train.compile=false, which is slower."),
}


def abilities(facts: Facts) -> list[Check]:
    return [ability(name, facts) for name in _ABILITIES]


def ability(name: str, facts: Facts) -> Check:
    shown, otherwise = _ABILITIES[name]
    trial = facts.trials.get(name)
    if trial is None:
        if name == "compile":
            return _cpu_compile(facts)
        if facts.gpus:
            return Check(shown, "warn", "not tried: torch cannot use the GPU", "Mend that first.")
        return Check(shown, "warn", "no NVIDIA GPU to try it on")
    capability = next((card.capability for card in facts.gpus if card.capability), None)
    if trial.works:
        return Check(shown, "ok", "works")
    if name == "fp8" and capability is not None and capability < (8, 9):
        return Check(shown, "warn", f"needs compute capability 8.9, and this card has {dotted(capability)}", otherwise)
    if name == "bf16":
        status = "warn" if capability is not None and capability < (8, 0) else "fail"
        return Check(shown, status, trial.detail, otherwise)
    return Check(shown, "warn", trial.detail, f"{_mend(trial.detail)}{otherwise}")


def _mend(detail: str) -> str:
    if "no C compiler" in detail or "Python.h" in detail:
        return "Install a C compiler and Python's headers (apt install gcc python3-dev). "
    return ""


def _cpu_compile(facts: Facts) -> Check:
    if facts.compiler:
        return Check("torch.compile", "ok", f"{facts.compiler} is there")
    fix = "Install one (apt install g++); until then train.compile=auto leaves it off."
    return Check("torch.compile", "warn", "no C++ compiler", fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 12)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)
_LITTLE_DISK, _NO_DISK = 10 * GIB, GIB
_LITTLE_MEMORY = 4 * GIB


def all_checks(facts: Facts) -> list[Check]:
    return [
        *software(facts),
        *gpu(facts),
        *abilities(facts),
        *host(facts),
        *(place(item) for item in facts.places),
        *(package(item) for item in facts.packages),
        *environment(facts.environment),
        *speed(facts),
    ]


# --- Python, torch, CUDA, NCCL


def software(facts: Facts) -> list[Check]:
    return [python(facts.python), torch(facts), cuda(facts), nccl(facts)]


def python(version: tuple[int, int, int]) -> Check:
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Check("python", "fail", f"{text} is too old", "Install Python 3.11 or 3.12, and set redline up with it.")
    if version[:2] > NEWEST_PYTHON:
        return Check("python", "warn", f"{text} was never tested", "If something fails, use Python 3.11 or 3.12.")
    return Check("python", "ok", text)


def torch(facts: Facts) -> Check:
    about = facts.torch
    good = f"{dotted(OLDEST_TORCH)} to {dotted(NEWEST_TORCH)}"
    install = f"Install a torch from {good}: pip install 'torch>=2.11,<2.14'."
    if not about.version:
        return Check("torch", "fail", f"cannot be imported: {about.complaint}", install)
    version = tuple(int(part) for part in about.version.split("+")[0].split(".")[:2] if part.isdigit())
    if version < OLDEST_TORCH:
        return Check("torch", "fail", f"{about.version} is too old", install)
    if version > NEWEST_TORCH:
        return Check("torch", "warn", f"{about.version} was never tested", f"If something fails, use {good}.")
    return Check("torch", "ok", about.version)


def nccl(facts: Facts) -> Check:
    if facts.torch.nccl:
        return Check("nccl", "ok", facts.torch.nccl)
    if facts.visible > 1:
        fix = "Install a torch that is built with NCCL, as all CUDA builds for Linux are."
        return Check("nccl", "warn", "missing: several GPUs cannot train together", fix)
    return Check("nccl", "ok", "not in this torch; only several GPUs need it")


# --- the host


def host(facts: Facts) -> list[Check]:
    return [memory(facts), cores(facts), shared_memory(facts)]


def memory(facts: Facts) -> Check:
    limited = facts.physical_memory is not None and facts.memory < facts.physical_memory
    said = f"{facts.memory / GIB:.1f} GiB"
    if limited:
        said += f" of the machine's {(facts.physical_memory or 0) / GIB:.1f} GiB, by the container's limit"
    free = None if facts.memory_free is None else min(facts.memory_free, facts.memory)
    if free is not None:
        said += f", {free / GIB:.1f} GiB free"
    if free is not None and free < _LITTLE_MEMORY:
        fix = "Stop other programs, or raise the container's limit; otherwise expect the system to end the run."
        return Check("memory", "warn", said, fix)
    return Check("memory", "ok", said)


def cores(facts: Facts) -> Check:
    said = f"{facts.cores} of {facts.machine_cores} usable"
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > facts.cores:
        fix = f"Unset OMP_NUM_THREADS, or set it to {facts.cores}: threads that share a core wait for each other."
        return Check("cores", "warn", f"{said}, and OMP_NUM_THREADS={threads}", fix)
    return Check("cores", "ok", said)


def shared_memory(facts: Facts) -> Check:
    size = facts.shared_memory
    said = "there is no /dev/shm" if size is None else f"{size / GIB:.2f} GiB"
    if facts.visible > 1 and (size or 0) < GIB:
        fix = "Start the container with --ipc=host or --shm-size=8g: GPUs of one machine exchange data through it."
        return Check("/dev/shm", "warn", said, fix)
    return Check("/dev/shm", "ok", said)


def place(item: Place) -> Check:
    elsewhere = "Set REDLINE_CACHE to another folder" if item.purpose == "cache" else "Train elsewhere with --run DIR"
    name, free = f"{item.purpose} disk", item.free_bytes
    said = f"{item.path}: " + ("free space unknown" if free is None else f"{free / GIB:.1f} GiB free")
    if "write" in item.lacks:
        return Check(name, "fail", f"{item.path} cannot be written to", f"{elsewhere}, or mend its rights.")
    if {"fsync", "rename"} & set(item.lacks):
        what = " and ".join(word for word in item.lacks if word != "symlink")
        return Check(name, "fail", f"{said}, but its file system has no {what}", f"{elsewhere}, on a local disk.")
    if free is not None and free < _NO_DISK:
        return Check(name, "fail", said, f"Free some space, or: {elsewhere[0].lower()}{elsewhere[1:]}.")
    if free is not None and free < _LITTLE_DISK:
        fix = f"Checkpoints may not fit; free some space, or: {elsewhere[0].lower()}{elsewhere[1:]}."
        return Check(name, "warn", said, fix)
    if item.lacks:
        return Check(name, "warn", f"{said}, no symbolic links", "Nothing to do: `latest` still means the newest run.")
    return Check(name, "ok", said)


# --- packages and variables


def package(item: Package) -> Check:
    if item.version:
        return Check(item.name, "ok", item.version)
    said = f"not installed; it serves {item.serves}"
    if item.required:
        return Check(item.name, "warn", said, f"pip install {item.name}, or `make setup` again.")
    how = install_hint(item.extra) if item.extra else f"`pip install {item.name}`"
    return Check(item.name, "ok", f"{said}, which is optional", f"If you want it: {how}.")


def environment(variables: dict[str, str]) -> list[Check]:
    lines = [Check(name, "ok", _set_or_not(name, variables)) for name in ("HF_HOME", "HF_TOKEN")]
    offline = variables.get("HF_HUB_OFFLINE", "")
    said = (
        f"{offline}: nothing is downloaded" if offline.lower() in ("1", "true", "yes", "on") else offline or "not set"
    )
    lines.append(Check("HF_HUB_OFFLINE", "ok", said))
    for name, value in variables.items():
        if name == "REDLINE_PRICE" and (wrong := price_problem(value)):
            fix = "Write dollars per hour as a number: REDLINE_PRICE=2.5."
            lines.append(Check(name, "warn", f"{value!r} is {wrong}, so no cost is shown", fix))
        elif name.startswith("REDLINE_"):
            lines.append(Check(name, "ok", value))
    return lines


def _set_or_not(name: str, variables: dict[str, str]) -> str:
    return "set" if name in variables else "not set"


# --- what was measured

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_WAYS = {"copy": "copy within memory", "to_device": "copy to the GPU", "to_host": "copy from the GPU"}


def speed(facts: Facts) -> list[Check]:
    """Measured rates, beside the dense peak and the bandwidth where those are known."""
    trial = facts.trials.get("probe")
    if trial is not None and not trial.works:
        return [Check("measured", "warn", trial.detail, "Try again when nothing else uses the machine.")]
    rates = facts.measured or {}
    memory_gb = facts.gpus[0].memory_bytes / 1e9 if facts.gpus else None
    spec = spec_of(facts.device_name, memory_gb)
    lines = []
    for name in (name for name in _PRECISIONS if name in rates):
        peak = spec.peak(name) if spec and name != "tf32" else None
        share = _share(rates[name], peak, "dense peak")
        lines.append(Check(f"matmul {name}", "ok", f"{rates[name] / 1e12:.4g} TFLOP/s{share}"))
    for name, said in ((name, said) for name, said in _WAYS.items() if name in rates):
        peak = spec.bandwidth if spec and name == "copy" else None
        lines.append(Check(said, "ok", f"{rates[name] / 1e9:.4g} GB/s{_share(rates[name], peak, 'bandwidth')}"))
    return lines


def _share(rate: float, peak: float | None, what: str) -> str:
    return "" if peak is None else f", {100 * rate / peak:.0f} % of the card's {what}"
