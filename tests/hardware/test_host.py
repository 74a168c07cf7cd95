"""A container's limits count, in both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from redline.hardware.host import available_cores, cgroup_cores, cgroup_memory_bytes, cpu_threads, host_memory_bytes

GIB = 1 << 30


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_limits(tmp_path: Path) -> None:
    assert cgroup_memory_bytes(tmp_path) is None
    assert cgroup_cores(tmp_path) is None
    assert host_memory_bytes(tmp_path) > GIB // 4
    assert available_cores(tmp_path) >= 1


def test_version_two_takes_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = machine(
        tmp_path,
        "0::/slice/job\n",
        {
            f"{top}/slice/job/memory.max": "max\n",
            f"{top}/slice/memory.max": f"{GIB}\n",
            f"{top}/memory.max": f"{4 * GIB}\n",
            f"{top}/slice/job/cpu.max": "150000 100000\n",
            f"{top}/slice/cpu.max": "max 100000\n",
        },
    )
    assert cgroup_memory_bytes(root) == GIB
    assert host_memory_bytes(root) == GIB
    assert cgroup_cores(root) == 1.5
    assert available_cores(root) == min(2, len(os.sched_getaffinity(0)))


def test_version_one(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = machine(
        tmp_path,
        "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n3:pids:/docker/x\n",
        {
            f"{top}/memory/docker/x/memory.limit_in_bytes": f"{2 * GIB}",
            f"{top}/memory/memory.limit_in_bytes": "9223372036854771712",  # no limit, in its words
            f"{top}/cpu/docker/x/cpu.cfs_quota_us": "50000",
            f"{top}/cpu/docker/x/cpu.cfs_period_us": "100000",
            f"{top}/cpu/cpu.cfs_quota_us": "-1",
            f"{top}/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup_memory_bytes(root) == 2 * GIB
    assert cgroup_cores(root) == 0.5
    assert available_cores(root) == 1


def test_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/../../outside\n", {"sys/fs/cgroup/memory.max": f"{GIB}"})
    assert cgroup_memory_bytes(root) in (GIB, None), "never a crash, never an endless climb"
    root = machine(tmp_path, "nonsense", {"sys/fs/cgroup/cpu.max": "1 0"})
    assert cgroup_cores(root) is None


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("4,2", 4), ("0", None), ("many", None), ("", None)])
def test_threads(monkeypatch: pytest.MonkeyPatch, variable: str, threads: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cpu_threads() == (threads or available_cores())
