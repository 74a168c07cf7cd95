"""The jobs' pure halves: the recipe options of each, and its costs from shapes."""

from __future__ import annotations

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


def costs(recipe: Any) -> Any:
    """What a recipe's job costs: `flops(…)`, `memory(…)`, `work(…)`, `parameters(…)` of a decoder's shape."""
    return job(recipe.objective).Costs(recipe)


def options_of(name: str) -> type[Section]:
    options: type[Section] = job(name).Options
    return options
