"""train.compile_mode and data.prefetch reach torch and the loader; samples per second are logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from redline.data.loader import Prefetcher
from redline.runs.events import read_events
from redline.training import step as feed


def test_compile_mode_reaches_torch(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append(how))
    mode = "max-autotune-no-cudagraphs"
    world.run(tmp_path / "run", "train.steps=1", "train.compile=true", f"train.compile_mode={mode}")
    assert compiled
    assert {how["mode"] for how in compiled} == {mode}


@pytest.mark.parametrize(("asked", "depth"), [("data.prefetch=7", 7), ("data.prefetch=4", 4)])
def test_prefetch_reaches_the_loader(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, depth: int
) -> None:
    depths: list[int] = []

    class Counted(Prefetcher[Any]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            depths.append(self._depth)

    monkeypatch.setattr(feed, "Prefetcher", Counted)
    world.run(tmp_path / "run", "train.steps=1", asked)
    assert depths == [depth]


def test_samples_per_second(world: Any, tmp_path: Path) -> None:
    trainer = world.run(tmp_path / "run", "train.steps=2", "data.seq_len=32")
    steps = [event for event in read_events(tmp_path / "run/events.jsonl") if event["type"] == "step"]
    assert [event["samples_per_s"] for event in steps] == [event["tokens_per_s"] / 32 for event in steps]
    batch = trainer.batch.global_batch
    assert steps[-1]["samples_per_s"] == pytest.approx(batch / (steps[-1]["step_ms"] / 1000))
