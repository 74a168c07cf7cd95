"""Compiled and eager runs have the same loss curve on a GPU.

A compiler may compute a loss correctly and its gradient incorrectly, so single losses are not enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning import Tuning
from latents import Latents, other_base, write_rows
from redline.runs.events import read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = ("train.device=cuda", "train.precision=bf16", "model.kernels=torch", "train.steps=12")
BLOCKS = ("objective=block_diffusion", "block_diffusion.block_size=16", "data.seq_len=128", "data.pack=false")


@pytest.fixture
def machine() -> Any:
    from redline.hardware.probe import detect_machine

    return detect_machine("cuda")


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


def assert_same_curve(train: Any, folder: Path, *options: str) -> None:
    for compiled in ("true", "false"):
        train(folder / compiled, *GPU, *options, f"train.compile={compiled}")
    compiled, eager = losses(folder / "true"), losses(folder / "false")
    decrease = eager[0] - eager[-1]
    assert decrease > 0.05
    assert compiled == pytest.approx(eager, abs=max(2e-2, 0.1 * decrease))


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_a_latent_prefix(world: Any, tiny_base: Path, tmp_path: Path, machine: Any, quant: str) -> None:
    latents = Latents(world, [tiny_base, other_base(tmp_path / "other")], write_rows(tmp_path / "rows.jsonl"), tmp_path)

    def train(path: Path, *options: str) -> Any:
        return latents.run(path, *options, machine=machine)

    assert_same_curve(train, tmp_path, f"model.quant={quant}", "train.lr=2e-2")


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_fine_tuning(world: Any, tiny_base: Path, answers: Path, tmp_path: Path, machine: Any, method: str) -> None:
    tuning = Tuning(world, tiny_base, answers, tmp_path)

    def train(path: Path, *options: str) -> Any:
        return tuning.run(path, *options, machine=machine)

    # training all weights at the learning rate of the adapters is nearly unstable, so rounding errors would grow
    own = ("train.lr=1e-3",) if method == "full" else ("model.lora.dropout=0",)
    assert_same_curve(train, tmp_path, f"finetune.method={method}", *own)


@pytest.mark.parametrize("backend", ["flex", "split", "efficient"])
def test_block_diffusion(world: Any, tmp_path: Path, machine: Any, backend: str) -> None:
    def train(path: Path, *options: str) -> Any:
        return world.run(path, *options, machine=machine)

    assert_same_curve(train, tmp_path, *BLOCKS, "model.d_model=64", f"model.attention={backend}", "train.lr=5e-3")


@pytest.mark.parametrize("pack", ["true", "false"])
def test_pretraining(world: Any, tmp_path: Path, machine: Any, pack: str) -> None:
    def train(path: Path, *options: str) -> Any:
        return world.run(path, *options, machine=machine)

    assert_same_curve(train, tmp_path, f"data.pack={pack}", "model.d_model=128", "train.lr=3e-3")
