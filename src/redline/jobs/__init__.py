"""The jobs' pure halves: the recipe options of each, and its costs from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from redline.fields import Section

JOBS = ("causal_lm", "finetune", "latent_prefix", "block_diffusion", "hierarchical_diffusion")


def job(name: str) -> Any:
    """The module of a job: its recipe `Options`, its `defaults(…)` of other keys, its `problems(…)`, its
    `added_tokens(…)`, its `Costs`.

    A job that denoises has the `layout(…)` of a recipe's sequences besides.
    """
    return import_module(f"redline.jobs.{name}")


def costs(recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Any:
    """What a recipe's job costs: `flops(…)`, `memory(…)`, `work(…)`, `parameters(…)` of a decoder's shape.

    `rows` are averages over the rows of the training data (`DataFacts.rows`), which `flops`, `work` and `passes` then
    count; without them, whole rows. `micro` is the number of rows that are padded to one length.
    """
    return job(recipe.objective).Costs(recipe, rows, micro)


def options_of(name: str) -> type[Section]:
    options: type[Section] = job(name).Options
    return options
