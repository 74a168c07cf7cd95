"""Which extras of redline a recipe needs, for `redline doctor`."""

from __future__ import annotations

from redline.data.sources import dataset_id
from redline.planning.memory import LOW_BIT
from redline.recipe.load import load, shipped
from redline.recipe.schema import Recipe
from redline.remote import is_url, scheme_of


def extras_of(recipe: Recipe) -> set[str]:
    """Return the names of the extras without which the recipe cannot train."""
    train = recipe.train
    needed = {
        "data": any(_needs_data(part.source) for part in recipe.data.parts),
        "finetune": recipe.model.base is not None,  # its tokenizer and chat template
        "low-bit": train.optimizer in LOW_BIT,
        "fp8": train.precision == "fp8" and train.fp8 == "torchao",
        "wandb": recipe.monitor.wandb is not False,
        "remote": _needs_remote(recipe.checkpoint.mirror) or any(_needs_remote(p.source) for p in recipe.data.parts),
    }
    return {extra for extra, needs in needed.items() if needs}


def recipes_by_extra() -> dict[str, list[str]]:
    """Return, for each extra, the shipped recipes that need it."""
    found: dict[str, list[str]] = {}
    for name, path in shipped().items():
        for extra in extras_of(load(str(path), []).recipe):
            found.setdefault(extra, []).append(name)
    return found


def _needs_data(source: str) -> bool:
    dataset = dataset_id(source)
    return source.endswith((".parquet", ".zst")) or (dataset is not None and dataset.address is None)


def _needs_remote(url: str | None) -> bool:
    return url is not None and is_url(url) and scheme_of(url) != "file"
