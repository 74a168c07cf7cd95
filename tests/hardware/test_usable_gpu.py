"""Cards that torch cannot use, or that others use already: a sentence with the fix, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.errors import UserError
from redline.hardware import probe
from redline.hardware.machine import Machine
from redline.hardware.nvml import foreign_use
from redline.hardware.probe import detect_machine

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)


@pytest.fixture
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch pass for a build for CUDA 13.0 that cannot use the card."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probe, "read_rates", lambda _: {"fp32": 1e11, "bf16": 1e11})
    monkeypatch.setattr(probe, "measurement_count", lambda _: 3)


@pytest.mark.usefixtures("torch_for_cuda")
@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("cuda", "says"), [(12080, "too old"), (13010, "finds no GPU")])
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu_silently(
    plug_in: Callable[..., Any], card: type, device: str, cuda: int, says: str
) -> None:
    plug_in(card(), driver="570.86.10", cuda=cuda)
    with pytest.raises(UserError) as refused:
        detect_machine(device)
    assert says in refused.value.what
    assert ("570.86.10" in refused.value.what) is (says == "too old")
    assert refused.value.where == "train.device"
    assert "train.device=cpu" in str(refused.value.fix)
    assert detect_machine("cpu").device == "cpu"


@pytest.mark.usefixtures("torch_for_cuda")
def test_a_hidden_gpu_is_not_asked_for(plug_in: Callable[..., Any], card: type) -> None:
    plug_in(card(), visible="")
    assert detect_machine("auto").device == "cpu"


@pytest.mark.parametrize(("capability", "usable"), [((6, 1), False), ((7, 5), True), ((9, 0), True), ((12, 1), True)])
def test_a_card_older_than_every_kernel_of_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], usable: bool
) -> None:
    major, minor = capability
    properties = SimpleNamespace(name="NVIDIA Card", total_memory=8 << 30, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"])
    if usable:
        assert detect_machine().capability == capability
        return
    with pytest.raises(UserError) as refused:
        detect_machine()
    assert "6.1" in refused.value.what
    assert "7.5" in refused.value.what
    assert "train.device=cpu" in str(refused.value.fix)


def test_other_programs_on_the_card_are_named(plug_in: Callable[..., Any], card: type) -> None:
    plug_in(card(used=70 << 30, processes=[SimpleNamespace(pid=4321, usedGpuMemory=69 << 30)]))
    warning = foreign_use()
    assert "70.0 of 143.0 GiB" in warning
    assert "4321" in warning
    plug_in(card(used=1 << 30))
    assert foreign_use() == ""
    plug_in()
    assert foreign_use() == ""
