"""Runs with Muon, NorMuon and related keys, from the recipe to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import RecipeError
from redline.hardware.machine import Machine
from redline.kernels import float8_choice
from redline.recipe.load import load
from redline.runs.events import read_events
from redline.training import optim
from redline.training.optim import momentum_at

ALL = (
    "train.optimizer=normuon",
    "train.cautious=true",
    "train.muon_momentum_warmup=8",
    "train.muon_beta2=0.9",
    "train.embedding_lr=0.02",
    "train.scalar_lr=0.004",
    "model.init=zero",
    "train.ema=0.9",
    "train.steps=10",
)


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


def test_a_resumed_run_is_the_same_to_the_bit(world: Any, tmp_path: Path, tensors_of: Any) -> None:
    """The run stops while the momentum is still rising."""
    world.run(tmp_path / "whole", *ALL)
    assert world.run(tmp_path / "parts", *ALL, stop_at=5).state.step == 5
    assert world.run(tmp_path / "parts", *ALL, resume=True).state.step == 10
    expected, got = (tensors_of(tmp_path / name / "checkpoints/step-00000010") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert any(".second_moment." in name for name in got)
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_the_momentum_follows_the_steps_of_the_whole_run(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def spy(step: int, momentum: float, warmup: int) -> float:
        asked.append((step, momentum, warmup))
        return momentum_at(step, momentum, warmup)

    monkeypatch.setattr(optim, "momentum_at", spy)
    world.run(tmp_path / "run", *ALL, "train.steps=5", stop_at=3)
    world.run(tmp_path / "run", *ALL, "train.steps=5", resume=True)
    warmup = 0  # each start has one, which changes nothing
    assert asked == [(step, 0.95, 8) for step in (warmup, 0, 1, 2, warmup, 3, 4)]


@pytest.mark.parametrize(
    "change",
    [
        "train.optimizer=muon",
        "train.cautious=false",
        "train.muon_momentum_warmup=0",
        "train.muon_beta2=0.5",
        "train.embedding_lr=auto",
        "train.scalar_lr=auto",
        "model.init=gpt2",
        "model.embedding_std=0.1",
        "model.softcap=1",
        "train.decay_fraction=0.9",
    ],
)
def test_every_key_changes_the_run(world: Any, tmp_path: Path, change: str) -> None:
    for name, overrides in {"a": (), "b": (change,)}.items():
        world.run(tmp_path / name, *ALL, "train.schedule=wsd", "train.steps=4", "train.ema=null", *overrides)
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


@pytest.mark.parametrize("change", ["model.init=zero", "model.embedding_std=0.1", "model.softcap=1"])
def test_every_key_changes_a_diffusion_run(world: Any, tmp_path: Path, change: str) -> None:
    blocks = ("objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false", "train.steps=2")
    for name, overrides in {"a": (), "b": (change,)}.items():
        world.run(tmp_path / name, *blocks, *overrides)
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


def test_the_head_has_its_own_rate(world: Any, tmp_path: Path) -> None:
    for name, rate in {"a": "auto", "b": "0.1"}.items():
        world.run(tmp_path / name, "model.tied=false", f"train.head_lr={rate}", "train.steps=3")
    first, second = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert first[0] == second[0]
    assert first[2] != second[2]


def test_muon_learns_more_in_as_many_steps(world: Any, tmp_path: Path) -> None:
    """On the embedded text. AdamW has the best of five learning rates (1.5e-3 … 2.4e-2), Muon that of quickstart."""
    keys = ("data.source=embedded", "data.seq_len=64", "train.steps=80", "monitor.log_every=10")
    ends = {}
    for optimizer, rate in {"adamw": 1.2e-2, "muon": 6e-3, "normuon": 6e-3}.items():
        world.run(tmp_path / optimizer, *keys, f"train.optimizer={optimizer}", f"train.lr={rate}")
        ends[optimizer] = losses(tmp_path / optimizer)[-1]
    assert max(ends["muon"], ends["normuon"]) < ends["adamw"] - 0.1


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.usefixtures("fp8_tried_here")
def test_zero_initialisation_in_low_precision(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, tied: str
) -> None:
    """Zero weights have no fp8 scale yet."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(float8_choice, "measure", lambda *shape, **how: (2.0, 1.0))
    monkeypatch.setattr(float8_choice, "_key", lambda *what: str(what))
    able = Machine("cpu", "a CPU that passes for a GPU", 8 << 30, 2, (9, 0), cpu_flops=1e11, fast_bf16=True)
    keys = (f"train.precision={precision}", "model.kernels=fused", "model.qk_norm=false", "train.micro_batch=8")
    trainer = world.run(
        tmp_path / "run", *keys, "model.init=zero", f"model.tied={tied}", "train.steps=20", machine=able
    )
    found = losses(tmp_path / "run")
    assert trainer.step_log.skipped == 0
    assert found[-1] < found[0] - 0.3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.optimizer=adamw", "train.cautious=true"], "train.cautious: does nothing with train.optimizer=adamw"),
        (
            ["train.optimizer=adamw_8bit", "train.muon_momentum_warmup=100"],
            "train.muon_momentum_warmup: does nothing with train.optimizer=adamw_8bit",
        ),
        (["train.optimizer=muon", "train.cautious=true", "train.weight_decay=0"], "train.weight_decay is 0"),
        (["train.head_lr=0.1"], "train.head_lr: does nothing while model.tied=true"),
        (["train.optimizer=adamw", "train.muon_steps=4"], "train.muon_steps: does nothing with train.optimizer=adamw"),
        (["train.optimizer=muon", "train.muon_steps=6"], "train.muon_steps: 6 is too large; it must be at most 5"),
        (["train.optimizer=normuon", "train.muon_beta2=1"], "train.muon_beta2"),
        (["model.init=ones"], "'ones' is not one of gpt2, zero"),
        (["train.embedding_lr=-1"], "train.embedding_lr"),
    ],
)
def test_options_without_effect_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("quickstart", overrides)
    assert said in str(error.value)
