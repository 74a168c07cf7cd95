"""`accelerate launch -m redline train`: two ranks share a run, and accelerate's own options are reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redline.launch.start import accelerate_warning
from redline.runs.events import read_events


@pytest.mark.parametrize(
    ("environment", "keys"),
    [
        ({}, []),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}, []),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, ["mixed_precision=bf16", "train.precision"]),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "0"}, ["use_fsdp=true", "parallel.mode"]),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "1"}, []),
    ],
)
def test_options_of_accelerate_that_the_recipe_decides(environment: dict[str, str], keys: list[str]) -> None:
    warning = accelerate_warning(environment) or ""
    assert bool(warning) == bool(keys)
    assert all(key in warning for key in keys)


def test_two_ranks_of_accelerate_share_a_run(corpus: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    """On a machine without GPUs, too; `--cpu` would start one process, whatever --num_processes says."""
    pytest.importorskip("accelerate")
    run = tmp_path / "run"
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "bf16"]
    launcher = ["accelerate.commands.accelerate_cli", "launch", *options, "--main_process_port", "0"]
    words = ["train", "quickstart", *tiny, f"data.source={corpus}", "train.steps=3", f"run={run}", "continue=true"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "redline", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    events = read_events(run / "events.jsonl")
    assert [plan["gpus"] for plan in events.of_type("plan")] == [2]
    assert [step["step"] for step in events.of_type("step")] == [1, 2, 3]
    assert done.stderr.count("mixed_precision=bf16 (train.precision)") == 1
