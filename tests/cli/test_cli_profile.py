"""`redline profile`: a table, a trace that opens, and no run left behind."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def profiled(redline: Any, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    home = tmp_path_factory.mktemp("profile")
    shutil.copy(recipe, home / "toy.yaml")
    return redline("profile", "toy.yaml", "--steps", "2", cwd=home), home


def test_it_tells_where_the_time_went(profiled: tuple[Any, Path]) -> None:
    answer, home = profiled
    assert answer.code == 0, answer.err
    for kind in ("matmul", "attention", "memory-bound", "optimizer", "idle"):
        assert f"\n  {kind}" in answer.out
    (folder,) = (home / "runs/profiles").iterdir()
    found = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    assert found["steps"] == 2
    assert sum(part["ms"] for part in found["parts"]) == pytest.approx(found["step_ms"], rel=0.02)
    assert found["memory"] is None, "a CPU's memory has no record"
    assert "USDT" not in answer.err, "the profiler's own notes are nobody's business"


def test_the_trace_opens(profiled: tuple[Any, Path]) -> None:
    _, home = profiled
    (trace,) = (home / "runs/profiles").glob("*/toy.pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    updates = [event for event in events if event.get("name") == "redline.update"]
    assert len([event for event in updates if event.get("ph") == "X"]) == 2


def test_nothing_is_trained(profiled: tuple[Any, Path], redline: Any) -> None:
    _, home = profiled
    assert not list(home.rglob("checkpoints"))
    assert json.loads(redline("runs", "--json", cwd=home).out) == []


def test_a_folder_that_is_there_is_kept(redline: Any, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/mine").write_text("x", encoding="utf-8")
    answer = redline("profile", "--out", "kept", cwd=tmp_path)
    assert answer.code == 2
    assert "Choose another --out" in answer.said
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["mine"]
