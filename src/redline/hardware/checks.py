"""Judging a machine's facts: pure functions to lines that say ok, warn or fail, and how to mend it."""

from __future__ import annotations

from redline.errors import install_hint
from redline.hardware.facts import Check, Facts, Package, Place
from redline.hardware.gpu_checks import abilities, cuda, dotted, gpu
from redline.hardware.specs import spec_of
from redline.units import GIB, wrong_price

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
        if name == "REDLINE_PRICE" and (wrong := wrong_price(value)):
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
