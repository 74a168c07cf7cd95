"""`redline profile`: the table, the trace, and no run directory left behind."""

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


def test_the_table_shows_the_time_by_kind_of_work(profiled: tuple[Any, Path]) -> None:
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


def events_of(folder: Path) -> list[dict[str, Any]]:
    (trace,) = folder.glob("*.pt.trace.json.gz")
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events


def test_shapes_memory_and_stacks_are_in_the_trace(
    inside: Any, recipe: str, tmp_path: Path, profiled: tuple[Any, Path]
) -> None:
    words = ["--wait", "1", "--warmup", "1", "--steps", "1", "--record-shapes", "--profile-memory", "--with-stack"]
    answer = inside("profile", recipe, *words, "--out", "there")
    assert answer.code == 0, answer.err
    events = events_of(tmp_path / "there")
    assert any(event.get("args", {}).get("Input Dims") for event in events if event.get("name") == "aten::mm")
    assert any(event.get("name") == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)
    updates = [event for event in events if event.get("name") == "redline.update" and event.get("ph") == "X"]
    assert len(updates) == 1, "the steps that wait and warm up are not recorded"
    names = [one["name"] for one in json.loads((tmp_path / "there/profile.json").read_text())["longest"]]
    assert "aten::mm" in names
    assert not [name for name in names if ".py(" in name or "built-in" in name], "the table is still of operators"
    plain = events_of(next((profiled[1] / "runs/profiles").iterdir()))
    assert not any(event.get("name") == "[memory]" or event.get("cat") == "python_function" for event in plain)


def test_the_table_has_operators_alone(profiled: tuple[Any, Path]) -> None:
    (folder,) = (profiled[1] / "runs/profiles").iterdir()
    names = [one["name"] for one in json.loads((folder / "profile.json").read_text())["longest"]]
    assert not [name for name in names if name.startswith(("ProfilerStep", "redline."))]


def test_nothing_is_trained(profiled: tuple[Any, Path], redline: Any) -> None:
    _, home = profiled
    assert not list(home.rglob("checkpoints"))
    assert json.loads(redline("runs", "--json", cwd=home).out) == []


def test_an_existing_folder_is_kept(redline: Any, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/mine").write_text("x", encoding="utf-8")
    answer = redline("profile", "--out", "kept", cwd=tmp_path)
    assert answer.code == 2
    assert "Choose another --out" in answer.message
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["mine"]
