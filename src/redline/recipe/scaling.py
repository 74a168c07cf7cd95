"""Plan the same recipe for one card, two, four and so on up to the requested number, and find where that stops paying.

Every row is an estimate: the expected speed of one card, and arithmetic for the communication between cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from redline.errors import RecipeError
from redline.planning.communication import HOP_SECONDS, NETWORK_GBPS_PER_CARD, WIRE_SHARE
from redline.recipe.forecast import ProbeResult, forecast
from redline.recipe.resolve import Resolved

WORTHWHILE = 0.5  # an added card must bring this share of the speed of a single card


@dataclass(frozen=True)
class Row:
    """The plan for one number of cards. None means unknown."""

    gpus: int  # in each node
    nodes: int
    mode: str
    micro: int
    accumulation: int
    tokens_per_step: int
    memory_gib: float
    fits: bool
    step_ms: float | None
    communication_ms: float | None
    exposed_ms: float | None
    tokens_per_s: float | None
    efficiency: float | None  # relative to as many cards without any communication
    hours: float | None
    cost_usd: float | None
    tokens: int | None  # in that time

    @property
    def world(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Scaling:
    rows: list[Row]
    left_out: list[str]
    assumptions: list[str]

    @property
    def fitting(self) -> list[Row]:
        """Return the rows in which the model fits into memory; a speed means nothing in the others."""
        return [row for row in self.rows if row.fits]

    @property
    def pays_up_to(self) -> int | None:
        """Return the largest number of cards up to which each added card brings half the speed of a single one.

        None if no speed is known, or if the model fits nowhere.
        """
        rows = self.fitting
        if not rows or any(row.tokens_per_s is None for row in rows):
            return None
        paid = rows[0].world
        for small, large in pairwise(rows):
            if _gain(small, large) < WORTHWHILE * _speed_per_card(rows[0]):
                break
            paid = large.world
        return paid

    @property
    def verdict(self) -> str:
        """Return a sentence that says where scaling stops paying."""
        rows, paid = self.fitting, self.pays_up_to
        if not rows:
            return "by estimate the run fits on none of these"
        last = rows[-1].world
        if paid is None:
            return "how these cards are connected is not known, so the speed of several cannot be estimated"
        if paid == last:
            return (
                f"by estimate every card up to {last} pays: each adds {WORTHWHILE:.0%} or more of a single card's speed"
            )
        after = next(row for row in rows if row.world > paid)
        gain = max(0.0, _gain(next(row for row in rows if row.world == paid), after) / _speed_per_card(rows[0]))
        return (
            f"by estimate scaling stops paying at {paid} cards: each further card up to {after.world} would add"
            f" {gain:.0%} of a single card's speed"
        )

    def event(self) -> dict[str, Any]:
        """Return the `scaling` field of the plan."""
        return {
            "estimate": True,
            "rows": [{"world": row.world, **asdict(row)} for row in self.rows],
            "pays_up_to": self.pays_up_to,
            "verdict": self.verdict,
            "left_out": self.left_out,
            "assumptions": self.assumptions,
        }


def _speed_per_card(first: Row) -> float:
    return (first.tokens_per_s or 0.0) / first.world


def _gain(small: Row, large: Row) -> float:
    """Return the tokens/s that each added card brings."""
    return ((large.tokens_per_s or 0.0) - (small.tokens_per_s or 0.0)) / (large.world - small.world)


def worlds(gpus: int, nodes: int) -> Iterator[tuple[int, int]]:
    """Yield (cards per node, nodes): powers of two within a node up to `gpus`, then powers of two up to `nodes`."""
    yield from ((count, 1) for count in _doubling(gpus))
    yield from ((gpus, count) for count in _doubling(nodes) if count > 1)


def _doubling(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def scaling(
    resolve_for: Callable[[int, int], Resolved],
    gpus: int,
    nodes: int,
    *,
    price: float | None = None,
    measured: ProbeResult | None = None,
) -> Scaling:
    """Plan every number of cards. `resolve_for(gpus, nodes)` resolves the recipe for one of them.

    Numbers of cards that cannot share the batch are listed in `left_out`.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    for count, size in worlds(gpus, nodes):
        try:
            resolved = resolve_for(count, size)
        except RecipeError as error:
            left_out.append(f"{count * size} cards: {error.problems[0].what}")
            continue
        single = next((_speed_per_card(row) for row in rows if row.fits), None)
        rows.append(_row(resolved, single, price=price, measured=measured))
    return Scaling(rows, left_out, _assumptions(resolve_for(gpus, nodes)))


def _row(resolved: Resolved, single: float | None, *, price: float | None, measured: ProbeResult | None) -> Row:
    predicted, batch, world = forecast(resolved, price=price, measured=measured), resolved.batch, resolved.batch.world
    time, rate = predicted.time, predicted.tokens_per_s
    fits = resolved.memory.peak <= resolved.machine.memory_bytes
    counted = resolved.horizon_steps * resolved.tokens_per_step if resolved.horizon_steps else None
    by_clock = predicted.tokens_by_clock(resolved.recipe.train.hours, counted)
    return Row(
        gpus=world // resolved.nodes,
        nodes=resolved.nodes,
        mode=predicted.mode if world > 1 else "single",
        micro=batch.micro,
        accumulation=batch.accumulation,
        tokens_per_step=resolved.tokens_per_step,
        memory_gib=resolved.memory.gib()["peak"],
        fits=fits,
        step_ms=_rounded(1e3 * time.total if time and time.total else None),
        communication_ms=_rounded(1e3 * time.communication if time and time.communication is not None else None),
        exposed_ms=_rounded(1e3 * time.exposed if time and time.exposed is not None else None),
        tokens_per_s=_rounded(rate, 0),
        efficiency=_rounded(rate / world / (single or rate / world) if rate and fits else None, 4),
        hours=_rounded(predicted.hours, 6),
        cost_usd=_rounded(predicted.cost_usd, 2),
        tokens=by_clock if by_clock is not None else counted,
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _assumptions(resolved: Resolved) -> list[str]:
    assumptions = [
        f"links reach {WIRE_SHARE:.0%} of their rated bandwidth",
        f"a message has {1e6 * HOP_SECONDS:.0f} µs of latency at each card",
    ]
    if resolved.nodes > 1 and resolved.recipe.parallel.network_gbps is None:
        assumptions.append(
            f"the network has {NETWORK_GBPS_PER_CARD:.0f} Gbit/s per card (set parallel.network_gbps to change it)"
        )
    return assumptions
