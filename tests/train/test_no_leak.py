"""A step leaves nothing behind in memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.train.rundir import LOCK_FILE, RunDirectory


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon", "normuon"])
def test_steps_keep_no_tensors(world: Any, tmp_path: Path, optimizer: str) -> None:
    alive: list[int] = []

    def count(step: int) -> None:
        if step in (4, 29):  # looking at all that is alive takes its time
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    with RunDirectory(tmp_path) as run:
        trainer = world.trainer(run, f"train.optimizer={optimizer}", "train.steps=30")
        world.around(trainer, after=count)
        trainer.run()
        trainer.monitor.log.close()
    early, late = alive
    assert late - early < 20, "batches come and go, but nothing else"


def test_a_free_directory_names_no_holder(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        assert (tmp_path / LOCK_FILE).read_bytes()
    assert not (tmp_path / LOCK_FILE).read_bytes()
