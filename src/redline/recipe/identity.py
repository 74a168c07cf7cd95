"""The model's identity: the recipe keys that change what a model computes from the same weights.

It is written into every checkpoint. lock.json describes the model too, but nothing protects that file: with another
`rope_theta` in it, the weights still fit and the model silently computes something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redline.errors import UserError
from redline.recipe.schema import Recipe

# Keys of `model` that change how it is computed, initialised or trained, but not the function. A base is compared by
# its fingerprint: its path may change.
_OTHER_KEYS = ("size", "attention", "kernels", "init", "embedding_std", "dropout", "base", "init_from", "lora")
_LORA_KEYS = ("r", "alpha", "target_modules", "rslora")


def model_identity(recipe: Recipe) -> dict[str, Any]:
    """Return recipe key → value, as JSON has it, of a resolved recipe."""
    model = recipe.model.model_dump(mode="json")
    found = {f"model.{key}": value for key, value in model.items() if key not in _OTHER_KEYS}
    found |= {f"model.lora.{key}": model["lora"][key] for key in _LORA_KEYS}
    options = getattr(recipe, recipe.objective)
    own = options.model_dump(mode="json")
    return found | {f"{recipe.objective}.{key}": own[key] for key in options.model_keys}


def check_model(recorded: dict[str, Any], recipe: Recipe, run: Path) -> None:
    """Compare a checkpoint's recorded `identity` with the recipe in lock.json; a UserError names the keys that differ.

    Checkpoints of older releases record no model, and ones of other releases may lack a key: what is not recorded is
    not compared.
    """
    then, now = recorded.get("model", {}), model_identity(recipe)
    differing = [f"{key} is {now[key]} there and was {then[key]}" for key in now if then.get(key, now[key]) != now[key]]
    if differing:
        what = f"lock.json describes another model than the one that was trained: {', '.join(differing)}."
        raise UserError(
            what, where=str(run), fix="Put the original lock.json back, or set these keys to what they were."
        )
