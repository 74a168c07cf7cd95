"""The host: processor, cores and memory that this process may really use, container limits included."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def available_cores(root: Path = ROOT) -> int:
    """Cores of this process's affinity, or fewer when a container's quota allows less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_threads() -> int:
    """How many threads torch will compute with, by its own rule."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) else available_cores()


def physical_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def host_memory_bytes(root: Path = ROOT) -> int:
    """What the machine has, or what the container may use of it."""
    return min(physical_memory_bytes() or 8 << 30, cgroup_memory_bytes(root) or 1 << 62)


def cpp_compiler() -> str | None:
    """A C++ compiler, which torch.compile needs on a CPU."""
    names = (os.environ.get("CXX", "g++"), "g++", "clang++")
    return next((name for name in names if shutil.which(name)), None)


def cgroup_memory_bytes(root: Path = ROOT) -> int | None:
    """The smallest memory limit on the way from this process's control group to the top; None without one."""
    limits = [
        int(text)
        for folder in _groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdigit()  # version 2 writes "max" for none
    ]
    smallest = min(limits, default=1 << 62)
    return smallest if smallest < 1 << 60 else None  # version 1 writes a huge number for none


def cgroup_cores(root: Path = ROOT) -> float | None:
    """The processor time per time that the control groups leave: a quota over its period; None without one."""
    quotas = []
    for folder in _groups(root, "cpu"):
        whole = _text(folder / "cpu.max").split()
        split = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        for quota, period in (pair for pair in (whole, split) if len(pair) == 2):
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that limit `controller`, version 2 and 1, up to the top."""
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        yield folder
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


# ----------------------------------------------------------------------------------------------------
# Keeping large buffers instead of giving them back to the kernel after every operation.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST = 1 << 30


def keep_freed_memory_mapped() -> None:
    """A CPU step allocates the same hundred megabytes each time; glibc would return them and fault them in again
    (measured: 25,000 page faults a step, docs/decisions/0003-cpu-threads.md). Other C libraries are left alone."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1)
