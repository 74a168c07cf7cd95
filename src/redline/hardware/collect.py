"""Gathering the facts that `redline doctor` judges. Nothing here decides what is good."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from redline.cache import cache_dir
from redline.hardware import host, nvml
from redline.hardware.measurements import Rates

# ----------------------------------------------------------------------------------------------------
# What `redline doctor` looks at, as plain data: gathered in one place, judged in another.


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn or fail
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """What torch said of itself, in a process of its own."""

    version: str = ""
    cuda: str | None = None  # what it was built for
    cudnn: str | None = None
    nccl: str | None = None
    available: bool = False  # it can use a GPU
    architectures: tuple[str, ...] = ()  # "sm_90", …: those it has kernels for
    complaint: str = ""  # what it warned of when asked for a GPU, or why it cannot be imported


@dataclass(frozen=True)
class Trial:
    """One thing that was really tried with a tiny tensor."""

    works: bool
    detail: str = ""


@dataclass(frozen=True)
class GpuUser:
    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class GpuFacts:
    """One card as the driver knows it. None is what it did not tell."""

    index: int
    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int = 0
    free_bytes: int = 0
    users: tuple[GpuUser, ...] = ()
    ecc: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None
    throttle: str = ""


@dataclass(frozen=True)
class Place:
    """A folder that redline writes to, or the nearest that exists."""

    purpose: str  # cache or runs
    path: str
    free_bytes: int | None = None
    lacks: tuple[str, ...] = ()  # of write, fsync, rename, symlink


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None
    serves: str
    extra: str = ""  # redline's extra that installs it
    required: bool = False  # every installation has it


@dataclass(frozen=True)
class Facts:
    python: tuple[int, int, int]
    torch: TorchFacts
    gpus: tuple[GpuFacts, ...] = ()
    visible: int = 0  # how many of them, or of their slices, CUDA shows this process
    driver: str | None = None
    driver_cuda: str | None = None
    card_on_the_bus: bool = False  # the machine has an NVIDIA card, whether or not a driver answers
    trials: dict[str, Trial] = field(default_factory=dict)
    compiler: str | None = None
    physical_memory: int | None = None
    memory: int = 0
    memory_free: int | None = None
    machine_cores: int = 1
    cores: int = 1
    shared_memory: int | None = None
    places: tuple[Place, ...] = ()
    packages: tuple[Package, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)  # secrets are replaced by the word "set"
    device_name: str = ""  # what was probed
    measured: Rates | None = None


# ----------------------------------------------------------------------------------------------------
# Running the trials in processes that may crash or hang without harm.


Answers = dict[str, dict[str, Any]]
_WHOLE_LIMIT = 300.0  # the child ends by itself long before; this is for one that cannot even do that


def run_trials(names: list[str], command: list[str] | None = None) -> Answers:
    """The answer to each, by name. After a crash, the rest are tried in a new process. A name that its machine has
    nothing to try for gets no answer."""
    answers: Answers = {}
    waiting = list(names)
    while waiting:
        given, ending = _one_process(command or [sys.executable, "-P", "-m", "redline.hardware.trial"], waiting)
        answers |= given
        if ending == "done":
            break
        left = [name for name in waiting if name not in answers]
        if ending:  # the first without an answer is what it died of
            if not left:
                break
            answers[left[0]] = {"works": False, "detail": ending, "whole": ending}
            if left[0] == "torch":  # it cannot even be imported: the rest would die of the same
                break
            left = left[1:]
        waiting = left
    return answers


def _one_process(command: list[str], names: list[str]) -> tuple[Answers, str]:
    """What it answered, and how it ended: "done", why it died, or empty when it asks for a new process."""
    process = subprocess.Popen(
        [*command, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_WHOLE_LIMIT)
        late = "Timeout (" in err  # faulthandler's word
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        (out, err), late = process.communicate(), True
    answers = dict(answer for line in out.splitlines() if (answer := _parse(line)))
    if late:
        return answers, "did not answer in time"
    if process.returncode < 0:
        return answers, f"crashed ({signal.Signals(-process.returncode).name})"
    if process.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:]
        return answers, last[0].strip()[:160] if last else f"ended with {process.returncode}"
    stopped = any("CUDA error" in str(answer.get("whole")) for answer in answers.values())
    return answers, "" if stopped else "done"


def _parse(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        answer = json.loads(line)
        return str(answer.pop("trial")), answer
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # a library's own word


def _environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2])
    path = [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "compile"),  # as training has it
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of workers that could outlive the trial
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }


TRIED = ("bf16", "fp8", "cudnn", "flash", "efficient", "flex", "compile")
REQUIRED = {"tensorboard": "curves in TensorBoard", "tiktoken": "the gpt2 tokenizer"}
EXTRAS = {  # by redline's extra that installs them; "" for none
    "data": {"pyarrow": "Parquet", "zstandard": ".zst files", "datasets": "dataset ids"},
    "low-bit": {"bitsandbytes": "8-bit optimizers"},
    "finetune": {"transformers": "fine-tuning, and using an exported model", "gguf": "GGUF files"},
    "wandb": {"wandb": "Weights & Biases"},
    "": {"torchao": "8-bit optimizers and fp8 training"},
}
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def gather(runs: Path, *, probe: bool = False) -> Facts:
    answers = run_trials(["torch", *TRIED, *(["probe"] if probe else [])])
    gpus, visible = _gpus()
    library = nvml.open_nvml()
    about = answers.get("probe", {}).get("about") or {}
    return Facts(
        python=sys.version_info[:3],
        torch=_torch(answers),
        gpus=gpus,
        visible=visible,
        driver=nvml.driver_version(),
        driver_cuda=nvml.none_on_error(lambda: _version(library.nvmlSystemGetCudaDriverVersion())),
        card_on_the_bus=card_on_the_bus(),
        trials={name: _trial(answers[name]) for name in (*TRIED, "probe") if name in answers},
        compiler=host.cpp_compiler(),
        physical_memory=host.physical_memory_bytes(),
        memory=host.host_memory_bytes(),
        memory_free=free_memory(),
        machine_cores=os.cpu_count() or 1,
        cores=host.available_cores(),
        shared_memory=nvml.none_on_error(lambda: shutil.disk_usage("/dev/shm").total),
        places=(look_at("cache", cache_dir()), look_at("runs", runs)),
        packages=packages(),
        environment=environment(),
        device_name=gpus[0].name if gpus and about.get("device") == "cuda" else host.cpu_name(),
        measured=about.get("rates"),
    )


def _torch(answers: Answers) -> TorchFacts:
    answer = answers.get("torch", {})
    if not answer.get("works"):
        return TorchFacts(complaint=str(answer.get("detail", "no answer")))
    known = {item.name for item in fields(TorchFacts)}
    about = {name: value for name, value in answer["about"].items() if name in known}
    return TorchFacts(**{**about, "architectures": tuple(about["architectures"])})


def _trial(answer: dict[str, Any]) -> Trial:
    return Trial(bool(answer["works"]), "" if answer["works"] else f"{answer['detail']}{_hint(str(answer['whole']))}")


def _hint(error: str) -> str:
    """The line that matters is seldom the first of a compiler's."""
    for sign, meaning in (
        ("Python.h", " (Python.h is missing)"),
        ("Failed to find C compiler", " (no C compiler)"),
        ("out of memory", " (the card is full)"),
    ):
        if sign in error:
            return meaning
    return ""


# --- GPUs


def _gpus() -> tuple[tuple[GpuFacts, ...], int]:
    """Every card that the driver shows, and how many CUDA would give this process."""
    library = nvml.open_nvml()
    if library is None:
        return (), 0
    count = nvml.none_on_error(library.nvmlDeviceGetCount) or 0
    handles = [nvml.none_on_error(partial(library.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    cards = [_gpu(library, index, handle) for index, handle in enumerate(handles) if handle is not None]
    return tuple(cards), len(nvml.none_on_error(lambda: nvml.visible_handles(library)) or [])


def _gpu(library: Any, index: int, handle: Any) -> GpuFacts:
    def ask(question: Callable[[], Any]) -> Any:
        return nvml.none_on_error(question)

    memory = ask(lambda: library.nvmlDeviceGetMemoryInfo(handle))
    return GpuFacts(
        index=index,
        name=ask(lambda: nvml.text(library.nvmlDeviceGetName(handle))) or "a GPU without a name",
        capability=ask(lambda: tuple(library.nvmlDeviceGetCudaComputeCapability(handle))),
        memory_bytes=ask(lambda: nvml.usable_memory(library, handle)) or 0,
        free_bytes=int(memory.free) if memory is not None else 0,
        users=tuple(_user(process) for process in ask(lambda: _processes(library, handle)) or ()),
        ecc=ask(lambda: bool(library.nvmlDeviceGetEccMode(handle)[0])),
        persistence=ask(lambda: bool(library.nvmlDeviceGetPersistenceMode(handle))),
        mig=ask(lambda: bool(library.nvmlDeviceGetMigMode(handle)[0])),
        throttle=ask(lambda: nvml.throttle_names(nvml.throttle_bits(library, handle))) or "",
    )


def _processes(library: Any, handle: Any) -> list[Any]:
    return list(library.nvmlDeviceGetComputeRunningProcesses(handle))


def _user(process: Any) -> GpuUser:
    try:
        name = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        name = "?"  # in another container
    return GpuUser(int(process.pid), name, None if process.usedGpuMemory is None else int(process.usedGpuMemory))


def _version(number: int) -> str:
    """12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def card_on_the_bus(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether an NVIDIA display or compute card is plugged in."""
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


# --- host


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def look_at(purpose: str, path: Path) -> Place:
    """Free space, and whether files can be written, synced, renamed and linked where `path` is or will be."""
    path = path.absolute()
    places = (path, *path.parents)
    existing = next(folder for folder in places if folder.is_dir())
    free = nvml.none_on_error(lambda: shutil.disk_usage(existing).free)
    barred = any(os.path.lexists(place) for place in places[: places.index(existing)])  # by a file, or a dead link
    return Place(purpose, str(path), free, ("write",) if barred else tuple(_lacks(existing)))


def _lacks(folder: Path) -> list[str]:
    try:
        with tempfile.TemporaryDirectory(prefix=".redline-doctor-", dir=folder) as name:
            scratch = Path(name)
            operations: dict[str, Callable[[], object]] = {
                "fsync": lambda: _synced(scratch / "a"),
                "rename": lambda: (scratch / "a").replace(scratch / "b"),
                "symlink": lambda: (scratch / "c").symlink_to("b"),
            }
            return [what for what, operation in operations.items() if _fails(operation)]
    except OSError:
        return ["write"]


def _synced(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b"redline")
        file.flush()
        os.fsync(file.fileno())


def _fails(operation: Callable[[], object]) -> bool:
    try:
        operation()
    except OSError:
        return True
    return False


# --- software


def packages() -> tuple[Package, ...]:
    required = [Package(name, _installed(name), serves, required=True) for name, serves in REQUIRED.items()]
    optional = [
        Package(name, _installed(name), serves, extra)
        for extra, packages in EXTRAS.items()
        for name, serves in packages.items()
    ]
    return (*required, *optional)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """The variables that matter. What could be a secret is not even carried."""
    names = ["HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    names += sorted(name for name in os.environ if name.startswith("REDLINE_"))
    return {n: "set" if _is_secret(n) else os.environ[n] for n in names if n in os.environ}


def _is_secret(name: str) -> bool:
    return any(word in name for word in _SECRET)
