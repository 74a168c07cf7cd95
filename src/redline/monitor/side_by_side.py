"""Several runs held against each other: what differs in their recipes, what each reached, and which won by how much."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.monitor.console import one_line
from redline.monitor.events import Event, number, section
from redline.monitor.report import read_run, run_data
from redline.monitor.resumed import as_it_ended, comparable_evals
from redline.recipe.load import flatten

MISSING = "–"
# Besides the recipe: what else may explain a difference.
_CONDITIONS = (
    ("machine", ("machine", "name")),
    ("commit", ("git", "commit")),
    ("redline", ("versions", "redline")),
    ("torch", ("versions", "torch")),
    ("training tokens", ("data", "train_tokens")),
    ("data", ("data", "fingerprint")),
)


@dataclass(frozen=True)
class Side:
    """One run of a comparison: what its report says, and the events that its curves are drawn from."""

    name: str
    data: dict[str, Any]
    lock: Mapping[str, Any]
    steps: list[Event]
    evals: list[Event]


@dataclass(frozen=True)
class Difference:
    """A key that the runs do not agree on, with each run's value as text."""

    key: str
    values: list[str]

    @property
    def real(self) -> bool:
        return len({value for value in self.values if value != MISSING}) > 1


def read_sides(runs: Sequence[Path]) -> list[Side]:
    names = _names(runs)
    return [_side(run, name) for run, name in zip(runs, names, strict=True)]


def _names(runs: Sequence[Path]) -> list[str]:
    """A run's folder; where two have the same, the whole path."""
    short = [run.resolve().name for run in runs]
    return [one_line(name if short.count(name) == 1 else run) for name, run in zip(short, runs, strict=True)]


def _side(run: Path, name: str) -> Side:
    events, lock = read_run(run)
    steps = sorted((e for e in events if e["type"] == "step"), key=lambda event: number(event, "step") or 0)
    return Side(name, run_data(run, events, lock), as_it_ended(run, lock, events), steps, comparable_evals(events))


def recipe_differences(sides: Sequence[Side]) -> list[Difference]:
    """Keys of the resolved recipes that runs give different values, in the recipe's own order. A key that only some
    have (of another objective or version) is no difference by itself."""
    flat = [dict(flatten(dict(section(side.lock, "recipe")))) for side in sides]
    keys = dict.fromkeys(key for recipe in flat for key in recipe if key != "description")
    rows = [Difference(key, [_text(recipe[key]) if key in recipe else MISSING for recipe in flat]) for key in keys]
    return [row for row in rows if row.real]


def other_differences(sides: Sequence[Side]) -> list[Difference]:
    """Of the machine, the code and the data."""
    rows = [
        Difference(name, [_text(section(side.lock, part).get(key, MISSING)) for side in sides])
        for name, (part, key) in _CONDITIONS
    ]
    return [row for row in rows if row.real]


def _text(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
