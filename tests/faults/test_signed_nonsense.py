"""R14: a stranger's checkpoint whose digests are right and whose content is not: passed over as damage, never a
traceback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from redline.errors import UserError
from redline.training.checkpoint import MANIFEST, DamagedCheckpointError, canonical_json, commit, newest_valid, verify


def sign(path: Path) -> None:
    """Write a correct manifest for the files in the folder."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    body = {key: value for key, value in manifest.items() if key != "digest"}
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    (path / MANIFEST).write_bytes(canonical_json({**body, "digest": digest}))


HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}'
CONTENT = {
    "no tensors": ("model.safetensors", b"\xff" * 300),
    "nothing": ("optimizer.safetensors", b""),
    "a header of lies": ("model.safetensors", len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)),
    "a list": ("state.json", b"[1, 2]"),
    "an empty state": ("state.json", b"{}"),
    "no JSON": ("state.json", b"\xff{"),
    "a depth": ("state.json", b"[" * 100_000),
    "another step": ("state.json", b'{"step": 3}'),
    "a text for a step": ("state.json", b'{"step": "2"}'),
}


@pytest.mark.parametrize("what", CONTENT)
def test_signed_nonsense_is_damage(what: str, tiny: Callable[[int], Any], tmp_path: Path) -> None:
    first, second = (commit(tmp_path, tiny(step)).path for step in (1, 2))
    sign(second)
    verify(second)
    name, content = CONTENT[what]
    (second / name).write_bytes(content)
    sign(second)
    with pytest.raises(DamagedCheckpointError):
        verify(second)
    messages: list[str] = []
    assert newest_valid(tmp_path, messages.append) == first
    assert second.name in messages[0]


@pytest.mark.parametrize("stem", ["model", "optimizer"])
@pytest.mark.parametrize("change", ["another shape", "one missing"])
def test_tensors_that_do_not_fit_are_named(attempt: Any, tmp_path: Path, stem: str, change: str) -> None:
    attempt(tmp_path / "run", "train.steps=1")
    path = newest_valid(tmp_path / "run/checkpoints")
    assert path is not None
    file = path / f"{stem}.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensor = tensors.pop(name)
    save_file({**tensors, name: tensor[1:].clone()} if change == "another shape" else tensors, file)
    sign(path)
    with pytest.raises(UserError, match=rf"{name} .*shape"):
        attempt(tmp_path / "run", "train.steps=2")
