"""Tiny runs as `redline train` leaves them, and what transformers makes of their export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def trained(world: Any, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """A run of two steps: its directory, and the trainer with the model in it."""
    from redline.recipe.lock import make_lock, write_lock

    def train(*overrides: str, name: str = "run") -> tuple[Path, Any]:
        run = tmp_path / name
        trainer = world.run(run, "train.steps=2", *overrides)
        trainer.objective.save_tokenizer(run)
        write_lock(run, make_lock("tiny", "0123", trainer.resolved, trainer.objective.data.facts))
        return run, trainer

    return train
