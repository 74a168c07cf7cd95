"""redline train --gpus: torchrun, two real processes, and what is refused before they start."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from redline.runs.events import read_events


def redline(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "redline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.fixture
def words(world: Any) -> list[str]:
    return ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=4"]


def test_two_processes(words: list[str], world: Any, inside: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = redline("train", *words, "parallel=fsdp", "--run", str(run), "--gpus", "2", "--supervise")
    assert done.returncode == 0, done.stderr
    assert "no GPU is used: 2 processes" in done.stderr
    assert done.stderr.count("step 4  100%") == 1, "one rank speaks"
    world.run(tmp_path / "one", "train.steps=4")
    losses = [
        [e["loss"] for e in read_events(r / "events.jsonl") if e["type"] == "step"] for r in (run, tmp_path / "one")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert sorted(p.name for p in (run / "checkpoints/step-00000004").glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.index.json",
    ]
    # One process reads what two have written.
    for words in (
        ("export", str(run), "--out", str(tmp_path / "model")),
        ("eval", str(run)),
        ("sample", str(run), "--prompt", "a", "--tokens", "2"),
    ):
        answer = inside(*words)
        assert answer.code == 0, answer.err
    planned = redline("train", "--resume", str(run), "train.steps=8", "--dry-run", "--gpus", "4")
    assert planned.returncode == 0, planned.stderr


def test_ranks_that_torchrun_starts_share_a_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has named it to them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    port = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
    command = [sys.executable, "-m", "torch.distributed.run", *port, "--nproc-per-node=2", "-m", "redline", "train"]
    done = subprocess.run([*command, *words, "parallel=fsdp"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len([path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]) == 1
    assert (tmp_path / "runs/latest/checkpoints/step-00000004").is_dir()


def test_missing_packages_are_named_before_ranks_start(words: list[str], tmp_path: Path) -> None:
    if find_spec("wandb"):
        pytest.skip("it is there")
    done = redline("train", *words, "monitor.wandb=true", "--run", str(tmp_path / "run"), "--gpus", "2")
    assert done.returncode == 2
    assert "wandb" in done.stderr
    assert "torch" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_several_ranks_print_one_error_message(words: list[str], tmp_path: Path) -> None:
    missing, run = tmp_path / "missing", tmp_path / "run"
    done = redline("train", *words, f"data.source={missing}", "--run", str(run), "--gpus", "2")
    assert done.returncode == 1
    assert done.stderr.count("no such file or folder") == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith(f"redline: {missing}"), "the launcher's stack is not shown"
    assert not run.exists()


def test_a_batch_that_two_ranks_cannot_divide(words: list[str], tmp_path: Path) -> None:
    batch = ("train.global_batch=9", "train.micro_batch=1", "--run", str(tmp_path / "run"), "--gpus", "2")
    done = redline("train", *words, *batch)
    assert done.returncode == 2
    assert "Use train.global_batch=8 or 10, or 1 or 3 GPUs." in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_sweep_refuses_several_gpus(words: list[str]) -> None:
    done = redline("train", *words, "--sweep", "train.lr=1e-3,2e-3", "--gpus", "2")
    assert done.returncode == 2
    assert "--sweep" in done.stderr


def test_a_dry_run_plans_for_all_ranks(words: list[str], tmp_path: Path) -> None:
    done = redline("train", *words, "--dry-run", "--gpus", "2", "--run", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "parallel.mode = ddp" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (("--nodes", "2"), "Add --run DIR --continue"),
        (("--nodes", "2", "--continue"), "Use 0 to 1"),
        (("--nodes", "2", "--continue", "--node-rank", "1"), "--master node0:29500"),
        (
            ("--nodes", "2", "--continue", "--node-rank", "1", "--master", "a", "--dry-run"),
            "redline plan RECIPE --gpus 1",
        ),
        (("--nodes", "3", "--continue", "--node-rank", "1", "--master", "a"), "or 2 or 4 GPUs"),
        (("--node-rank", "1"), "Add --nodes N"),
    ],
)
def test_nodes_that_are_not_possible_are_refused_at_once(
    inside: Any, words: list[str], tmp_path: Path, options: tuple[str, ...], fix: str
) -> None:
    answer = inside("train", *words, "--run", str(tmp_path / "run"), *options)
    assert answer.code == 2
    assert fix in answer.err
    assert len(answer.err.strip().splitlines()) <= 3
    assert not (tmp_path / "run").exists()
