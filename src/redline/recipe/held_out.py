"""What a run's data lack or leave unread: validation, and keys that only text obeys."""

from __future__ import annotations

from redline.recipe.schema import Data, Recipe

FEW_ROWS = 30  # below this a score says little: one row is worth more than 3 %
_OF_TEXT = ("val_fraction", "text_key", "dedup")


def nothing_held_out(recipe: Recipe, train_tokens: int, val_tokens: int, *, made: bool) -> list[str]:
    """Of data that are known; nobody who asked for none is told so, unless something waits for it."""
    if not train_tokens or val_tokens:
        return []
    waiting = {"train.target_loss will not be reached": recipe.train.target_loss}
    waiting["eval.patience will not stop the run"] = recipe.eval.patience
    if told := [text for text, value in waiting.items() if value is not None]:
        return [f"nothing is held out, so no validation loss is known: {', and '.join(told)}"]
    if recipe.data.val_fraction:
        larger = "a larger --val-fraction to `redline prepare`" if made else "a larger data.val_fraction"
        more = f"Give more text, or {larger}"
        return [f"nothing of the text is held out, so no validation loss will be known. {more}"]
    return []


def few_held_out(rows: int | None) -> list[str]:
    """Return a warning where a validation loss would be that of a few rows."""
    if not rows or rows >= FEW_ROWS:
        return []
    what = f"only {rows} rows are held out, fewer than {FEW_ROWS}: the validation loss is a rough estimate"
    return [f"{what}. Raise data.val_fraction, or use more rows"]


def unread(recipe: Recipe) -> list[str]:
    """Of tokens that were made before: whoever made them has cut, chosen and held out."""
    plain = Data()
    asked = [key for key in _OF_TEXT if getattr(recipe.data, key) != getattr(plain, key)]
    how = "`redline prepare` has an option for each"
    return [f"data.{key} does nothing: the source holds tokens, which are taken as they are; {how}" for key in asked]


def weight_notes(data: Data) -> list[str]:
    """Say what becomes of weights that the recipe leaves to a rule: some are unstated, or there is nothing to share."""
    stated = [part for part in data.parts if part.weight is not None]
    if stated and len(data.parts) == 1:
        return ["the weight of a single source has no effect: all samples come from it"]
    unstated = [part.source for part in data.parts if part.weight is None]
    if not stated or not unstated:
        return []
    total = sum(part.weight or 1.0 for part in data.parts)
    shares = ", ".join(f"{part.source} {(part.weight or 1.0) / total:.1%}" for part in data.parts)
    names = " and ".join(unstated)
    verb = "states no weight and counts" if len(unstated) == 1 else "state no weight and count"
    return [f"data.source: {names} {verb} as 1. Shares of the samples: {shares}"]
