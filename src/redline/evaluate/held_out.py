"""What a score was measured on: how many rows, and how many of them the run was trained on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.data.facts import expected_facts
from redline.data.problems import is_problems
from redline.data.sources import source_bytes
from redline.errors import UserError
from redline.objectives import objective_module
from redline.recipe.checks import number
from redline.recipe.held_out import FEW_ROWS
from redline.recipe.schema import Recipe

_MOST_BYTES = 256 << 20  # of training rows that are read again to be compared

Keys = Collection[Any]


@dataclass(frozen=True)
class HeldOut:
    size: int
    unit: str  # rows, or sequences of text
    shared: int | None = None  # rows or documents that the run was trained on; None: not known
    looked: bool = False  # whether they were looked for: only with --data

    def as_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "unit": self.unit,
            "few": self.few,
            "shared_with_training": self.shared,
            "warnings": self.lines(),
        }

    @property
    def few(self) -> bool:
        return self.size < FEW_ROWS

    def lines(self) -> list[str]:
        """Return what must stand beside the score."""
        told = []
        if self.few:
            told.append(f"only {self.size} {self.unit}, fewer than {FEW_ROWS}: a rough estimate")
        if self.shared:
            what = "row" if self.unit == "rows" else "document"
            many = f"{self.shared:,} {what}{'s are' if self.shared > 1 else ' is'}"
            told.append(f"{many} in the training data as well: this is not a score on unseen data")
        elif self.looked and self.shared is None:
            told.append("whether the run was trained on some of it is not known: its training data cannot be read here")
        return told


def held_out_of(objective: Any, training: Recipe | None) -> HeldOut | None:
    """Describe what the objective evaluates; `training` is the run's own recipe, where other data are evaluated."""
    data = objective.data
    keys = data.row_keys(trained=False)
    text = hasattr(data, "sequences")
    if keys is None and not text:
        return None
    recipe = objective.recipe
    size = min(data.sequences(recipe.data.seq_len), recipe.eval.sequences) if text else len(keys)
    if training is None:
        return HeldOut(size, "sequences" if text else "rows")
    known = None if keys is None else _training_keys(training, text=text)
    shared = None if keys is None or known is None else len(set(keys) & set(known))
    return HeldOut(size, "sequences" if text else "rows", shared, looked=True)


def _training_keys(recipe: Recipe, *, text: bool) -> Keys | None:
    """Return the keys of what the run was trained on; None where that is not at hand, or too much to read again."""
    sources = [part.source for part in recipe.data.parts]
    try:
        if recipe.data.stream or not all(_here(source) for source in sources):
            return None
        if text and expected_facts(recipe.data, int(number(recipe.model.vocab) or 0)).estimated:
            return None  # it would have to be prepared again
        if not text and sum(0 if is_problems(one) else source_bytes(one) or 0 for one in sources) > _MOST_BYTES:
            return None
        keys: Keys | None = objective_module(recipe.objective).load_data(recipe).row_keys(trained=True)
    except UserError:  # moved, changed or damaged since: the score itself does not need it
        return None
    return keys


def _here(source: str) -> bool:
    try:
        return source == "embedded" or is_problems(source) or Path(source).expanduser().exists()
    except OSError:  # a name too long for any file
        return False
