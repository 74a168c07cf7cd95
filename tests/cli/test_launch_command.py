"""`redline launch` from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.cli import rank


@pytest.fixture(autouse=True)
def _no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_the_script_is_printed_and_nothing_is_left_behind(inside: Any, tmp_path: Path) -> None:
    answer = inside("launch", "pretrain-350m", "--nodes", "2", "--gpus-per-node", "8", "--time", "12:00:00")
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=pretrain-350m\n")
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --time=12:00:00"} <= {*answer.out.splitlines()}
    assert list(tmp_path.iterdir()) == []


def test_a_cpu_job_asks_for_no_cards(inside: Any) -> None:
    lines = inside("launch", "quickstart", "train.device=cpu", "--gpus-per-node", "2").out.splitlines()
    assert "#SBATCH --ntasks-per-node=2" in lines
    assert not any("--gpu" in line for line in lines)


def test_the_command_line_overrides_the_site_file(inside: Any, tmp_path: Path) -> None:
    site = tmp_path / "config/redline/cluster.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("partition: slow\naccount: physics\ncpus_per_gpu: 4\n")
    ours = inside("launch", "quickstart").out.splitlines()
    assert {"#SBATCH --partition=slow", "#SBATCH --account=physics", "#SBATCH --cpus-per-task=4"} <= {*ours}
    given = inside("launch", "quickstart", "--partition", "fast", "--cpus-per-gpu", "9", "--sbatch=--mem=64G")
    assert {"#SBATCH --partition=fast", "#SBATCH --cpus-per-task=9", "#SBATCH --mem=64G"} <= {*given.out.splitlines()}
    site.write_text("acount: physics\n")
    wrong = inside("launch", "quickstart")
    assert (wrong.code, wrong.out) == (2, "")
    assert "Did you mean 'account'?" in wrong.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pretrain-350", "--time", "1h"), "there is no recipe 'pretrain-350'. Did you mean 'pretrain-350m'?"),
        (("quickstart", "train.stepz=3"), "Did you mean 'train.steps'?"),
        (("gsm8k-hdp", "--gpus-per-node", "3"), "512 sequences cannot be shared by 3 GPUs. Use"),
        (("gsm8k-hdp", "--gpus-per-node", "8"), "128 × 8 GPU(s) does not divide train.global_batch 512"),
        (("quickstart", "--time", "12"), "--time: '12' is not a time with a unit."),
        (("quickstart", "--time", "30s"), "at least two minutes"),
        (("quickstart", "--sbatch=--nodes=3"), "--nodes is set by `redline launch` itself"),
        (("quickstart", "--sbatch=mem=3"), "write it as --name=value"),
        (("quickstart", "--partition", "a\nb"), "is not one line of text"),
        (("quickstart", "--cluster", "none.yaml"), "none.yaml: there is no such file."),
    ],
)
def test_mistakes_are_answered_before_the_queue(inside: Any, words: tuple[str, ...], said: str) -> None:
    answer = inside("launch", *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.message


def test_an_existing_run_is_checked_instead_of_the_recipe(inside: Any, world: Any, tmp_path: Path) -> None:
    """Not the recipe that was typed, nor the default: the script would resume the run whatever they say."""
    run = str(tmp_path / "runs/mine")
    small = [*world.tiny, f"data.source={world.corpus}", "train.steps=1", "train.global_batch=16"]
    assert inside("train", "quickstart", *small, "--run", run).code == 0
    script = inside("launch", "--run", run, "train.steps=4")
    assert script.code == 0
    assert "#SBATCH --job-name=quickstart" in script.out
    assert "gpus-per-node" not in script.out, "it is a run on a CPU"
    shared = inside("launch", "--run", run, "--gpus-per-node", "3")
    assert shared.code == 2
    assert "16 sequences cannot be shared by 3" in shared.message
    other = inside("launch", "pretrain-350m", "--run", run)
    assert other.code == 2
    assert "a run of quickstart" in other.message


@pytest.mark.parametrize("name", ["llama-3.1", "mine"])
def test_a_script_for_a_run_of_ones_own_recipe_names_none(inside: Any, world: Any, tmp_path: Path, name: str) -> None:
    """The run has its recipe; a word in its place would be read as another recipe, or as a run."""
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text("objective: causal_lm\n")
    small = [*world.tiny, f"data.source={world.corpus}", "train.steps=1"]
    assert inside("train", str(recipe), *small, "--run", "runs/mine").code == 0
    script = inside("launch", "--run", "runs/mine", "train.steps=2")
    assert script.code == 0, script.message
    words = script.out.partition("run_words=(")[2].partition(")")[0].split()
    assert words == ["train.steps=2", "--run", '"$run"', "--continue"]
    assert inside("train", "--run", "runs/mine", "--continue", "train.steps=2").code == 0
    assert inside("train", str(recipe), "--run", "runs/mine", "--continue", "train.steps=2").code == 0


def test_without_sbatch(inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = inside("launch", "quickstart", "--submit")
    assert answer.code == 1
    assert "sbatch is not installed" in answer.message
    assert "leave out --submit" in answer.message


def test_the_message_after_submitting(inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for logs is created: SLURM would not do it, and would end the job without a message."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text('#!/bin/sh\n/bin/cat >"$0.script"\necho "41;far"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    site = tmp_path / "cluster.yaml"
    site.write_text(f"logs: {tmp_path}/100% logs\n")
    answer = inside("launch", "quickstart", "--cluster", str(site), "--submit")
    assert (answer.code, answer.out) == (0, "job 41 submitted\n")
    assert f"{tmp_path}/100% logs/quickstart-41.log\n" in answer.err
    assert "redline stop runs/quickstart-41" in answer.err
    assert (tmp_path / "100% logs").is_dir()
    assert f"'--output={tmp_path}/100%% logs/%x-%j.log'" in (tmp_path / "bin" / "sbatch.script").read_text()


@pytest.mark.parametrize(("number", "code"), [("0", 75), ("1", 0)])
def test_a_task_becomes_a_rank(monkeypatch: pytest.MonkeyPatch, number: str, code: int) -> None:
    before, seen = dict(os.environ), {}

    def preempted() -> int:
        seen.update(os.environ)
        return 75

    monkeypatch.setattr("redline.cli.main.run", preempted)
    monkeypatch.setattr("redline.cli.main.exit_process", sys.exit)  # the real one would end the test runner
    task = {"NTASKS": "2", "NNODES": "1", "PROCID": number, "LOCALID": number, "NODEID": "0"}
    for name, value in task.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    try:
        with pytest.raises(SystemExit) as leave:
            rank.main()
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == (number, "2", number)
    assert leave.value.code == code
