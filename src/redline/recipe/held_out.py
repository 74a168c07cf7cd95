"""What a run without validation does not have."""

from __future__ import annotations

from redline.recipe.schema import Recipe


def nothing_held_out(recipe: Recipe, train_tokens: int, val_tokens: int) -> list[str]:
    """Of data that are known; nobody who asked for none is told so, unless something waits for it."""
    if not train_tokens or val_tokens:
        return []
    if recipe.train.target_loss is not None:
        return ["nothing is held out, so no validation loss is known: train.target_loss will not be reached"]
    if recipe.data.val_fraction:
        more = "Give more text, or a larger data.val_fraction"
        return [f"nothing of the text is held out, so no validation loss will be known. {more}"]
    return []
