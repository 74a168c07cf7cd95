"""What a run's data lack or leave unread: validation, and keys that only text obeys."""

from __future__ import annotations

from redline.recipe.schema import Data, Recipe

_OF_TEXT = ("val_fraction", "text_key", "dedup")


def nothing_held_out(recipe: Recipe, train_tokens: int, val_tokens: int, *, made: bool) -> list[str]:
    """Of data that are known; nobody who asked for none is told so, unless something waits for it."""
    if not train_tokens or val_tokens:
        return []
    if recipe.train.target_loss is not None:
        return ["nothing is held out, so no validation loss is known: train.target_loss will not be reached"]
    if recipe.data.val_fraction:
        larger = "a larger --val-fraction to `redline prepare`" if made else "a larger data.val_fraction"
        more = f"Give more text, or {larger}"
        return [f"nothing of the text is held out, so no validation loss will be known. {more}"]
    return []


def unread(recipe: Recipe) -> list[str]:
    """Of tokens that were made before: whoever made them has cut, chosen and held out."""
    plain = Data()
    asked = [key for key in _OF_TEXT if getattr(recipe.data, key) != getattr(plain, key)]
    how = "`redline prepare` has an option for each"
    return [f"data.{key} does nothing: the source holds tokens, which are taken as they are; {how}" for key in asked]
