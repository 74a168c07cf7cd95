"""NCCL and FSDP2 on one GPU: a world of one goes through every call that a larger one makes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid, read_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = ("train.device=cuda", "model.d_model=128", "data.seq_len=64", "train.steps=6", "train.lr=1e-3")
NCCL = """
import sys
import torch.distributed as dist
from redline.training import parallel
plain = dist.all_reduce
def counted(tensor, *rest, **options):
    assert dist.get_backend_config().startswith("cpu:gloo,cuda:nccl"), dist.get_backend_config()
    return plain(tensor, *rest, **options)
dist.all_reduce = counted
from redline.cli.main import main
sys.argv = ["redline", *sys.argv[1:]]
main()
"""


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def train(world: Any, run: Path, *options: str, words: tuple[str, ...] = ()) -> Path:
    """`redline train` as the only rank of a group."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    begin = ["quickstart", *world.tiny, f"data.source={world.corpus}", *GPU, *options, "--run", str(run)]
    done = subprocess.run(
        [sys.executable, "-c", NCCL, "train", *(words or begin)],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return run


def losses(run: Path) -> list[float]:
    return [e["loss"] for e in read_events(run / "events.jsonl") if e["type"] == "step"]


@pytest.fixture
def machine() -> Any:
    from redline.hardware.probe import detect_machine

    return detect_machine("cuda")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_group_of_one_learns_what_one_process_does(
    world: Any, tmp_path: Path, machine: Any, mode: str, optimizer: str
) -> None:
    options = ("train.precision=fp32", f"train.optimizer={optimizer}", "train.ema=0.9")
    world.run(tmp_path / "one", *GPU, *options, machine=machine)
    run = train(world, tmp_path / "group", *options, f"parallel.mode={mode}")
    apart = 5e-3 if optimizer == "muon" else 1e-4  # it multiplies in bf16, and each process by kernels of its choice
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), abs=apart)
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    assert (newest / "model.index.json").exists() == (mode == "fsdp")
    expected = read_tensors(tmp_path / "one/checkpoints" / newest.name, "model")
    for name, tensor in read_tensors(newest, "model").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2 * apart)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_compiled_half_precision_is_stopped_and_resumed(world: Any, tmp_path: Path, mode: str) -> None:
    options = ("train.precision=bf16", "train.compile=true", f"parallel.mode={mode}", "checkpoint.every=3")
    run = train(world, tmp_path / "run", *options, "train.steps=3")
    train(world, run, words=("--resume", str(run), "train.steps=6"))
    found = losses(run)
    assert len(found) == 6
    assert found[-1] < found[0]
    state = json.loads((newest_valid(run / "checkpoints") / "state.json").read_text())  # type: ignore[operator]
    assert state["step"] == 6


def test_one_gpu_through_torchrun_is_supervised(world: Any, tmp_path: Path) -> None:
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", *GPU, "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "redline", "train", *words, "--gpus", "1", "--supervise"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses(tmp_path / "run")) == 6
