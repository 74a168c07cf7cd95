"""The jobs' torch halves, found by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def objective_module(name: str) -> Any:
    """The module of a job: `complete(recipe, say)`, `load_data(recipe)`, `create(resolved, data)`, whether what it
    trains `can_answer(recipe)`, `export(recipe, tensors, …)` where others know such a model, and data to build with
    where there is none: `random_data(facts)`, `tokenizer_alone(facts, folder, recipe)`."""
    return import_module(f"redline.objectives.{name}")
