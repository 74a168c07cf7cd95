"""The H200 guide's shell launchers: with bash or sbatch, variables and overrides mean what the guide says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.recipe.load import load
from redline.recipe.schema import Recipe

FOLDER = Path(__file__).parents[2] / "scripts" / "train"
LAUNCHERS = {"train_gsm8k_bd3lm_h200.sh": "gsm8k-bd3lm", "train_hdp_diffusion_h200.sh": "gsm8k-hdp"}
VARIABLES = ("BATCH_SIZE", "GLOBAL_BATCH_SIZE", "GRAD_ACCUM", "LR", "WARMUP_STEPS", "SEQ_LEN", "NUM_WORKERS", "WANDB")
SETTINGS = ("train.micro_batch=128", "train.global_batch=512", "train.lr=5e-4")
ECHO = '#!/bin/bash\nprintf "%s\\n" "$@"\n'
Told = Callable[..., list[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the launchers beside a `redline` that prints its arguments."""
    root = tmp_path / "a checkout"
    shutil.copytree(FOLDER, root / "scripts" / "train")
    command = root / ".venv" / "bin" / "redline"
    command.parent.mkdir(parents=True)
    command.write_text(ECHO)
    command.chmod(0o755)
    return root


def bash(script: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES and not k.startswith("SLURM")}
    command = ["bash", str(script), *words]
    return subprocess.run(
        command, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def told(checkout: Path, tmp_path: Path) -> Told:
    """Return the arguments that a launcher passes to `redline`, run from another folder."""

    def run(name: str, *words: str, **variables: str) -> list[str]:
        done = bash(checkout / "scripts" / "train" / name, *words, cwd=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stderr == f"redline {' '.join(done.stdout.splitlines())}\n", "the translation is shown"
        return done.stdout.splitlines()

    return run


def recipe(words: list[str], name: str) -> Recipe:
    assert words[:2] == ["train", LAUNCHERS[name]]
    return load(words[1], words[2:]).recipe


def batch(found: Recipe) -> tuple[Any, Any, Any]:
    return found.train.micro_batch, found.train.accumulation, found.train.global_batch


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_it_is_bash(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", str(path)], cwd=FOLDER.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_scheduler_is_asked_for_one_gpu_and_no_account(name: str) -> None:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(asked)] == asked, "sbatch stops reading at the first command"
    assert "#SBATCH --gpus=1" in asked
    assert not any(re.search(r"--(account|partition|qos|mail)", line) for line in asked)
    assert os.access(FOLDER / name, os.X_OK)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_guides_defaults(told: Told, name: str) -> None:
    words = told(name)
    assert words == ["train", LAUNCHERS[name], *SETTINGS]
    found = recipe(words, name)
    assert batch(found) == (128, "auto", 512)
    assert found.train.lr == 5e-4, "of the guide's table, for a global batch of 512"
    assert (found.train.warmup_steps, found.train.steps, found.data.seq_len) == (5000, 50_000, 512)


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("BATCH_SIZE=64", (64, "auto", 512)),
        ("GLOBAL_BATCH_SIZE=1024", (128, "auto", 1024)),
        ("GRAD_ACCUM=8", ("auto", 8, 512)),
        ("BATCH_SIZE=64 GRAD_ACCUM=4", (64, 4, "auto")),
        ("BATCH_SIZE=192 GLOBAL_BATCH_SIZE=768", (192, "auto", 768)),
        ("GLOBAL_BATCH_SIZE=256 GRAD_ACCUM=4", ("auto", 4, 256)),
        ("BATCH_SIZE=256 GLOBAL_BATCH_SIZE=1024 GRAD_ACCUM=4", (256, 4, 1024)),
    ],
)
def test_batches(told: Told, name: str, variables: str, expected: tuple[Any, Any, Any]) -> None:
    given = dict(word.split("=") for word in variables.split())
    assert batch(recipe(told(name, **given), name)) == expected


@pytest.mark.parametrize("name", LAUNCHERS)
def test_rate_and_warm_up(told: Told, name: str) -> None:
    found = recipe(told(name, LR="3e-4", WARMUP_STEPS="10000", SEQ_LEN="512"), name)
    assert (found.train.lr, found.train.warmup_steps, found.data.seq_len) == (3e-4, 10_000, 512)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_batch_size_line_can_be_edited(checkout: Path, told: Told, name: str) -> None:
    """As in the guide: open the script, change BATCH_SIZE=128, run it."""
    script = checkout / "scripts" / "train" / name
    text = script.read_text(encoding="utf-8")
    assert text.count("BATCH_SIZE=128\n") == 1
    script.write_text(text.replace("BATCH_SIZE=128\n", "BATCH_SIZE=64\n"), encoding="utf-8")
    assert batch(recipe(told(name), name)) == (64, "auto", 512)
    assert batch(recipe(told(name, BATCH_SIZE="32"), name)) == (32, "auto", 512), "for one run the environment wins"


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    ("variables", "rate"),
    [
        ({}, 5e-4),
        ({"BATCH_SIZE": "64"}, 5e-4),  # the global batch is the same
        ({"GRAD_ACCUM": "8"}, 5e-4),
        ({"GLOBAL_BATCH_SIZE": "1024"}, "auto"),  # the √ rule
        ({"GLOBAL_BATCH_SIZE": "512"}, 5e-4),
        ({"BATCH_SIZE": "64", "GRAD_ACCUM": "8"}, 5e-4),  # the guide's way out of an OOM
        ({"BATCH_SIZE": "64", "GRAD_ACCUM": "4"}, "auto"),
        ({"GLOBAL_BATCH_SIZE": "1024", "LR": "7e-4"}, 7e-4),
    ],
)
def test_the_rate_belongs_to_the_global_batch(told: Told, name: str, variables: dict[str, str], rate: Any) -> None:
    assert recipe(told(name, **variables), name).train.lr == rate


@pytest.mark.parametrize("name", LAUNCHERS)
def test_workers_and_the_tracker(told: Told, name: str) -> None:
    found = recipe(told(name, NUM_WORKERS="16", WANDB="my-project"), name)
    assert (found.data.workers, found.monitor.wandb) == (16, "my-project")
    assert recipe(told(name), name).monitor.wandb is False


@pytest.mark.parametrize("name", LAUNCHERS)
def test_overrides_go_on_and_win(told: Told, name: str) -> None:
    guide = ("model.attn_backend=flash_attn", "trainer.precision=bf16-mixed", "+model.gradient_checkpointing=true")
    words = told(
        name, *guide, "+trainer.compile=true", "loader.num_workers=16", "train.lr=1e-4", "--dry-run", LR="3e-4"
    )
    assert words[-1] == "--dry-run"
    found = recipe(words[:-1], name)
    assert (found.train.precision, found.train.grad_checkpointing, found.train.compile) == ("bf16", "full", True)
    assert (found.data.workers, found.train.lr) == (16, 1e-4)
    quoted = told(name, "eval.prompt=a b  c")
    assert quoted[-1] == "eval.prompt=a b  c", "a word stays one word"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_presets(told: Told, name: str) -> None:
    found = recipe(told(name, "train.preset=conservative"), name)
    assert (batch(found), found.train.lr) == ((64, "auto", 256), "auto")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_run_is_resumed_with_its_own_recipe(told: Told, name: str) -> None:
    assert told(name, "--resume", "latest", BATCH_SIZE="64") == ["train", "--resume", "latest"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_sbatch_runs_a_copy(checkout: Path, tmp_path: Path, name: str) -> None:
    spool = tmp_path / "spool" / "job1"
    spool.mkdir(parents=True)
    shutil.copy(checkout / "scripts" / "train" / name, spool / "slurm_script")
    done = bash(spool / "slurm_script", "train.steps=5", cwd=checkout, SLURM_SUBMIT_DIR=str(checkout), BATCH_SIZE="64")
    assert done.returncode == 0, done.stderr
    expected = ["train", LAUNCHERS[name], "train.micro_batch=64", *SETTINGS[1:], "train.steps=5"]
    assert done.stdout.splitlines() == expected
    lost = bash(spool / "slurm_script", cwd=spool, SLURM_SUBMIT_DIR=str(spool))
    assert lost.returncode == 1
    assert "from the checkout" in lost.stderr


def test_without_redline_it_says_so(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv" / "bin" / "redline").unlink()
    script, nothing = checkout / "scripts" / "train" / "train_hdp_diffusion_h200.sh", tmp_path / "bin"
    nothing.mkdir()
    for tool in ("bash", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (nothing / tool).symlink_to(found)
    done = bash(script, cwd=tmp_path, PATH=str(nothing))
    assert done.returncode == 1
    assert "make setup" in done.stderr


def test_three_that_disagree_are_a_sentence(told: Told) -> None:
    from redline.errors import RecipeError

    words = told("train_hdp_diffusion_h200.sh", BATCH_SIZE="128", GRAD_ACCUM="4", GLOBAL_BATCH_SIZE="500")
    with pytest.raises(RecipeError, match="Give any two of the three"):
        recipe(words, "train_hdp_diffusion_h200.sh")
