"""Fixtures: `python -m benchmarks …` within this process, and a tiny recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
description: a toy
model: {layers: 2, d_model: 32, heads: 2, d_ff: 64}
data: {source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}
train: {device: cpu, precision: fp32, compile: false, steps: 6, global_batch: 8, micro_batch: 4, warmup_steps: 2}
eval: {every: 3, sequences: 4, samples: 1, sample_tokens: 8}
checkpoint: {every: 3}
monitor: {log_every: 1}
"""


@pytest.fixture(autouse=True)
def _children_find_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contenders, which are `python -m benchmarks.peers.…` processes, find this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


@pytest.fixture(autouse=True)
def tree(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the state of the checkout by a clean one; a test may make it dirty."""
    state = {"commit": "0123456789abcdef", "dirty": False}
    for module in (
        "redline.recipe.lock",
        "redline.bench.record",
        "benchmarks.time_to_loss",
        "benchmarks.peers.nanogpt",
    ):
        monkeypatch.setattr(f"{module}.git_state", lambda: dict(state))
    return state


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        assert "Traceback" not in self.err, self.err
        return " ".join(self.err.splitlines())


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_pictures: None
) -> Iterator[Callable[..., Answer]]:
    """Return a function that runs `python -m benchmarks …` within this process, where torch is imported already."""
    before = dict(os.environ)

    def run_words(*words: str) -> Answer:
        from benchmarks.__main__ import app
        from redline.cli.main import run

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
        capsys.readouterr()
        code = run(app)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    yield run_words
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    path.write_text(RECIPE.replace("CORPUS", str(corpus)))
    return str(path)
