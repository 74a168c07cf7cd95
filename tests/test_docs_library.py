"""The Python blocks of docs/library.md run one after the other, on a model that trains in a second."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import redline
from test_docs import blocks

PAGE = Path(__file__).parents[1] / "docs/library.md"
# A file with a shipped recipe's name wins over it, so the page's code runs as it is written.
TINY = """
model: {layers: 1, d_model: 32, heads: 2, d_ff: 64}
data: {source: notes, tokenizer: bytes, seq_len: 32, workers: 0}
train: {steps: 5, device: cpu, precision: fp32, compile: false, global_batch: 4}
eval: {every: 50, sequences: 4, samples: 0, sample_tokens: 8, prompt: "def "}
checkpoint: {every: 50}
monitor: {log_every: 50}
"""


@pytest.fixture
def here(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text(TINY)
    shutil.copytree(corpus, tmp_path / "notes")
    return tmp_path


def test_the_page_runs_from_top_to_bottom(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = "\n".join(blocks(page, "python"))
    assert code.count("gpus=4") == 1
    names: dict[str, Any] = {}
    exec(compile(code.replace("gpus=4", "gpus=1"), str(PAGE), "exec"), names)
    assert names["plan"].cost_usd == pytest.approx(2.5 * names["plan"].hours, rel=0.01)
    assert [path.name for path in sorted((here / "runs").iterdir()) if path.name in ("notes", "squares")] == [
        "notes",
        "squares",
    ]
    assert redline.open_run("squares").metrics["step"] == 150
    assert names["losses"][-1][0] == 150
    assert (here / "my-model/model.safetensors").is_file()
    assert names["page"].is_file()
    printed = capfd.readouterr().out
    assert "('train.stepz', 'is not a key redline knows.', \"Did you mean 'train.steps'?\")" in printed
    assert "val loss" not in printed, "progress goes to stderr"


def test_every_name_of_the_page_is_public() -> None:
    page = PAGE.read_text(encoding="utf-8")
    used = set(re.findall(r"\bredline\.([A-Za-z_]\w*)", page)) - {"open_run", "py"}
    assert used <= set(redline.__all__)
    for name in ("Callback", "Model", "Plan", "Recipe", "Run", "StopTraining", "TrainingError", "UserError"):
        assert name in page, f"{name} is explained"
