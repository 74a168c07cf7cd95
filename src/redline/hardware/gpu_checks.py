"""Judging the NVIDIA side of a machine: driver, cards, and what really worked on them. Pure, as in checks.py."""

from __future__ import annotations

from redline.hardware.facts import Check, Facts, GpuFacts
from redline.hardware.throttle import HEAT
from redline.units import GIB

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
    slow = [word for word in card.throttle.split("+") if word in HEAT]
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
