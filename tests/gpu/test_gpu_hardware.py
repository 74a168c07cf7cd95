"""NVML readings, the probe, the doctor and the attention ranking on a real GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.hardware.machine import local_machine
from redline.hardware.nvml import Nvml
from redline.hardware.probe import detect_machine, measure_and_store

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_the_gpu_is_described_the_same_with_and_without_torch() -> None:
    with_torch, without = detect_machine("cuda"), local_machine()
    assert without is not None
    assert (without.device, without.name, without.capability) == ("cuda", with_torch.name, with_torch.capability)
    assert without.memory_bytes == pytest.approx(with_torch.memory_bytes, rel=0.01)
    assert without.measured is with_torch.measured is None


def test_readings_of_a_busy_gpu() -> None:
    nvml = Nvml()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
    for _ in range(200):
        a @ a
    reading = nvml.read()
    torch.cuda.synchronize()
    print(reading)
    assert None not in vars(reading).values()
    assert 50 <= (reading.gpu_util or 0) <= 100
    assert 10 < (reading.power_w or 0) < 1.2 * (reading.power_limit_w or 0)
    assert 0 < (reading.sm_clock_mhz or 0) <= (reading.sm_clock_max_mhz or 0)
    assert 10 < (reading.temperature_c or 0) < 110
    assert (reading.gpu_memory_gib or 0) * 2**30 > a.numel() * 2
    begin = time.perf_counter()
    for _ in range(10):
        nvml.read()
    each = (time.perf_counter() - begin) / 10
    print(f"{1000 * each:.2f} ms per reading")
    assert each < 0.05


def test_step_events_have_the_readings(world: Any, tmp_path: Path) -> None:
    from redline.runs.events import read_events

    world.run(tmp_path / "run", "train.device=cuda", "train.steps=3", machine=detect_machine("cuda"))
    step = [event for event in read_events(tmp_path / "run/events.jsonl") if event["type"] == "step"][-1]
    names = ("gpu_util", "gpu_memory_gib", "power_w", "sm_clock_mhz", "temperature_c", "throttle", "energy_j")
    assert all(step[name] is not None for name in names), step


def test_measured_rates_are_below_the_peak_and_cached(cache: Path) -> None:
    begin = time.perf_counter()
    rates = measure_and_store("cuda")
    seconds = time.perf_counter() - begin
    print({name: f"{rate:.4g}" for name, rate in rates.items()}, f"{seconds:.1f} s")
    assert seconds < 20
    assert {"fp32", "fp16", "copy", "to_device", "to_host"} <= {*rates}
    machine = detect_machine("cuda")
    assert machine.measured == rates
    assert local_machine().measured == rates  # type: ignore[union-attr]
    if torch.cuda.get_device_capability() >= (8, 9):
        assert rates["fp8"] > 1.2 * rates["bf16"] > 1.2 * rates["tf32"] > 1.2 * rates["fp32"]
    if machine.spec:
        for name in ("fp32", "bf16", "fp16", "fp8"):
            peak = machine.spec.peak(name)
            if peak:
                assert 0.4 * peak < rates[name] < 1.05 * peak, name
        assert 0.5 * machine.spec.bandwidth < rates["copy"] < machine.spec.bandwidth


def test_the_doctor_runs_all_its_self_tests(cache: Path) -> None:
    """Run it as a user does, in its own process; on a Hopper GPU every self-test passes."""
    command = [sys.executable, "-m", "redline", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, timeout=300)
    print(f"{time.perf_counter() - begin:.1f} s", done.stdout, done.stderr)
    lines = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert lines["gpu"]["status"] == lines["cuda"]["status"] == "ok"
    assert torch.cuda.get_device_name(0) in lines["gpu 0"]["detail"]
    if torch.cuda.get_device_capability() == (9, 0):
        kernels = ("bf16", "fp8", "cuDNN attention", "flash attention", "efficient attention", "flex attention")
        assert {lines[name]["detail"] for name in (*kernels, "torch.compile")} == {"works"}
    assert done.returncode == (1 if any(line["status"] == "fail" for line in lines.values()) else 0)


def test_a_hidden_gpu_is_a_failure_with_a_fix(cache: Path) -> None:
    command = [sys.executable, "-m", "redline", "doctor"]
    path = f"{SOURCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    assert "CUDA_VISIBLE_DEVICES='' hides" in done.stdout
    assert "Unset it" in done.stdout


def test_attention_backends_are_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.kernels import attention
    from redline.kernels.attention import MaskSpec

    def ask() -> attention.Selection:
        return attention.select("auto", MaskSpec(), device="cuda", dtype=torch.bfloat16, shape=(4, 8, 512, 64))

    first = ask()
    monkeypatch.setattr(attention, "measure", lambda *_, **__: pytest.fail("measured again"))
    second = ask()
    print(first, second)
    assert second.backend == first.backend
    assert "as measured on" in second.reason
    assert (cache / "attention.json").is_file()
