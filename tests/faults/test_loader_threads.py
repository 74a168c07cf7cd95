"""R10: a loader thread that is ended is replaced, and the curve is the same to the bit.

Loaders are threads of the run: no one can kill one apart from it, but a library that it calls may end it.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.runs.events import read_events
from redline.training.step import BatchLoader

KEYS = ("train.steps=30", "data.workers=2", "monitor.log_every=1", "checkpoint.every=1000", "eval.every=1000")


@pytest.mark.parametrize("trials", [pytest.param(10, id="short"), pytest.param(200, id="long", marks=pytest.mark.soak)])
def test_the_curve_is_the_same(
    world: Any, tmp_path: Path, tensors_of: Any, say: Any, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(tmp_path / "whole", *KEYS)
    expected, plain = tensors_of(tmp_path / "whole/checkpoints/step-00000030"), BatchLoader._make
    losses = losses_of(tmp_path / "whole")
    ended, chance, slowest, seed = 0, random.Random(0), 0.0, 0
    tried: dict[tuple[int, int], int] = {}

    def ending(self: BatchLoader, step: int) -> Any:
        """End one thread in five, and at some steps a second one."""
        nonlocal ended
        if chance.random() < 0.2 and ended < trials and tried.get((id(self), step), 0) < 2:
            tried[id(self), step] = tried.get((id(self), step), 0) + 1
            ended += 1
            raise SystemExit
        return plain(self, step)

    monkeypatch.setattr(BatchLoader, "_make", ending)
    while ended < trials:
        seed, begin = seed + 1, time.monotonic()
        tried.clear()
        run = tmp_path / f"run-{seed}"
        world.run(run, *KEYS)
        slowest = max(slowest, time.monotonic() - begin)
        got = tensors_of(run / "checkpoints/step-00000030")
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
        assert losses_of(run) == losses
    say(f"R10: {ended} loader threads ended in {seed} runs, 0 differing bits; the slowest run took {slowest:.1f} s")


def losses_of(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]
