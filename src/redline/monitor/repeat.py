"""The commands that make a run again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.errors import UserError
from redline.fields import AUTO
from redline.monitor.console import clean, one_line
from redline.monitor.events import Event, number, section
from redline.recipe.load import flatten, load, shipped


@dataclass(frozen=True)
class Repeat:
    """Lines to copy, and what one has to know beside them."""

    commands: list[str]
    remarks: list[str]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def how_to_repeat(lock: Mapping[str, Any], starts: Sequence[Event], plans: Sequence[Event], run: str) -> Repeat:
    """Empty for a run whose recipe is not known. Each start has its plan."""
    first: Event = starts[0] if starts else {}
    name = one_line(lock.get("recipe_name") or first.get("recipe"))
    if not name:
        return Repeat([], [])
    own = not _is_shipped(name, _overrides(first), section(lock, "recipe"))
    code, remarks = _code(lock)
    if own:
        remarks.append(f"{name}.yaml is the resolved recipe below: its values hold the overrides, too.")
    words = ["redline", "train", f"{name}.yaml" if own else name, *([] if own else _overrides(first))]
    cards = [_cards(plan) for plan in plans] or [[]]
    words += cards[0]
    cards += [cards[-1]] * (len(starts) - len(cards))
    again = f"{run}-again"  # beside it: what goes on from the repetition must not go on from the run itself
    later = [
        ["redline", "train", "--resume", again, *_overrides(start), *now]
        for start, before, now in zip(starts[1:], cards, cards[1:], strict=False)
        if _overrides(start) or now != before
    ]
    words += ["--run", again] if later else []
    if any(word.startswith("data.source=") for word in words):
        remarks.append("data.source is a path of the machine it ran on.")
    return Repeat([*code, *(shlex.join(command) for command in (words, *later))], remarks)


def _cards(plan: Event) -> list[str]:
    count = number(plan, "gpus")
    return ["--gpus", f"{count:.0f}"] if count and count > 1 else []


def _is_shipped(name: str, overrides: list[str], resolved: Mapping[str, Any]) -> bool:
    """Whether the recipe of this name still says what the run did: a user's own file may have the same name."""
    if name not in shipped():
        return False
    try:
        asked = dict(flatten(load(name, overrides).recipe.model_dump(mode="json")))
    except UserError:  # of another version
        return False
    did = dict(flatten(dict(resolved)))
    return all(value in (None, AUTO) or _same(did.get(key, value), value) for key, value in asked.items())


def _same(one: Any, other: Any) -> bool:
    """Numbers that a base's own files round are the same."""
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-6) if both else bool(one == other)


def _code(lock: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    git, version = section(lock, "git"), one_line(section(lock, "versions").get("redline"))
    commit = one_line(git.get("commit"))
    if not commit:
        return [], [f"It ran with redline {version}."] if version else []
    changed = ["The code had changes that were not committed."] if git.get("dirty") else []
    return [shlex.join(["git", "checkout", commit])], changed


def _overrides(start: Event) -> list[str]:
    given = start.get("overrides")
    return [clean(word) for word in given] if isinstance(given, list) else []
