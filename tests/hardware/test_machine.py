"""What the machine is: known cards by their own numbers, unknown ones by none."""

from __future__ import annotations

import json

import pytest

from redline.errors import UserError
from redline.hardware.machine import Machine
from redline.hardware.probe import detect_machine
from redline.hardware.specs import SPECS, spec_of


@pytest.mark.parametrize(
    ("driver", "name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989),
        ("NVIDIA H100 PCIe", "h100-pcie", 756),
        ("NVIDIA H100 NVL", "h100-nvl", 835),
        ("NVIDIA H200", "h200", 989),
        ("NVIDIA GH200 480GB", "gh200", 989),
        ("NVIDIA B200", "b200", 2250),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 312),
        ("NVIDIA A100 80GB PCIe", "a100-80gb", 312),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", 312),
        ("NVIDIA L40S", "l40s", 362),
        ("NVIDIA L4", "l4", 121),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 165),
        ("NVIDIA GeForce RTX 5090", "rtx5090", 209),
    ],
)
def test_known_cards(driver: str, name: str, tflops: float) -> None:
    spec = spec_of(driver)
    assert spec is not None
    assert spec.name == name
    assert spec.peak("bf16") == spec.peak("fp16") == tflops * 1e12


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H200 NVL",
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA L40",
        "NVIDIA L40G",
        "NVIDIA GB200",
        "NVIDIA B300",
        "NVIDIA A10G",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA RTX 6000 Ada Generation",
        "Tesla V100-SXM2-16GB",
        "Tesla T4",
        "",
    ],
)
def test_any_other_card_is_unknown(driver: str) -> None:
    assert spec_of(driver) is None


def test_peaks_are_dense() -> None:
    """Vendors print twice as much, for weights of which half are zero."""
    for spec in SPECS.values():
        assert spec.bf16 < 2500e12
        if spec.fp8 is not None:
            assert spec.fp8 == pytest.approx(2 * spec.bf16, rel=0.02)
    assert SPECS["a100-80gb"].peak("fp8") is None


def test_the_cpu() -> None:
    machine = detect_machine("cpu")
    assert machine.device == "cpu"
    assert machine.name
    assert machine.cores >= 1
    assert 1 << 28 < machine.memory_bytes < 1 << 50
    assert machine.cpu_flops is not None
    assert 1e8 < machine.cpu_flops < 1e15
    assert machine.spec is None
    assert machine.peak("bf16") is None
    assert json.loads(json.dumps(machine.facts()))["name"] == machine.name


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_machine("auto").device == "cpu"
    with pytest.raises(UserError, match=r"train\.device: .*finds no GPU.*train\.device=cpu"):
        detect_machine("cuda")


def test_a_machine_finds_its_spec() -> None:
    machine = Machine("cuda", "NVIDIA A100-SXM4-80GB", 85 * 10**9, 8)
    assert machine.spec is SPECS["a100-80gb"]
    assert machine.peak("fp32") == 19.5e12
