"""A hostile config or index is refused quickly and with an explanation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from redline.errors import UserError
from redline.models.pretrained import open_base

LIES: dict[str, Any] = {
    "num_hidden_layers": 10**9,
    "hidden_size": 10**30,
    "vocab_size": 10**18,
    "num_attention_heads": 10**9,
    "rope_scaling": {"rope_type": ["linear"]},
}
INDICES = ["[" * 100_000, json.dumps({"weight_map": {"a": "x" * 5000}}), '{"weight_map": {"a": "../b"}}']


@pytest.fixture
def folder(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", LIES)
def test_damaged_configs(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: LIES[key]}))
    with pytest.raises(UserError):
        open_base(str(folder))


def test_a_config_of_many_levels(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError):
        open_base(str(folder))


@pytest.mark.parametrize("index", INDICES, ids=["levels", "a long name", "a way out"])
def test_damaged_indices(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError):
        open_base(str(folder))
