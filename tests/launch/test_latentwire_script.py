"""The job script of the LatentWire guide, submitted with bash or run by sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from redline.launch.cluster import Cluster
from redline.launch.slurm import Job

ROOT = Path(__file__).parents[2]
NAME = "train_latentwire_4xh100.slurm"
# says how it was called, and prints a script that says who runs it
REDLINE = """#!/bin/bash
printf '%s\\n' "$@" >"$0.words"
[[ ${!#} == --submit ]] || echo 'echo "run by $$"'
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts" / "train", root / "scripts" / "train")
    command = root / ".venv" / "bin" / "redline"
    command.parent.mkdir(parents=True)
    command.write_text(REDLINE)
    command.chmod(0o755)
    return root


def bash(script: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return subprocess.run(
        ["bash", str(script), *words], cwd=cwd, env={**environment, **variables}, capture_output=True, text=True
    )


def told(checkout: Path) -> list[str]:
    return (checkout / ".venv" / "bin" / "redline.words").read_text().splitlines()


def test_bash_submits_the_job(checkout: Path, tmp_path: Path) -> None:
    script = checkout / "scripts" / "train" / NAME
    done = bash(script, "train.steps=5", "--time", "2h", "eval.prompt=a  b", cwd=tmp_path, BATCH_SIZE="4")
    assert done.returncode == 0, done.stderr
    words = told(checkout)
    assert words[:3] == ["launch", "latentwire-squad", "train.micro_batch=4"]
    assert words[-5:] == ["train.steps=5", "--time", "2h", "eval.prompt=a  b", "--submit"], "the last time is stronger"


def test_sbatch_runs_what_launch_prints_in_its_own_process(checkout: Path, tmp_path: Path) -> None:
    """Else SLURM's signal before the time limit would reach a shell that does not handle it."""
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    shutil.copy(checkout / "scripts" / "train" / NAME, copy)
    given = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(checkout)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    process = subprocess.Popen(
        ["bash", str(copy), "train.steps=5"],
        cwd=checkout,
        env={**environment, **given},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=60)
    assert out == f"run by {process.pid}\n"
    assert "--submit" not in told(checkout)
    lost = bash(copy, cwd=copy.parent, SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(copy.parent))
    assert lost.returncode == 1
    assert "from the checkout" in lost.stderr


def test_the_script_requests_what_launch_requests(tmp_path: Path) -> None:
    """Both ways to submit lead to the same job, without an account."""
    path = ROOT / "scripts" / "train" / NAME
    lines = path.read_text(encoding="utf-8").splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert all(line.startswith("#SBATCH") for line in lines[1 : 1 + len(asked)])
    assert not any(re.search(r"--(account|partition|qos|mail)", line) for line in asked)
    site = Cluster(cpus_per_gpu=16)
    job = Job(("latentwire-squad",), "latentwire-squad", tmp_path, site, ranks_per_node=4, seconds=43_200)
    own = {option for option in job.options if not option.startswith("--chdir")}
    assert set(asked) == {*own, "--mem=256G"}
    assert os.access(path, os.X_OK)


def test_shellcheck_accepts_the_script() -> None:
    path = ROOT / "scripts" / "train" / NAME
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("bash -n passed; there is no shellcheck here")
    done = subprocess.run(["shellcheck", "-x", str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
