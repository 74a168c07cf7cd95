"""Collect the facts about this machine that `redline doctor` checks.

`collect_facts` returns plain dataclasses; `hardware/doctor.py` decides what is good and what is not.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from redline.cache import cache_dir
from redline.errors import is_secret_name
from redline.hardware import host, nvml
from redline.hardware.measurements import Rates
from redline.hardware.selftest import CAPABILITIES, run_selftests
from redline.hardware.trials import Answers


@dataclass(frozen=True)
class TorchFacts:
    """What torch reports about itself, in a process of its own."""

    version: str = ""  # empty: it cannot be imported
    cuda: str | None = None  # the CUDA version it is built for
    cudnn: str | None = None
    nccl: str | None = None
    available: bool = False  # torch.cuda.is_available()
    architectures: tuple[str, ...] = ()  # "sm_90", …: the ones it has kernels for
    error: str = ""  # why it cannot be imported, or what it warned about when it looked for a GPU
    mps: bool = False  # torch.backends.mps.is_available(): the GPU of a Mac


@dataclass(frozen=True)
class SelftestResult:
    works: bool
    detail: str = ""


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class GpuFacts:
    """One card as NVML reports it. None: the driver does not answer that question."""

    index: int
    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int = 0
    free_bytes: int = 0
    processes: tuple[GpuProcess, ...] = ()
    ecc: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None
    throttle: str = ""


@dataclass(frozen=True)
class FolderFacts:
    """A folder that redline writes to; if it does not exist yet, its nearest existing parent was tested."""

    purpose: str  # cache or runs
    path: str
    free_bytes: int | None = None
    missing: tuple[str, ...] = ()  # operations that fail there: write, fsync, rename, symlink


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None  # None: not installed
    purpose: str
    extra: str = ""  # the extra of redline that installs it; empty if the package is required

    @property
    def required(self) -> bool:
        return not self.extra


@dataclass(frozen=True)
class Facts:
    python: tuple[int, int, int]
    torch: TorchFacts
    gpus: tuple[GpuFacts, ...] = ()  # all that the driver shows
    visible: int = 0  # how many of them, or of their MIG slices, CUDA shows to this process
    driver: str | None = None
    driver_cuda: str | None = None
    pci_gpu: bool = False  # an NVIDIA card is on the PCI bus, whether or not a driver answers
    selftests: dict[str, SelftestResult] = field(default_factory=dict)
    compiler: str | None = None
    physical_memory: int | None = None
    memory: int = 0  # what this process may use
    memory_free: int | None = None
    machine_cores: int = 1
    cores: int = 1  # what this process may use
    shared_memory: int | None = None
    folders: tuple[FolderFacts, ...] = ()
    packages: tuple[Package, ...] = ()
    recipes: dict[str, list[str]] = field(default_factory=dict)  # extra → the shipped recipes that need it
    environment: dict[str, str] = field(default_factory=dict)  # values of secrets are replaced by "set"
    device_name: str = ""  # the device whose rates were measured
    measured: Rates | None = None


REQUIRED = {"tensorboard": "curves in TensorBoard", "tiktoken": "the gpt2 tokenizer"}
EXTRAS = {  # extra of redline → {package: purpose}
    "data": {"pyarrow": "Parquet", "zstandard": ".zst files", "datasets": "dataset ids"},
    "low-bit": {"bitsandbytes": "8-bit optimizers"},
    "finetune": {
        "transformers": "fine-tuning, and loading an exported model",
        "accelerate": "GGUF files",
        "gguf": "GGUF files",
    },
    "gguf": {
        "gguf": "writing GGUF files",
        "transformers": "their tokenizers and chat templates",
        "xllamacpp": "checking them in llama.cpp, and K-quants",
    },
    "hub": {"huggingface_hub": "hf:// addresses, and pushing exports"},
    "fp8": {"torchao": "fp8 in compiled blocks"},
    "wandb": {"wandb": "Weights & Biases"},
}


def collect_facts(runs: Path, *, recipes: dict[str, list[str]] | None = None, probe: bool = False) -> Facts:
    """Collect everything `redline doctor` checks. `probe` also measures matmul and copy rates.

    `recipes` are the shipped recipes that need an extra, by its name.
    """
    answers = run_selftests(["torch", *CAPABILITIES, *(["probe"] if probe else [])])
    gpus, visible = _gpu_facts()
    probed = answers.get("probe", {}).get("about") or {}
    return Facts(
        python=sys.version_info[:3],
        torch=_torch_facts(answers),
        gpus=gpus,
        visible=visible,
        driver=nvml.driver_version(),
        driver_cuda=None if (cuda := nvml.driver_cuda_version()) is None else ".".join(map(str, cuda)),
        pci_gpu=has_pci_gpu(),
        selftests={name: _selftest_result(answers[name]) for name in (*CAPABILITIES, "probe") if name in answers},
        compiler=host.cpp_compiler(),
        physical_memory=host.physical_memory_bytes(),
        memory=host.host_memory_bytes(),
        memory_free=_free_memory(),
        machine_cores=os.cpu_count() or 1,
        cores=host.available_cores(),
        shared_memory=nvml.none_on_error(lambda: shutil.disk_usage("/dev/shm").total),
        folders=(folder_facts("cache", cache_dir()), folder_facts("runs", runs)),
        packages=_packages(),
        recipes=recipes or {},
        environment=environment_variables(),
        device_name=gpus[0].name if gpus and probed.get("device") == "cuda" else host.cpu_name(),
        measured=probed.get("rates"),
    )


# --- torch and the self-tests


def _torch_facts(answers: Answers) -> TorchFacts:
    answer = answers.get("torch", {})
    if not answer.get("works"):
        return TorchFacts(error=str(answer.get("detail", "no answer")))
    known = {item.name for item in fields(TorchFacts)}
    about = {name: value for name, value in answer["about"].items() if name in known}
    return TorchFacts(**{**about, "architectures": tuple(about["architectures"])})


def _selftest_result(answer: dict[str, Any]) -> SelftestResult:
    if answer["works"]:
        return SelftestResult(True)
    # The first line of a compiler's error seldom names the cause: search the whole error for the common ones.
    causes = {
        "Python.h": " (Python.h is missing)",
        "Failed to find C compiler": " (no C compiler)",
        "out of memory": " (the GPU's memory is full)",
    }
    cause = next((cause for pattern, cause in causes.items() if pattern in str(answer["whole"])), "")
    return SelftestResult(False, f"{answer['detail']}{cause}")


# --- GPUs


def _gpu_facts() -> tuple[tuple[GpuFacts, ...], int]:
    """Return every card that the driver shows, and how many devices CUDA would give this process."""
    library = nvml.open_nvml()
    if library is None:
        return (), 0
    count = nvml.none_on_error(library.nvmlDeviceGetCount) or 0
    handles = [nvml.none_on_error(partial(library.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    cards = [_one_gpu(library, index, handle) for index, handle in enumerate(handles) if handle is not None]
    return tuple(cards), len(nvml.none_on_error(lambda: nvml.visible_handles(library)) or [])


def _one_gpu(library: Any, index: int, handle: Any) -> GpuFacts:
    query = nvml.none_on_error
    memory = query(lambda: library.nvmlDeviceGetMemoryInfo(handle))
    processes = query(lambda: list(library.nvmlDeviceGetComputeRunningProcesses(handle))) or ()
    return GpuFacts(
        index=index,
        name=query(lambda: nvml.text(library.nvmlDeviceGetName(handle))) or "unnamed GPU",
        capability=query(lambda: tuple(library.nvmlDeviceGetCudaComputeCapability(handle))),
        memory_bytes=query(lambda: nvml.usable_memory(library, handle)) or 0,
        free_bytes=int(memory.free) if memory is not None else 0,
        processes=tuple(_gpu_process(process) for process in processes),
        ecc=query(lambda: bool(library.nvmlDeviceGetEccMode(handle)[0])),
        persistence=query(lambda: bool(library.nvmlDeviceGetPersistenceMode(handle))),
        mig=query(lambda: bool(library.nvmlDeviceGetMigMode(handle)[0])),
        throttle=query(lambda: nvml.throttle_names(nvml.throttle_bits(library, handle))) or "",
    )


def _gpu_process(process: Any) -> GpuProcess:
    try:
        name = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        name = "?"  # it runs in another container
    return GpuProcess(int(process.pid), name, None if process.usedGpuMemory is None else int(process.usedGpuMemory))


def has_pci_gpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether an NVIDIA display or compute card is on the PCI bus."""
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA; display controllers (0x04 is its audio device)
            return True
    return False


# --- the host


def _free_memory() -> int | None:
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def folder_facts(purpose: str, path: Path) -> FolderFacts:
    """Return the free space and the file operations that fail where `path` is, or will be created."""
    path = path.absolute()
    places = (path, *path.parents)
    existing = next(folder for folder in places if folder.is_dir())
    free = nvml.none_on_error(lambda: shutil.disk_usage(existing).free)
    # A file or a dead link in the way prevents that the folder is created.
    blocked = any(os.path.lexists(place) for place in places[: places.index(existing)])
    return FolderFacts(purpose, str(path), free, ("write",) if blocked else tuple(_failing_operations(existing)))


def _failing_operations(folder: Path) -> list[str]:
    try:
        with tempfile.TemporaryDirectory(prefix=".redline-doctor-", dir=folder) as name:
            scratch = Path(name)
            operations: dict[str, Callable[[], object]] = {
                "fsync": lambda: _write_and_sync(scratch / "a"),
                "rename": lambda: (scratch / "a").replace(scratch / "b"),
                "symlink": lambda: (scratch / "c").symlink_to("b"),
            }
            return [what for what, operation in operations.items() if _fails(operation)]
    except OSError:
        return ["write"]


def _write_and_sync(path: Path) -> None:
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


# --- packages and environment variables


def _packages() -> tuple[Package, ...]:
    required = [Package(name, _version(name), purpose) for name, purpose in REQUIRED.items()]
    optional = [
        Package(name, _version(name), purpose, extra)
        for extra, packages in EXTRAS.items()
        for name, purpose in packages.items()
    ]
    return (*required, *optional)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment_variables() -> dict[str, str]:
    """Return the variables that matter to redline; of a secret only that it is set."""
    names = ["HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    names += sorted(name for name in os.environ if name.startswith("REDLINE_"))
    return {name: "set" if is_secret_name(name) else os.environ[name] for name in names if name in os.environ}
