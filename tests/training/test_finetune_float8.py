"""Fine-tuning with the matmuls of the frozen base in fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning import Tuning
from redline.errors import RecipeError
from redline.hardware.machine import Machine
from redline.kernels import float8_choice
from redline.runs.events import read_events

ABLE = Machine("cpu", "a CPU that passes for a GPU", 8 << 30, 2, (9, 0), cpu_flops=1e11, fast_bf16=True)
EIGHT = ("train.precision=fp8", "model.kernels=fused", "train.micro_batch=4")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fp8_tried_here: None) -> list[bool]:
    """Record for each linear layer that was measured whether its weight is trained."""
    asked: list[bool] = []

    def measure(backend: str, *shape: int, cast: bool, learns: bool) -> tuple[float, float]:
        asked.append(learns)
        return 2.0, 1.0

    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(float8_choice, "measure", measure)
    monkeypatch.setattr(float8_choice, "_key", lambda *what: str(what))
    return asked


@pytest.fixture
def tuning(world: Any, tiny_base: Path, answers: Path, tmp_path: Path) -> Tuning:
    return Tuning(world, tiny_base, answers, tmp_path)


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


@pytest.mark.parametrize("method", ["qlora", "lora"])
def test_fp8_learns_as_bf16_does(tuning: Tuning, tmp_path: Path, measured: list[bool], method: str) -> None:
    keys = (*EIGHT, f"finetune.method={method}", "train.steps=20", "train.lr=5e-3", "model.lora.dropout=0.1")
    eight = tuning.run(tmp_path / "fp8", *keys, machine=ABLE)
    tuning.run(tmp_path / "bf16", *keys, "train.precision=bf16", machine=ABLE)
    assert eight.objective.float8.linears == ("qkv", "out", "up", "down")
    assert measured == [False] * 4
    found, expected = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert found != expected
    assert found[-1] < found[0] - 0.3
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.15


def test_a_resumed_run_is_the_same_to_the_bit(tuning: Tuning, tmp_path: Path, tensors_of: Any) -> None:
    keys = (*EIGHT, "train.steps=8", "model.lora.dropout=0.1")
    tuning.run(tmp_path / "whole", *keys, machine=ABLE)
    tuning.run(tmp_path / "parts", *keys, machine=ABLE, stop_at=5)
    tuning.run(tmp_path / "parts", *keys, machine=ABLE, resume=True)
    expected, got = (tensors_of(tmp_path / name / "checkpoints/step-00000008") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_without_fused_blocks_fp8_is_off_with_a_warning(tuning: Tuning, tmp_path: Path) -> None:
    """The fp8 blocks do not recompute activations, so with recomputation there is no fp8."""
    keys = ("train.precision=fp8", "train.grad_checkpointing=full", "train.micro_batch=4")
    objective = tuning.run(tmp_path / "run", *keys, "train.steps=1", machine=ABLE).objective
    told = {key: (value, why) for key, value, why in objective.choices()}
    backend, reason = told["train.fp8"]
    assert backend == "none"
    assert "model.kernels=fused" in reason


@pytest.mark.parametrize(
    ("words", "key"),
    [(("finetune.method=full",), "train.precision"), (("train.fp8=torchao",), "train.fp8")],
    ids=["a base that learns", "another's kernels"],
)
def test_unsupported_fp8_options_are_refused(tuning: Tuning, words: tuple[str, ...], key: str) -> None:
    with pytest.raises(RecipeError) as raised:
        tuning.recipe("train.precision=fp8", *words)
    assert [problem.key for problem in raised.value.problems] == [key]
