"""The checks of `redline doctor` on invented machines: old drivers, hidden cards, full disks."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline import errors
from redline.hardware import doctor, selftest
from redline.hardware import facts as collected
from redline.hardware.doctor import Check
from redline.hardware.facts import (
    Facts,
    FolderFacts,
    GpuFacts,
    GpuProcess,
    Package,
    SelftestResult,
    TorchFacts,
)

GIB = 1 << 30
ROOT = Path(__file__).parents[2]
TORCH = TorchFacts("2.11.0+cu130", "13.0", "91200", "2.28.9", True, ("sm_80", "sm_90", "sm_100", "compute_120"))
CPU_TORCH = TorchFacts("2.13.0+cpu")
H200 = GpuFacts(0, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, ecc=True, persistence=True, mig=False)
WORKING = {name: SelftestResult(True) for name in selftest.CAPABILITIES}
GOOD = Facts(
    python=(3, 12, 1),
    torch=TORCH,
    gpus=(H200,),
    visible=1,
    driver="580.95.05",
    driver_cuda="13.0",
    pci_gpu=True,
    selftests=WORKING,
    compiler="g++",
    physical_memory=128 * GIB,
    memory=128 * GIB,
    memory_free=100 * GIB,
    machine_cores=16,
    cores=16,
    shared_memory=16 * GIB,
    folders=(FolderFacts("cache", "/cache", 100 * GIB), FolderFacts("runs", "/here/runs", 100 * GIB)),
    packages=(Package("tiktoken", "0.9", "gpt2"),),
)
CPU_ONLY = replace(
    GOOD, torch=CPU_TORCH, gpus=(), visible=0, driver=None, driver_cuda=None, pci_gpu=False, selftests={}
)


def checks_by_name(facts: Facts) -> dict[str, Check]:
    lines = {check.name: check for check in doctor.run_checks(facts)}
    assert len(lines) == len(doctor.run_checks(facts)), "no name twice"
    for check in lines.values():
        assert check.status in ("ok", "warn", "fail")
        assert check.detail
        assert check.status != "fail" or check.fix.endswith("."), "a failure comes with the fix"
    return lines


def worse(facts: Facts) -> dict[str, str]:
    return {name: check.status for name, check in checks_by_name(facts).items() if check.status != "ok"}


def test_a_good_machine_has_nothing_to_mend() -> None:
    assert worse(GOOD) == {}


def test_a_machine_without_a_gpu_is_warned_and_works() -> None:
    lines = checks_by_name(CPU_ONLY)
    assert "fail" not in {check.status for check in lines.values()}
    assert lines["gpu"].status == "warn"
    assert "no NVIDIA GPU" in lines["gpu"].detail
    assert "works on the CPU" in lines["gpu"].detail
    assert lines["fp8"].status == lines["flash attention"].status == "warn"
    assert lines["torch.compile"].status == lines["cuda"].status == "ok"


@pytest.mark.parametrize(
    ("change", "name", "status", "says", "fix"),
    [
        ({"python": (3, 10, 2)}, "python", "fail", "3.10.2 is too old", "3.11"),
        ({"python": (3, 14, 0)}, "python", "warn", "not tested", "3.11 or 3.12"),
        ({"torch": replace(TORCH, version="2.10.1+cu128")}, "torch", "fail", "too old", "Install torch 2.11 to 2.13"),
        ({"torch": replace(TORCH, version="2.14.0")}, "torch", "warn", "not tested", "2.11 to 2.13"),
        ({"torch": TorchFacts(error="OSError: libx.so")}, "torch", "fail", "libx.so", "make setup"),
        ({"driver_cuda": "12.4"}, "cuda", "fail", "too old", "Update the driver"),
        ({"driver_cuda": "12.4"}, "gpu", "ok", "1 of 1", ""),
        ({"torch": CPU_TORCH}, "gpu", "fail", "is a CPU build", "built for CUDA"),
        ({"torch": CPU_TORCH}, "cuda", "fail", "without CUDA", "built for CUDA"),
        ({"driver_cuda": None, "driver": None}, "cuda", "warn", "NVML does not report", "nvidia-ml-py"),
        ({"visible": 2, "torch": replace(TORCH, nccl=None)}, "nccl", "warn", "cannot train together", "NCCL"),
        ({"visible": 2, "shared_memory": 64 << 20}, "/dev/shm", "warn", "0.06 GiB", "--ipc=host"),
        ({"memory_free": GIB}, "memory", "warn", "1.0 GiB free", "Stop other programs"),
        ({"memory": 8 * GIB}, "memory", "ok", "of the machine's 128.0 GiB, by the container's limit", ""),
        ({"environment": {"OMP_NUM_THREADS": "64"}}, "cores", "warn", "OMP_NUM_THREADS=64", "16"),
        ({"environment": {"REDLINE_PRICE": "cheap"}}, "REDLINE_PRICE", "warn", "'cheap'", "REDLINE_PRICE=2.5"),
        ({"environment": {"REDLINE_PRICE": "-3"}}, "REDLINE_PRICE", "warn", "'-3' is negative", "REDLINE_PRICE=2.5"),
        ({"environment": {"REDLINE_PRICE": "nan"}}, "REDLINE_PRICE", "warn", "'nan' is not a number", "=2.5"),
        ({"environment": {"REDLINE_PRICE": "2.5"}}, "REDLINE_PRICE", "ok", "2.5", ""),
        ({"environment": {"HF_HUB_OFFLINE": "1"}}, "HF_HUB_OFFLINE", "ok", "downloads are disabled", ""),
    ],
)
def test_one_thing_is_different(change: dict[str, Any], name: str, status: str, says: str, fix: str) -> None:
    check = checks_by_name(replace(GOOD, **change))[name]
    assert check.status == status
    assert says in check.detail
    assert fix in check.fix


@pytest.mark.parametrize(
    ("change", "says", "fix"),
    [
        ({"driver_cuda": "12.4"}, "the driver is too old", "built for CUDA 12"),
        ({"visible": 0, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES='' hides", "Unset it"),
        ({"visible": 0, "environment": {"CUDA_VISIBLE_DEVICES": "9"}}, "='9' hides 1 of 1", "CUDA_VISIBLE_DEVICES=0"),
        ({"visible": 0}, "MIG mode and has no slice", "nvidia-smi -mig 0"),
        ({}, "unknown error 999", "nvidia-smi"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_failure(change: dict[str, Any], says: str, fix: str) -> None:
    torch = replace(TORCH, available=False, error="unknown error 999")
    lines = checks_by_name(replace(GOOD, torch=torch, selftests={}, **change))
    assert lines["gpu"].status == "fail"
    assert says in lines["gpu"].detail
    assert fix in lines["gpu"].fix
    assert "not tested" in lines["bf16"].detail


def test_a_card_without_a_driver_is_seen() -> None:
    lines = checks_by_name(replace(CPU_ONLY, pci_gpu=True))
    assert lines["gpu"].status == "warn"
    assert "--gpus all" in lines["gpu"].fix


@pytest.mark.parametrize(
    ("capability", "works"),
    [
        ((9, 0), True),
        ((8, 0), True),
        ((8, 6), True),
        ((10, 3), True),
        ((12, 1), True),
        ((7, 0), False),
        ((5, 2), False),
    ],
)
def test_a_card_that_this_torch_has_no_kernels_for(capability: tuple[int, int], works: bool) -> None:
    lines = checks_by_name(replace(GOOD, gpus=(replace(H200, capability=capability),)))
    assert lines["gpu"].status == ("ok" if works else "fail")


def test_a_card_in_use_names_who_uses_it() -> None:
    users = (GpuProcess(4711, "python", 80 * GIB), GpuProcess(12, "?", None))
    lines = checks_by_name(replace(GOOD, gpus=(replace(H200, free_bytes=50 * GIB, processes=users),)))
    assert lines["gpu 0 memory"].status == "warn"
    assert (
        "50.0 of 140.0 GiB free; used by python (process 4711, 80.0 GiB), ? (process 12)"
        in lines["gpu 0 memory"].detail
    )
    assert "CUDA_VISIBLE_DEVICES" in lines["gpu 0 memory"].fix


@pytest.mark.parametrize(
    ("change", "line", "fix"),
    [
        ({"ecc": False}, "gpu 0 modes", "nvidia-smi -e 1"),
        ({"persistence": False}, "gpu 0 modes", "nvidia-smi -pm 1"),
        ({"mig": True}, "gpu 0 modes", "nvidia-smi -mig 0"),
        ({"throttle": "idle+hw_thermal"}, "gpu 0 clock", "cooling"),
    ],
)
def test_modes_of_a_card(change: dict[str, Any], line: str, fix: str) -> None:
    facts = replace(GOOD, gpus=(replace(H200, **change),))
    assert worse(facts) == {line: "warn"}
    assert fix in checks_by_name(facts)[line].fix


def test_modes_that_a_card_does_not_have_are_no_fault() -> None:
    assert worse(replace(GOOD, gpus=(replace(H200, ecc=None, persistence=None, mig=None, throttle="idle"),))) == {}


@pytest.mark.parametrize(
    ("name", "detail", "line", "status", "fix"),
    [
        ("bf16", "crashed (SIGSEGV)", "bf16", "fail", "train.precision=fp32"),
        ("fp8", "no kernel", "fp8", "warn", "train.precision=bf16"),
        ("cudnn", "No available kernel.", "cuDNN attention", "warn", "model.attention=auto"),
        ("flash", "timed out", "flash attention", "warn", "model.attention=auto"),
        ("compile", "failed (Python.h is missing)", "torch.compile", "warn", "apt install gcc python3-dev"),
        ("compile", "failed (no C compiler)", "torch.compile", "warn", "train.compile=false"),
    ],
)
def test_what_was_tried_and_failed(name: str, detail: str, line: str, status: str, fix: str) -> None:
    facts = replace(GOOD, selftests={**WORKING, name: SelftestResult(False, detail)})
    assert worse(facts) == {line: status}
    assert detail in checks_by_name(facts)[line].detail
    assert fix in checks_by_name(facts)[line].fix


def test_an_old_card_lacks_fp8_by_nature() -> None:
    old = replace(H200, name="NVIDIA A100", capability=(8, 0))
    check = checks_by_name(replace(GOOD, gpus=(old,), selftests={**WORKING, "fp8": SelftestResult(False, "x")}))["fp8"]
    assert check.status == "warn"
    assert "needs compute capability 8.9; this card has 8.0" in check.detail


def test_no_compiler_on_a_cpu() -> None:
    check = checks_by_name(replace(CPU_ONLY, compiler=None))["torch.compile"]
    assert check.status == "warn"
    assert "apt install g++" in check.fix


@pytest.mark.parametrize(
    ("place", "status", "says"),
    [
        (FolderFacts("runs", "/r", 10 * GIB), "ok", "10.0 GiB free"),
        (FolderFacts("runs", "/r", 10 * GIB - 1), "warn", "Checkpoints may not fit"),
        (FolderFacts("runs", "/r", GIB - 1), "fail", "train elsewhere with --run DIR"),
        (FolderFacts("cache", "/c", GIB // 2), "fail", "REDLINE_CACHE"),
        (FolderFacts("cache", "/c", 50 * GIB, ("write",)), "fail", "is not writable"),
        (FolderFacts("runs", "/r", 50 * GIB, ("fsync", "rename", "symlink")), "fail", "no fsync and rename"),
        (FolderFacts("runs", "/r", 50 * GIB, ("symlink",)), "warn", "no symbolic links"),
        (FolderFacts("runs", "/r", None), "ok", "unknown"),
    ],
)
def test_disks(place: FolderFacts, status: str, says: str) -> None:
    check = doctor._folder(place)
    assert check.status == status
    assert says in f"{check.detail} {check.fix}"


def test_packages() -> None:
    assert doctor._package(Package("wandb", "0.31", "x", "wandb")).detail == "0.31"
    optional = doctor._package(Package("pyarrow", None, "Parquet", "data"))
    assert optional.status == "ok"
    assert optional.detail == "not installed; needed for Parquet (optional, extra data)"
    required = doctor._package(Package("tiktoken", None, "x"))
    assert required.status == "warn"
    assert "make setup" in required.fix


def test_a_mac_is_told_that_mps_is_untested() -> None:
    mac = replace(CPU_ONLY, torch=replace(CPU_TORCH, mps=True), shared_memory=None, memory_free=None)
    lines = checks_by_name(mac)
    assert (lines["MPS"].status, lines["MPS"].detail) == ("warn", "available, untested by us")
    assert "train.device=cpu" in lines["MPS"].fix
    assert lines["gpu"].detail == "no NVIDIA GPU: training uses MPS"
    assert "MPS" not in checks_by_name(CPU_ONLY)


def test_a_missing_extra_names_its_recipes_and_the_command() -> None:
    packages = (
        Package("tiktoken", "1", "x"),
        Package("pyarrow", None, "x", "data"),
        Package("zstandard", "1", "x", "data"),
    )
    facts = replace(GOOD, packages=packages, recipes={"data": ["owt-cs336", "qlora-8b"]})
    (line,) = doctor.check_extras(facts)
    assert line.name == "extra data"
    assert line.status == "ok"
    assert line.detail == "pyarrow not installed; needed by owt-cs336, qlora-8b"
    assert "`make setup EXTRAS=data`" in line.fix
    (line,) = doctor.check_extras(replace(facts, packages=(Package("wandb", "1", "x", "wandb"),)))
    assert (line.detail, line.fix) == ("installed; no shipped recipe needs it", "")


def test_an_installed_wheel_names_pip_and_a_uv_tool_names_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "is_checkout", lambda: False)
    monkeypatch.setattr(errors.sys, "prefix", str(tmp_path))
    assert errors.install_hint("data") == "`pip install 'redline[data]'`"
    assert errors.dependency_hint("torch>=2.11,<2.14") == "`pip install 'torch>=2.11,<2.14'`"
    (tmp_path / "uv-receipt.toml").write_text("")
    assert errors.install_hint("data") == f"`uv pip install --python {tmp_path} 'redline[data]'`"


def test_ranges_and_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {line.split(">")[0].split("=")[0].split("<")[0].strip() for line in project["dependencies"]}
    assert {*collected.REQUIRED} <= needed
    for extra, names in collected.EXTRAS.items():
        assert {*names} == {line.partition(">")[0] for line in project["optional-dependencies"][extra]}
    (torch,) = [line for line in project["dependencies"] if line.startswith("torch>")]
    (oldest, newest), (major, minor) = doctor.OLDEST_TORCH, doctor.NEWEST_TORCH
    assert torch == errors.TORCH_REQUIREMENT == f"torch>={oldest}.{newest},<{major}.{minor + 1}"
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.OLDEST_PYTHON))


def test_measured_rates_stand_beside_the_peak_of_a_known_card() -> None:
    rates = {"bf16": 989e12 / 2, "tf32": 4e14, "copy": 2.4e12, "to_device": 5.5e10}
    known = checks_by_name(replace(GOOD, measured=rates, device_name="NVIDIA H200"))
    assert known["matmul bf16"].detail == "494.5 TFLOP/s, 50 % of the card's dense peak"
    assert known["matmul tf32"].detail == "400 TFLOP/s"
    assert known["copy within memory"].detail == "2400 GB/s, 50 % of the card's bandwidth"
    assert known["copy to the GPU"].detail == "55 GB/s"
    unknown = checks_by_name(replace(GOOD, measured=rates, device_name="NVIDIA H300"))
    assert "%" not in "".join(check.detail for name, check in unknown.items() if name.startswith(("matmul", "copy")))
    failed = checks_by_name(replace(GOOD, selftests={**WORKING, "probe": SelftestResult(False, "CUDA out of memory")}))
    assert failed["measured"].status == "warn"


# --- gathering


def test_cards_are_described(plug_in: Any, card: Any) -> None:
    process = SimpleNamespace(pid=1, usedGpuMemory=GIB)
    plug_in(card(ecc=None, mig=False, throttle=1, processes=[process]), card(name="NVIDIA L4", capability=None))
    (first, second), visible = collected._gpu_facts()
    assert visible == 2
    assert (first.name, first.capability, first.memory_bytes) == ("NVIDIA H200", (9, 0), 142 << 30)
    assert (first.free_bytes, first.ecc, first.persistence, first.throttle) == (140 << 30, None, True, "idle")
    assert first.processes[0].pid == 1
    assert first.processes[0].bytes == GIB
    assert second.capability is None


def test_a_pci_gpu(tmp_path: Path) -> None:
    assert not collected.has_pci_gpu(tmp_path / "none")
    for number, vendor, kind in (("a", "0x10de", "0x040300"), ("b", "0x8086", "0x030000")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "vendor").write_text(vendor + "\n")
        (tmp_path / number / "class").write_text(kind + "\n")
    assert not collected.has_pci_gpu(tmp_path), "a card's sound, and another maker's card"
    (tmp_path / "a" / "class").write_text("0x030200\n")
    assert collected.has_pci_gpu(tmp_path)


def test_a_place_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    place = collected.folder_facts("runs", tmp_path / "not/yet/there")
    assert place.path.endswith("not/yet/there")
    assert place.missing == ()
    assert place.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_a_place(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert collected.folder_facts("runs", tmp_path / "runs").missing == ("write",)
    assert collected.folder_facts("cache", tmp_path / "runs/redline").missing == ("write",)


@pytest.mark.parametrize("operation", ["fsync", "rename", "symlink", "write"])
def test_a_file_system_that_lacks_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("not supported")

    owner, name = {
        "fsync": (collected.os, "fsync"),
        "rename": (Path, "replace"),
        "symlink": (Path, "symlink_to"),
        "write": (collected.tempfile, "TemporaryDirectory"),
    }[operation]
    monkeypatch.setattr(owner, name, refuse)
    assert collected.folder_facts("cache", tmp_path).missing == (operation,)


def test_secrets_are_never_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("REDLINE_API_KEY", "abc")
    monkeypatch.setenv("REDLINE_PRICE", "2")
    monkeypatch.setenv("HF_HOME", "/hub")
    variables = collected.environment_variables()
    assert variables["HF_TOKEN"] == variables["REDLINE_API_KEY"] == "set"
    assert variables["REDLINE_PRICE"] == "2"
    assert "hf_abc" not in str(doctor.check_environment(replace(GOOD, environment=variables)))
    lines = {check.name: check.detail for check in doctor.check_environment(replace(GOOD, environment=variables))}
    assert (lines["HF_HOME"], lines["HF_TOKEN"]) == ("set", "set")


@pytest.mark.parametrize(
    ("error", "says"), [("x\nPython.h: No such file", "Python.h"), ("CUDA out of memory. y", "full")]
)
def test_the_line_that_matters_is_found(error: str, says: str) -> None:
    assert says in collected._selftest_result({"works": False, "detail": "first", "whole": error}).detail
