"""What is measured once is found again, on the same machine only; and the machine is known without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.hardware import machine as here
from redline.hardware import measurements as measured
from redline.hardware import probe
from redline.hardware.machine import Machine, cpu_machine, gpu_machine, local_machine
from redline.hardware.probe import detect_machine

RATES = {"fp32": 1e11, "bf16": 2e11, "copy": 1e10}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements made, which are quick and always the same."""
    made: list[str] = []
    monkeypatch.setattr(probe, "measure", lambda device: made.append(device) or dict(RATES))
    return made


def test_a_cpu_is_measured_a_few_times(cache: Path, count: list[str]) -> None:
    assert local_machine() is None
    first = detect_machine("cpu")
    assert detect_machine("cpu") == detect_machine("cpu") == detect_machine("cpu") == first == local_machine()
    assert count == ["cpu"] * 3, "the machine may have been busy once or twice"
    assert first.measured == RATES
    assert first.cpu_flops == 2e11
    assert first.fast_bf16


@pytest.mark.parametrize("threads", ["7", "7,2"])
def test_another_number_of_threads_is_another_machine(
    cache: Path, count: list[str], monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    detect_machine("cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert local_machine() is None
    detect_machine("cpu")
    assert len(count) == 2
    assert "7 threads" in measured.cpu_key()


def test_another_torch_is_another_machine(cache: Path, count: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    detect_machine("cpu")
    monkeypatch.setattr(measured, "installed_torch_version", lambda: "2.99.0+cpu")
    assert local_machine() is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"\xff\xfe\x00",
        b'{"schema": NOW}',
        b'{"schema": NOW, "entries": 5}',
        b'{"schema": 0, "entries": {}}',
        b'{"schema": NOW, "entries": {"KEY": 3}}',
        b'{"schema": NOW, "entries": {"KEY": {"date": "2026-01-01", "rates": {}}}}',
        b'{"schema": NOW, "entries": {"KEY": {"date": "2026-01-01", "rates": {"fp32": "fast"}}}}',
        b'{"schema": NOW, "entries": {"KEY": {"date": "2026-01-01", "rates": {"fp32": -1.0}}}}',
        b'{"schema": NOW, "entries": {"KEY": {"date": "2026-01-01", "rates": {"fp32": NaN}}}}',
        b'{"schema": NOW, "entries": {"KEY": {"rates": {"fp32": 1.0}}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_cache_is_measured_anew(cache: Path, count: list[str], damage: bytes) -> None:
    cache.mkdir()
    now = str(measured.SCHEMA).encode()
    (cache / "machine.json").write_bytes(damage.replace(b"KEY", measured.cpu_key().encode()).replace(b"NOW", now))
    assert local_machine() is None
    assert detect_machine("cpu").measured == RATES
    assert local_machine() == detect_machine("cpu")
    assert measured.read_rates(measured.cpu_key()) == RATES


def test_a_busy_minute_does_not_decide_for_later_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([1e11, 3e11, 2e11, 9e11])
    monkeypatch.setattr("redline.hardware.probe._measure_cpu", lambda: {"fp32": next(speeds)})
    assert [detect_machine("cpu").cpu_flops for _ in range(5)] == [1e11, 3e11, 3e11, 3e11, 3e11]


def test_a_cache_that_cannot_be_written_costs_no_run(
    tmp_path: Path, count: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "file/cache"))
    assert detect_machine("cpu").measured == RATES


def test_entries_live_side_by_side(cache: Path) -> None:
    measured.store_rates("one", {"fp32": 1.23456e11})
    measured.store_rates("two", {"fp32": 2e11})
    assert measured.read_rates("one") == {"fp32": 1.235e11}
    assert measured.read_rates("two") == {"fp32": 2e11}
    assert [path.name for path in cache.iterdir()] == ["machine.json"], "nothing is left of the writing"


def test_the_measurement_itself() -> None:
    rates = probe.measure("cpu")
    assert set(rates) == {"fp32", "bf16", "copy", "cached"}
    assert 1e8 < rates["fp32"] < 1e15
    assert 1e8 < rates["copy"] < 1e13


def test_a_matmul_counts_two_operations_per_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_fastest", lambda work: dict.fromkeys(work, 0.5))
    rates = probe.measure("cpu")
    assert rates["fp32"] == rates["bf16"] == 2 * 2048 * 256 * 768 / 0.5
    assert rates["copy"] == 2 * (64 << 20) / 0.5
    assert rates["cached"] == 3 * 4 * 2048 * 256 / 0.5, "two factors are read and the product is written"


def test_forbidden_instructions_make_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measured.cpu_key()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert measured.cpu_key() != plain


def test_a_gpu_is_known_without_torch(cache: Path, plug_in: Any, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "installed_torch_version", lambda: "2.11.0+cu130")
    plug_in(card(name="NVIDIA H300", capability=(11, 0), total=300 << 30, reserved=0))
    machine = local_machine()
    assert machine == Machine(
        "cuda", "NVIDIA H300", 300 << 30, machine.cores if machine else 0, (11, 0), fast_bf16=True
    )
    assert machine is not None
    assert machine.spec is None, "an unknown card has nobody's figures"
    measured.store_rates(measured.gpu_key("NVIDIA H300", "580.95.05"), {"bf16": 1.5e15})
    again = local_machine()
    assert again is not None
    assert again.measured == {"bf16": 1.5e15}
    assert again.spec is None
    plug_in(card(name="NVIDIA H300"), driver="590.00")
    other = local_machine()
    assert other is not None
    assert other.measured is None, "another driver is measured anew"


def test_a_torch_for_cpus_and_a_hidden_card_mean_the_cpu(
    cache: Path, count: list[str], plug_in: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = detect_machine("cpu")
    plug_in(card())
    monkeypatch.setattr(here, "installed_torch_version", lambda: "2.11.0+cpu")
    assert local_machine() == cpu
    monkeypatch.setattr(here, "installed_torch_version", lambda: "2.11.0+cu130")
    assert local_machine().device == "cuda"  # type: ignore[union-attr]
    plug_in(card(), visible="")
    assert local_machine() == cpu


def test_facts_are_json_and_a_machine_can_be_a_key() -> None:
    machines = [cpu_machine(RATES), gpu_machine("NVIDIA H200", 140 << 30, (9, 0), {"bf16": 7e14})]
    for machine in machines:
        assert json.loads(json.dumps(machine.facts()))["measured"] == machine.measured
    assert len(set(machines)) == 2
    assert not gpu_machine("V100", 16 << 30, (7, 0), None).fast_bf16


def test_it_answers_at_once_and_without_torch(cache: Path) -> None:
    measured.store_rates(measured.cpu_key(), RATES)
    program = (
        "import sys, time, redline.recipe.resolve; start = time.perf_counter();"
        "from redline.hardware.machine import local_machine; machine = local_machine();"
        "print(time.perf_counter() - start, 'torch' in sys.modules, machine.name)"
    )
    done = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split(" ", 2)
        for _ in range(3)
    ]
    assert all(has_torch == "False" for _, has_torch, _ in done)
    assert min(float(seconds) for seconds, _, _ in done) < 0.03
