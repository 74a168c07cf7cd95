"""NCCL, DDP, FSDP2 and HSDP on one GPU: a world of size 1 makes the same calls as a larger one."""

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
GPU = (
    "train.device=cuda",
    "model.d_model=128",
    "data.seq_len=64",
    "train.steps=6",
    "train.lr=1e-3",
    "train.micro_batch=2",
)
MODES = {
    "ddp": ("parallel.mode=ddp",),
    "rows": ("parallel.mode=fsdp", "parallel.accumulate=sharded"),
    "whole": ("parallel.mode=fsdp", "parallel.accumulate=whole"),
    "groups": ("parallel.mode=hsdp", "parallel.shard_size=1"),
}
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


def train(world: Any, run: Path, *options: str, arguments: tuple[str, ...] = ()) -> Path:
    """Run `redline train` as the only rank of a process group."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    begin = ["quickstart", *world.tiny, f"data.source={world.corpus}", *GPU, *options, "--run", str(run)]
    done = subprocess.run(
        [sys.executable, "-c", NCCL, "train", *(arguments or begin)],
        env={**os.environ, **environment},
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
@pytest.mark.parametrize("mode", MODES)
def test_a_world_of_one_has_the_curve_of_a_single_process(
    world: Any, tmp_path: Path, machine: Any, mode: str, optimizer: str
) -> None:
    options = ("train.precision=fp32", f"train.optimizer={optimizer}", "train.ema=0.9")
    world.run(tmp_path / "one", *GPU, *options, machine=machine)
    run = train(world, tmp_path / "group", *options, *MODES[mode])
    tolerance = (
        5e-3 if optimizer == "muon" else 1e-4
    )  # Muon multiplies in bf16, and each process may choose other kernels
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), abs=tolerance)
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    assert (newest / "model.index.json").exists() == (mode != "ddp")
    expected = read_tensors(tmp_path / "one/checkpoints" / newest.name, "model")
    for name, tensor in read_tensors(newest, "model").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2 * tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_bf16_run_is_resumed(world: Any, tmp_path: Path, mode: str) -> None:
    options = ("train.precision=bf16", "train.compile=true", *MODES[mode], "checkpoint.every=3")
    run = train(world, tmp_path / "run", *options, "train.steps=3")
    train(world, run, arguments=("--resume", str(run), "train.steps=6"))
    found = losses(run)
    assert len(found) == 6
    assert found[-1] < found[0]
    state = json.loads((newest_valid(run / "checkpoints") / "state.json").read_text())  # type: ignore[operator]
    assert state["step"] == 6


def test_supervised_torchrun_with_one_gpu(world: Any, tmp_path: Path) -> None:
    arguments = ["quickstart", *world.tiny, f"data.source={world.corpus}", *GPU, "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "redline", "train", *arguments, "--gpus", "1", "--supervise"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses(tmp_path / "run")) == 6
