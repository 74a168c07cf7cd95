"""What `redline doctor` looks at, as plain data: gathered in one place, judged in another."""

from __future__ import annotations

from dataclasses import dataclass, field

from redline.hardware.measured import Measured


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
    measured: Measured | None = None
