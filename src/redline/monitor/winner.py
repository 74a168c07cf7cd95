"""Which of several runs won, by how much, and whether the question can be asked at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from redline.jobs import JOBS, options_of
from redline.monitor.events import number, section
from redline.monitor.figures import series
from redline.monitor.side_by_side import Side
from redline.units import format_seconds

_TOKENIZER = ("data", "tokenizer_fingerprint")
_OTHER_DATA = (
    "Their data differ, so there is no winner: a lower loss may come from easier text. "
    "`redline eval RUN --data FILE` scores each on the same text."
)
_EASIER = {
    "data.fingerprint": "The same rows are split or packed in different ways, so other rows may be held out.",
    "recipe.data.seq_len": "Their data.seq_len differ: a longer context makes each token easier to predict.",
    "recipe.eval.sequences": "Their eval.sequences differ: they were evaluated on different text, in part.",
}
_PART = "Each looked at the beginning of what is held out, by its own tokens: `redline eval` scores all of it."
_EVEN = 0.001  # of a loss: closer than that is a draw


@dataclass(frozen=True)
class Measure:
    """The fairest one that runs share: its name, a number for each run, and what to beware of."""

    name: str
    scores: list[float | None]
    cautions: list[str]

    @property
    def ranked(self) -> list[tuple[float, int]]:
        """Scores with their runs' places, the lowest first: the winner's."""
        return sorted((score, place) for place, score in enumerate(self.scores) if score is not None)


def measure(sides: Sequence[Side]) -> Measure | str:
    """Or a sentence: why their losses do not compare."""
    objectives = _known(sides, "recipe", "objective")
    if len(objectives) > 1:
        return f"They learn different things ({', '.join(sorted(objectives))}): their losses do not compare."
    if _other_data(sides):
        return _OTHER_DATA
    if not _same_loss(sides):
        return "Their losses divide by different tokens (loss_per), so there is no winner."
    if len(_known(sides, *_TOKENIZER)) > 1:
        bits = [_lowest(side, "bits_per_byte") for side in sides]
        if None in bits:
            return "Their tokenizers differ, and not all know their bits per byte: their losses do not compare."
        beware = "Their tokenizers differ, so bits per byte are compared, not losses."
        text = _differing(sides, "recipe.data.seq_len")
        return Measure("bits per byte", bits, [beware, *_in_part(sides), *text])
    cautions = _differing(sides, "data.fingerprint", "recipe.data.seq_len", "recipe.eval.sequences")
    held_out = [_lowest(side, "loss") for side in sides]
    if any(value is not None for value in held_out):
        return Measure("best validation loss", held_out, cautions)
    trained = [side.data["headline"]["train_loss"] for side in sides]
    return Measure("training loss", trained, [*cautions, "Nothing was held out: training losses are compared."])


def winner(sides: Sequence[Side]) -> list[str]:
    """Sentences, the first about the winner; what forbids or weakens the comparison is one of them."""
    found = measure(sides)
    if isinstance(found, str):
        return [found]
    if len(found.ranked) < 2:
        return ["Fewer than two of them have a loss: there is nothing to compare yet."]
    (best, first), (second, other) = found.ranked[:2]
    gap = second - best
    if _even(found):
        said = f"{sides[first].name} and {sides[other].name} are even: {found.name} {best:.4g} and {second:.4g}."
        return [said, *_pace(sides), *found.cautions]
    share = f" ({100 * gap / abs(second):.1f} %)" if second else ""
    said = f"{sides[first].name} won: {found.name} {best:.4g}, {gap:.2g}{share} lower than that of {sides[other].name}."
    return [said, *_sooner(sides[first], sides[other], found.name), *_pace(sides), *found.cautions]


def winner_name(sides: Sequence[Side]) -> str | None:
    """Return the run with the lowest score; None where scores do not compare, are even, or are fewer than two."""
    found = measure(sides)
    if isinstance(found, str) or len(found.ranked) < 2 or _even(found):
        return None
    return sides[found.ranked[0][1]].name


def _even(found: Measure) -> bool:
    (best, _), (second, _) = found.ranked[:2]
    return second - best <= _EVEN * abs(best)


def losses_compare(sides: Sequence[Side]) -> bool:
    """Return whether a lower loss is a better one: only for one objective, one vocabulary and the same data."""
    same = all(len(_known(sides, *place)) <= 1 for place in (("recipe", "objective"), _TOKENIZER))
    return same and not _other_data(sides) and _same_loss(sides)


def _same_loss(sides: Sequence[Side]) -> bool:
    """Return whether the loss means the same in all runs: of keys that changed it, older locks have the older value."""
    meanings = set()
    for side in sides:
        recipe = section(side.lock, "recipe")
        name = str(recipe.get("objective"))
        older = getattr(options_of(name), "in_older_locks", {}) if name in JOBS else {}
        meanings.add(str({key: section(recipe, name).get(key, value) for key, value in older.items()}))
    return len(meanings) <= 1


def _other_data(sides: Sequence[Side]) -> bool:
    """Return whether the runs read different data.

    With different tokenizers no digest of tokens can be equal, so the names of the sources and the bytes of each split
    have to do. A fingerprint of rows also covers how they are split and packed; `content`, which older locks lack,
    covers the rows alone.
    """
    if len(_known(sides, *_TOKENIZER)) > 1:
        names = {str(_sources(side)) for side in sides if _sources(side)}
        return len(names) > 1 or len(_known(sides, "data", "text_bytes")) > 1
    contents = [section(side.lock, "data").get("content") for side in sides]
    key = "content" if all(contents) else "fingerprint"
    return len(_known(sides, "data", key)) > 1


def _sources(side: Side) -> list[str]:
    """Return the names of the run's sources, without their weights."""
    given = section(section(side.lock, "recipe"), "data").get("source")
    parts = given if isinstance(given, list) else [given]
    return [str(part.get("source") if isinstance(part, dict) else part) for part in parts if part is not None]


def _known(sides: Sequence[Side], *path: str) -> set[str]:
    """What the locks hold there; a run without a lock says nothing."""
    *parts, key = path
    found = [reduce(section, parts, side.lock).get(key) for side in sides]
    return {str(value) for value in found if value is not None}


def _differing(sides: Sequence[Side], *paths: str) -> list[str]:
    return [_EASIER[path] for path in paths if len(_known(sides, *path.split("."))) > 1]


def _in_part(sides: Sequence[Side]) -> list[str]:
    """The first so many sequences of two tokenizers are not the same text."""
    for side in sides:
        recipe = section(side.lock, "recipe")
        sequences, length = number(section(recipe, "eval"), "sequences"), number(section(recipe, "data"), "seq_len")
        tokens = number(section(side.lock, "data"), "val_tokens")
        if None not in (sequences, length, tokens) and sequences * length < tokens:  # type: ignore[operator]
            return [_PART]
    return []


def _lowest(side: Side, key: str) -> float | None:
    return min((value for event in side.evals if (value := number(event, key)) is not None), default=None)


def _sooner(first: Side, other: Side, measure: str) -> list[str]:
    """How much earlier the winner stood where the next one ended, in time and money."""
    key = {"best validation loss": "loss", "bits per byte": "bits_per_byte"}.get(measure)
    target = _lowest(other, key) if key else None
    if key is None or target is None:
        return []
    said = []
    ways: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("hours", lambda hours: format_seconds(3600 * hours)),
        ("cost_usd", lambda cost: f"${cost:.2g}"),
    )
    for spent, show in ways:
        mine, theirs = (_spent_until(side, key, target, spent) for side in (first, other))
        if mine is not None and theirs is not None and 0 < mine < theirs:
            said.append(f"{show(mine)} instead of {show(theirs)}")
    reached = f"It stood at {other.name}'s {target:.4g} after {' and '.join(said)}."
    return [reached] if said else []


def _spent_until(side: Side, key: str, target: float, spent: str) -> float | None:
    """Hours or dollars at the first evaluation that is as good."""
    step = next((number(e, "step") for e in side.evals if (v := number(e, key)) is not None and v <= target), None)
    at, value = series(side.steps, "step", spent)
    if step is None or not len(at):
        return None
    return float(np.interp(step, np.concatenate([[0.0], at]), np.concatenate([[0.0], value])))


def _pace(sides: Sequence[Side]) -> list[str]:
    rates = [(side.data["headline"]["tokens_per_s_median"], side.name) for side in sides]
    known = sorted((rate, name) for rate, name in rates if rate)
    if len(known) < 2 or known[-1][0] < 1.02 * known[0][0]:
        return []
    (slow, slowest), (fast, fastest) = known[0], known[-1]
    return [f"{fastest} had the most tokens/s, {fast / slow:.2f} times those of {slowest}."]
