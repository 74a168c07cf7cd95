"""`redline export` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file


def test_text_and_json(home: Path, inside: Any, tmp_path: Path) -> None:
    out = tmp_path / "deep/model"
    answer = inside("export", "latest", "--out", str(out), cwd=home)
    assert answer.code == 0, answer.err
    assert "at step 6 (raw weights, fp32)" in answer.out
    assert "LlamaForCausalLM" in answer.out
    assert all(path.name in answer.out for path in out.iterdir())
    half = tmp_path / "half"
    row = json.loads(inside("export", "latest@3", "--out", str(half), "--dtype", "bf16", "--json", cwd=home).out)
    assert (row["step"], row["weights"], row["dtype"], row["tokenizer"]) == (3, "raw", "bf16", True)
    assert row["files"] == {path.name: path.stat().st_size for path in half.iterdir()}
    tensors = load_file(half / "model.safetensors")
    assert row["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert row["parameters"] == json.loads((home / "runs/latest/lock.json").read_text())["parameters"]["total"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("nothing", "--out", "out"), 2, "nothing: There is no such run."),
        (("latest@99", "--out", "out"), 1, "no checkpoint @99. Steps with a checkpoint: 3, 6."),
        (("latest@soon", "--out", "out"), 2, "Write @best"),
        (("latest", "--out", "out", "--weights", "ema"), 1, "no moving average (train.ema). Use --weights raw."),
        (("latest", "--out", "out", "--dtype", "int8"), 2, "--dtype: 'int8' is not fp32 or bf16 or fp16."),
        (("latest", "--out", "runs"), 1, "runs: the folder is not empty"),
        (("latest", "--out", "runs/latest/lock.json"), 1, "lock.json: is a file, not a folder."),
        (("latest", "--out", "/proc/out"), 1, "/proc/out: cannot be written ("),
        (("latest",), 2, "--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes(home: Path, inside: Any, words: tuple[str, ...], code: int, says: str) -> None:
    before = sorted(home.rglob("*"))
    answer = inside("export", *words, cwd=home)
    assert answer.code == code
    assert says in answer.message
    assert sorted(home.rglob("*")) == before


def test_a_missing_parent_folder_is_created(home: Path, inside: Any, tmp_path: Path) -> None:
    done = inside("export", "latest", "--out", f"{tmp_path}/nothing/../x/y", "--json", cwd=home)
    assert done.code == 0
    assert "model.safetensors" in json.loads(done.out)["files"]
