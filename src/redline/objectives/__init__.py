"""The jobs' torch halves, found by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def objective_module(name: str) -> Any:
    """The module of a job: `complete(recipe, say)`, `load_data(recipe)`, `create(resolved, data)`,
    `export(recipe, tensors, …)`, and data to build with where there is none: `random_data(facts)`,
    `tokenizer_alone(facts, folder, recipe)`."""
    return import_module(f"redline.objectives.{name}")
