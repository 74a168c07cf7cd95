"""Which of several runs won, by how much, and whether the question can be asked at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from redline.monitor.events import number, section
from redline.monitor.figures import series
from redline.monitor.side_by_side import Side
from redline.units import format_seconds

_TOKENIZER = ("data", "tokenizer_fingerprint")
_EVEN = 0.001  # of a loss: closer than that is a draw


def winner(sides: Sequence[Side]) -> list[str]:
    """Sentences, the first about the winner; what forbids or weakens the comparison is one of them."""
    objectives = _known(sides, "recipe", "objective")
    if len(objectives) > 1:
        return [f"They learn different things ({', '.join(sorted(objectives))}): their losses do not compare."]
    found = _scores(sides)
    if found is None:
        return ["Their tokenizers differ, and not all know their bits per byte: their losses do not compare."]
    measure, scores, caution = found
    ranked = sorted((score, place) for place, score in enumerate(scores) if score is not None)
    if len(ranked) < 2:
        return ["Fewer than two of them have a loss: there is nothing to compare yet."]
    (best, first), (second, other) = ranked[:2]
    gap = second - best
    if gap <= _EVEN * abs(best):
        said = f"{sides[first].name} and {sides[other].name} are even: {measure} {best:.4g} and {second:.4g}."
        return [said, *_pace(sides), *caution]
    share = f" ({100 * gap / abs(second):.1f} %)" if second else ""
    said = f"{sides[first].name} won: {measure} {best:.4g}, {gap:.2g}{share} lower than that of {sides[other].name}."
    return [said, *_sooner(sides[first], sides[other], measure), *_pace(sides), *caution]


def losses_compare(sides: Sequence[Side]) -> bool:
    """Whether a lower loss is a better one: only of one objective, over one vocabulary."""
    return all(len(_known(sides, *place)) <= 1 for place in (("recipe", "objective"), _TOKENIZER))


def _known(sides: Sequence[Side], part: str, key: str) -> set[str]:
    """What the locks hold there; a run without a lock says nothing."""
    return {str(value) for side in sides if (value := section(side.lock, part).get(key)) is not None}


def _scores(sides: Sequence[Side]) -> tuple[str, list[float | None], list[str]] | None:
    """The fairest measure that they share: its name, one number a run, and what to beware of."""
    if len(_known(sides, *_TOKENIZER)) > 1:
        bits = [_lowest(side, "bits_per_byte") for side in sides]
        beware = "Their tokenizers differ, so bits per byte are compared, not losses."
        return ("bits per byte", bits, [beware]) if None not in bits else None
    others = len(_known(sides, "data", "fingerprint")) > 1
    caution = ["Their data differ, too: a lower loss may come from easier text."] if others else []
    held_out = [_lowest(side, "loss") for side in sides]
    if any(value is not None for value in held_out):
        return "best validation loss", held_out, caution
    trained = [side.data["headline"]["train_loss"] for side in sides]
    return "training loss", trained, [*caution, "Nothing was held out: training losses are compared."]


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
