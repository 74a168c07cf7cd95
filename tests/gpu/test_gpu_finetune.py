"""Fine-tuning on a GPU: the curve of a CPU, training in bf16, and gradient checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning import CPU, Tuning
from redline.runs.events import read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
METHODS = ("qlora", "lora", "full")


@pytest.fixture
def tuning(world: Any, tiny_base: Path, answers: Path, tmp_path: Path) -> Tuning:
    return Tuning(world, tiny_base, answers, tmp_path)


@pytest.fixture
def machine() -> Any:
    from redline.hardware.probe import detect_machine

    return detect_machine("cuda")


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


@pytest.mark.parametrize("method", METHODS)
def test_the_fp32_curve_equals_that_of_a_cpu(tuning: Tuning, tmp_path: Path, machine: Any, method: str) -> None:
    """Without dropout, whose masks differ between devices."""
    keys = (f"finetune.method={method}", "model.lora.dropout=0" if method != "full" else "train.steps=6")
    for name, where in (("cpu", CPU), ("cuda", machine)):
        tuning.run(tmp_path / name, *keys, f"train.device={name}", machine=where)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), abs=2e-3)


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("method", METHODS)
def test_training_in_bf16(tuning: Tuning, tmp_path: Path, machine: Any, method: str, compiled: str) -> None:
    keys = (f"finetune.method={method}", "train.device=cuda", "train.precision=bf16", f"train.compile={compiled}")
    tuning.run(tmp_path / "run", *keys, "train.steps=30", "train.lr=5e-3", machine=machine)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5


@pytest.mark.parametrize("how", ["selective", "full"])
def test_gradient_checkpointing_does_not_change_the_curve(
    tuning: Tuning, tmp_path: Path, machine: Any, how: str
) -> None:
    keys = ("train.device=cuda", "train.precision=bf16")
    for name in ("none", how):
        tuning.run(tmp_path / name, *keys, f"train.grad_checkpointing={name}", machine=machine)
    assert losses(tmp_path / how) == pytest.approx(losses(tmp_path / "none"), abs=2e-2)
