"""The jobs' pure halves: the recipe options of each, and its costs from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module  # noqa: TID251  # of the modules in _MODULES only
from typing import Any

from redline.fields import Section

# name -> module of its costs (with :CLASS where a folder holds two jobs), module of its objective
_MODULES = {
    "causal_lm": ("redline.jobs.causal_lm.costs", "redline.jobs.causal_lm.objective"),
    "finetune": ("redline.jobs.finetune.costs", "redline.jobs.finetune.objective"),
    "latent_prefix": ("redline.jobs.latent_prefix.costs", "redline.jobs.latent_prefix.objective"),
    "block_diffusion": ("redline.jobs.diffusion.costs:BlockDiffusion", "redline.jobs.diffusion.objective"),
    "hierarchical_diffusion": (
        "redline.jobs.diffusion.costs:HierarchicalDiffusion",
        "redline.jobs.diffusion.objective",
    ),
}
JOBS = tuple(_MODULES)


def job(name: str) -> Any:
    """The module of a job: its recipe `Options`, its `defaults(…)` of other keys, its `problems(…)`, its
    `added_tokens(…)`, its `Costs`.

    A job that denoises has the `layout(…)` of a recipe's sequences besides.
    """
    module, _, member = _MODULES[name][0].partition(":")
    return getattr(import_module(module), member) if member else import_module(module)


def costs(recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Any:
    """What a recipe's job costs: `flops(…)`, `memory(…)`, `work(…)`, `parameters(…)` of a decoder's shape.

    `rows` are averages over the rows of the training data (`DataFacts.rows`), which `flops`, `work` and `passes` then
    count; without them, whole rows. `micro` is the number of rows that are padded to one length.
    """
    return job(recipe.objective).Costs(recipe, rows, micro)


def options_of(name: str) -> type[Section]:
    options: type[Section] = job(name).Options
    return options


def objective_module(name: str) -> Any:
    """The module of a job: `complete(recipe, say)`, `load_data(recipe)`, `create(resolved, data)`, whether what it
    trains `can_answer(recipe)`, `export(recipe, tensors, …)` where others know such a model, and data to build with
    where there is none: `random_data(facts)`, `tokenizer_alone(facts, folder, recipe)`."""
    return import_module(_MODULES[name][1])
