"""What resumes changed of a run: its recipe as it was in the end, and since when its evaluations compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.errors import UserError, cleaned
from redline.monitor.events import Event
from redline.recipe.lock import locked_recipe


def as_it_ended(run: Path, lock: Mapping[str, Any], events: Sequence[Event]) -> Mapping[str, Any]:
    """The lock, with what resumes changed in its recipe. One that this version cannot read stays as it is."""
    before = [words for event in events if (words := _changes(event))]
    if not before:
        return lock
    try:
        recipe = locked_recipe(run, {**lock, "began_in": None}, before=before).recipe
    except (UserError, KeyError, TypeError, ValueError):
        return lock
    return {**lock, "recipe": cleaned(recipe.model_dump(mode="json"))}


def comparable_evals(events: Sequence[Event]) -> list[Event]:
    """Evaluations of the same windows as the last: those before `eval.sequences` was changed are of other text."""
    found: list[Event] = []
    before: list[Event] = []
    for event in events:
        if any(word.startswith("eval.sequences=") for word in _changes(event)):
            found, before = [], found or before
        elif event["type"] == "eval":
            found.append(event)
    return found or before


def _changes(event: Event) -> list[str]:
    """The words of a resume."""
    words = event.get("overrides") if event["type"] == "start" and event.get("resumed_from") is not None else None
    return [str(word) for word in words] if isinstance(words, list) else []
