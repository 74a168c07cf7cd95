"""The same recipe on one card, two, four … as many as were asked for: what each world would take, and which pays.

Every row is an estimate: one card's prior, and arithmetic for what lies between cards.
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

WORTHWHILE = 0.5  # of a card's speed alone, that an added one must bring


@dataclass(frozen=True)
class Row:
    """One world. What is not known is None."""

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
    efficiency: float | None  # against as many cards that need not wait for each other
    hours: float | None
    cost_usd: float | None
    tokens: int | None  # seen in that time

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
        """Where the run can be at all: elsewhere a speed means nothing."""
        return [row for row in self.rows if row.fits]

    @property
    def pays_up_to(self) -> int | None:
        """The last world to which each added card brings half of its speed alone; None where speeds are unknown, or
        where it fits nowhere."""
        rows = self.fitting
        if not rows or any(row.tokens_per_s is None for row in rows):
            return None
        paid = rows[0].world
        for small, large in pairwise(rows):
            if _gain(small, large) < WORTHWHILE * _alone(rows[0]):
                break
            paid = large.world
        return paid

    @property
    def verdict(self) -> str:
        """When scaling stops paying, in a sentence."""
        rows, paid = self.fitting, self.pays_up_to
        if not rows:
            return "by estimate it fits on none of these"
        last = rows[-1].world
        if paid is None:
            return "what lies between these cards is not known: nothing is said of several"
        if paid == last:
            return f"by estimate every card up to {last} pays: it brings at least {WORTHWHILE:.0%} of its speed alone"
        after = next(row for row in rows if row.world > paid)
        gain = max(0.0, _gain(next(row for row in rows if row.world == paid), after) / _alone(rows[0]))
        return (
            f"by estimate scaling stops paying at {paid} cards: of those added up to {after.world} each would bring"
            f" {gain:.0%} of its speed alone"
        )

    def event(self) -> dict[str, Any]:
        return {
            "estimate": True,
            "rows": [{"world": row.world, **asdict(row)} for row in self.rows],
            "pays_up_to": self.pays_up_to,
            "verdict": self.verdict,
            "left_out": self.left_out,
            "assumptions": self.assumptions,
        }


def _alone(first: Row) -> float:
    return (first.tokens_per_s or 0.0) / first.world


def _gain(small: Row, large: Row) -> float:
    """Tokens/s by each card that was added."""
    return ((large.tokens_per_s or 0.0) - (small.tokens_per_s or 0.0)) / (large.world - small.world)


def worlds(gpus: int, nodes: int) -> Iterator[tuple[int, int]]:
    """Cards of a node, then nodes, by powers of two up to those asked for."""
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
    """`resolve_for` makes the plan of so many cards in so many nodes; a world that cannot share the batch is named."""
    rows: list[Row] = []
    left_out: list[str] = []
    for count, size in worlds(gpus, nodes):
        try:
            resolved = resolve_for(count, size)
        except RecipeError as error:
            left_out.append(f"{count * size} cards: {error.problems[0].what}")
            continue
        alone = next((_alone(row) for row in rows if row.fits), None)
        rows.append(_row(resolved, alone, price=price, measured=measured))
    return Scaling(rows, left_out, _assumptions(resolve_for(gpus, nodes)))


def _row(resolved: Resolved, alone: float | None, *, price: float | None, measured: ProbeResult | None) -> Row:
    ahead, batch, world = forecast(resolved, price=price, measured=measured), resolved.batch, resolved.batch.world
    time, rate = ahead.time, ahead.tokens_per_s
    fits = resolved.memory.peak <= resolved.machine.memory_bytes
    counted = resolved.horizon_steps * resolved.tokens_per_step if resolved.horizon_steps else None
    by_clock = ahead.tokens_by_clock(resolved.recipe.train.hours, counted)
    return Row(
        gpus=world // resolved.nodes,
        nodes=resolved.nodes,
        mode=ahead.mode if world > 1 else "single",
        micro=batch.micro,
        accumulation=batch.accumulation,
        tokens_per_step=resolved.tokens_per_step,
        memory_gib=resolved.memory.gib()["peak"],
        fits=fits,
        step_ms=_rounded(1e3 * time.total if time and time.total else None),
        communication_ms=_rounded(1e3 * time.communication if time and time.communication is not None else None),
        exposed_ms=_rounded(1e3 * time.exposed if time and time.exposed is not None else None),
        tokens_per_s=_rounded(rate, 0),
        efficiency=_rounded(rate / world / (alone or rate / world) if rate and fits else None, 4),
        hours=_rounded(ahead.hours, 6),
        cost_usd=_rounded(ahead.cost_usd, 2),
        tokens=by_clock if by_clock is not None else counted,
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _assumptions(resolved: Resolved) -> list[str]:
    found = [
        f"wires carry {WIRE_SHARE:.0%} of what they are rated for",
        f"a message waits {1e6 * HOP_SECONDS:.0f} µs at each card",
    ]
    if resolved.nodes > 1 and resolved.recipe.parallel.network_gbps is None:
        found.append(
            f"the network has {NETWORK_GBPS_PER_CARD:.0f} Gbit/s for each card (parallel.network_gbps says otherwise)"
        )
    return found
