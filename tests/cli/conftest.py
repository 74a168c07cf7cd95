"""Fixtures: the command in its own process or in this one, and one trained run for tests that only read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
RECIPE = """
description: a toy
model: {layers: 2, d_model: 32, heads: 2, d_ff: 64}
data: {source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}
train: {device: cpu, precision: fp32, compile: false, steps: 6, global_batch: 8, micro_batch: 4, warmup_steps: 2}
eval: {every: 3, sequences: 4, samples: 1, sample_tokens: 8}
checkpoint: {every: 3}
monitor: {log_every: 1}
"""


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Return the error message in one line. Fail if there is a traceback: users never see one."""
        assert "Traceback" not in self.err, self.err
        return " ".join(line for line in self.err.splitlines() if "preparing" not in line and "looking at" not in line)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture(scope="session")
def redline() -> Callable[..., Answer]:
    """Run `redline …` in a process of its own."""

    def run(*words: str, cwd: Path) -> Answer:
        command = [sys.executable, "-m", "redline", *words]
        done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120)
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `redline …` in the background, and kill it after the test."""
    started = []

    def run(*words: str, cwd: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "redline", *words], cwd=cwd, env=environment(), stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_pictures: None
) -> Iterator[Callable[..., Answer]]:
    """Run `redline …` in this process, where torch is already imported."""
    before = dict(os.environ)

    def run(*words: str, cwd: Path = tmp_path) -> Answer:
        from redline.cli.main import main

        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["redline", *words])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    yield run
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    path.write_text(RECIPE.replace("CORPUS", str(corpus)))
    return str(path)


@pytest.fixture(scope="session")
def home(redline: Callable[..., Answer], recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which one run was trained, as runs/latest."""
    folder = tmp_path_factory.mktemp("home")
    done = redline("train", recipe, cwd=folder)
    assert done.code == 0, done.err
    return folder
