"""Two GPUs and NCCL: `.venv/bin/python -m pytest tests/gpu -m multi`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.runs.events import read_events
from redline.training.checkpoint import committed_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
GPU = (
    "train.device=cuda",
    "model.d_model=128",
    "data.seq_len=64",
    "train.lr=1e-3",
    "train.precision=fp32",
    "train.micro_batch=2",
)
MODES = {
    "ddp": ("parallel.mode=ddp",),
    "rows": ("parallel.mode=fsdp", "parallel.accumulate=sharded"),
    "whole": ("parallel.mode=fsdp", "parallel.accumulate=whole"),
    "one group": ("parallel.mode=hsdp", "parallel.shard_size=2"),
    "two groups": ("parallel.mode=hsdp", "parallel.shard_size=1"),
}
STEPS = 600  # long enough to be interrupted


def command(world: Any, run: Path, *options: str, gpus: int = 2) -> list[str]:
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", *GPU, *options]
    place = ["--run", str(run), "--continue", "--gpus", str(gpus), "--supervise"]
    return [sys.executable, "-m", "redline", "train", *words, *place]


def train(world: Any, run: Path, *options: str, gpus: int = 2) -> str:
    """Train, and return all that was printed."""
    environment = {**os.environ, "NCCL_DEBUG": "VERSION"}
    words = command(world, run, *options, gpus=gpus)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    log = run / "ranks.log"
    return done.stdout + done.stderr + (log.read_text() if log.exists() else "")


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_have_the_curve_of_one(world: Any, tmp_path: Path, mode: str, optimizer: str) -> None:
    options = (f"train.optimizer={optimizer}", "train.steps=8")
    train(world, tmp_path / "one", *options, gpus=1)
    printed = train(world, tmp_path / "two", *options, *MODES[mode])
    assert "NCCL version" in printed
    tolerance = 5e-3 if optimizer == "muon" else 1e-4  # Muon multiplies in bf16
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_changes_from_two_gpus_to_one_and_back(world: Any, tmp_path: Path, mode: str) -> None:
    train(world, tmp_path / "one", "train.steps=9", gpus=1)
    for steps, gpus in ((3, 2), (6, 1), (9, 2)):
        kind = MODES[mode] if gpus > 1 else ("parallel.mode=auto",)
        train(world, tmp_path / "run", f"train.steps={steps}", *kind, gpus=gpus)
    assert losses(tmp_path / "run")[:3] == pytest.approx(losses(tmp_path / "one")[:3], abs=1e-4)
    assert len(losses(tmp_path / "run")) == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["lost", "hung"])
def test_a_rank_that_is_lost_or_hangs_is_restarted(world: Any, tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    options = (f"train.steps={STEPS}", "checkpoint.every=50", "parallel.timeout=20")
    process = subprocess.Popen(command(world, run, *options))
    try:
        deadline = time.monotonic() + 200
        while not (run.exists() and committed_steps(run / "checkpoints")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(rank_process(run, "1"), number)
        assert process.wait(250) == 0
    finally:
        process.kill()
    assert len(losses(run)) == STEPS
    assert [event["type"] for event in read_events(run / "events.jsonl")].count("recovery") == 1


def rank_process(run: Path, rank: str) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and str(run).encode() in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise AssertionError(f"no rank {rank}")
