"""Runs of two ranks exit with 0 on a busy machine, however they are started (the long form of test_cli_exit.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m")


@pytest.fixture
def busy_core() -> Iterator[None]:
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    loop.kill()
    loop.wait()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("busy_core")
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("launcher", ["gpus", "torchrun"])
def test_no_finished_run_ends_with_an_error(world: Any, tmp_path: Path, mode: str, launcher: str) -> None:
    options = (*world.tiny, f"data.source={world.corpus}", "train.steps=2", f"parallel.mode={mode}")
    if mode == "hsdp":
        options += ("parallel.shard_size=1",)
    words = ["train", "quickstart", *options]
    command = ["-m", "redline", *words, "--gpus", "2"] if launcher == "gpus" else [*TORCHRUN, "redline", *words]
    failed = []
    for attempt in range(25):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=folder, env=environment
        )
        warned = "events cannot be written" in done.stderr
        if done.returncode or warned:
            failed.append((attempt, done.returncode, done.stderr[-2000:]))
    assert not failed
