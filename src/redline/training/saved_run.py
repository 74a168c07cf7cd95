"""A run as it was saved: its lock, its recipe, and the weights of its checkpoints.

`redline eval`, `sample`, `export` and `model.init_from` all open a run through this class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.recipe.lock import check_model_identity, locked_recipe, read_lock
from redline.recipe.schema import Recipe
from redline.training.checkpoint import Weights, find_weights


@dataclass(frozen=True)
class SavedRun:
    path: Path
    lock: dict[str, Any]
    recipe: Recipe  # resolved, as in the lock

    @classmethod
    def open(cls, path: Path) -> SavedRun:
        lock = read_lock(path)
        return cls(path, lock, locked_recipe(path, lock).recipe)

    def weights(
        self,
        selector: int | str | None = None,
        kind: str | None = None,
        log: Callable[[str], None] = lambda message: None,
    ) -> Weights:
        """Find the weights of a checkpoint, and check that the lock still describes the model they belong to.

        `selector` is a step or "best" (the last checkpoint if not given); `kind` is "ema" or "raw".
        """
        found = find_weights(self.path, selector, kind, log)
        check_model_identity(found.state["identity"], self.recipe, self.path)
        return found
