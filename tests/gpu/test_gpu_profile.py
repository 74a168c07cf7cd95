"""`redline profile` on a GPU: kernel time by kind, and memory by the line that allocated it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SOURCE = Path(__file__).parents[2] / "src"
SHAPE = (
    "model.size=null",
    "model.layers=4",
    "model.d_model=512",
    "model.heads=8",
    "model.d_ff=1408",
    "data.seq_len=512",
)


def test_profile_of_a_step(corpus: Path, tmp_path: Path) -> None:
    arguments = [
        *SHAPE,
        f"data.source={corpus}",
        "data.tokenizer=bytes",
        "train.global_batch=32",
        "train.micro_batch=32",
    ]
    inherited = [str(Path(one).absolute()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    path = os.pathsep.join([str(SOURCE), *inherited])
    done = subprocess.run(
        [sys.executable, "-m", "redline", "profile", "quickstart", *arguments, "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    parts = {part["kind"]: part for part in found["parts"]}
    assert {"matmul", "attention", "memory-bound", "optimizer"} <= set(parts)
    assert parts["matmul"]["of_best"] is None or 0 < parts["matmul"]["of_best"] < 1.5
    memory = found["memory"]
    assert memory["peak_bytes"] / 2**30 == pytest.approx(found["peak_memory_gib"], rel=0.05)
    assert any(one["where"].startswith("redline/") for one in memory["holders"])
