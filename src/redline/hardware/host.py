"""The CPU side of a machine: processor, cores, memory and processes, container limits included.

Linux answers through /proc. Systems without it, such as macOS, answer through `sysctl` and `ps`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path("/")
_COMMAND_S = 10.0  # for sysctl and ps, which take milliseconds
_UNLIMITED = 1 << 60  # cgroup version 1 writes a number of this size for "no limit"


def cpu_name() -> str:
    if sys.platform == "darwin":
        return _apple_cpu_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


@cache  # each call starts a process
def _apple_cpu_name() -> str:
    return _output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine() or "CPU"


def available_cores(root: Path = ROOT) -> int:
    """Return the cores of this process's affinity, or fewer if a container's CPU quota allows less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def process_exists(pid: int) -> bool:
    """Return whether there is a process with this id. A zombie is one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def process_runs(pid: int, root: Path = ROOT) -> bool:
    """Return whether a process runs. A zombie does not: only its parent has not read its exit code yet."""
    if has_proc(root):
        state = _read(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    else:
        state = _output("ps", "-o", "stat=", "-p", str(pid)).split()
    return bool(state) and state[0][0] not in "ZX"


def list_processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the command line of every process, by its id, from `ps`."""
    rows = (line.split(maxsplit=2) for line in _output("ps", "-axo", "pid=,ppid=,command=").splitlines())
    return {int(row[0]): (int(row[1]), row[2]) for row in rows if len(row) == 3}


def has_proc(root: Path = ROOT) -> bool:
    """Return whether the system describes its processes in /proc."""
    return (root / "proc/self/stat").exists()


def _output(*command: str) -> str:
    """Return what a command prints; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def cpu_threads() -> int:
    """Return how many threads torch will compute with: OMP_NUM_THREADS, else the available cores."""
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(requested) if requested.isdigit() and int(requested) else available_cores()


def physical_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def host_memory_bytes(root: Path = ROOT) -> int:
    """Return the machine's memory, or the container's limit if that is lower."""
    return min(physical_memory_bytes() or 8 << 30, cgroup_memory_bytes(root) or 1 << 62)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch.compile would use on a CPU, or None."""
    names = (os.environ.get("CXX", "g++"), "g++", "clang++")
    return next((name for name in names if shutil.which(name)), None)


def cgroup_memory_bytes(root: Path = ROOT) -> int | None:
    """Return the smallest memory limit of this process's control group and its parents; None without a limit."""
    limits = [
        int(text)
        for folder in _control_groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name)).isdigit()  # version 2 writes "max" for no limit
    ]
    smallest = min(limits, default=_UNLIMITED)
    return smallest if smallest < _UNLIMITED else None


def cgroup_cores(root: Path = ROOT) -> float | None:
    """Return the CPU quota of this process's control groups, in cores (quota / period); None without a quota."""
    quotas = []
    for folder in _control_groups(root, "cpu"):
        version_2 = _read(folder / "cpu.max").split()
        version_1 = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        for quota, period in (pair for pair in (version_2, version_1) if len(pair) == 2):
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups for `controller` (versions 1 and 2), and their parents."""
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        yield folder
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_BUFFER = 1 << 30


def keep_freed_memory_mapped() -> None:
    """Make glibc keep large freed buffers instead of returning them to the kernel.

    A CPU step allocates the same hundred megabytes every time; returning and faulting them in again costs 25,000 page
    faults a step (docs/decisions/0003-cpu-threads.md). Other C libraries have no such setting.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BUFFER)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_BUFFER - 1)
