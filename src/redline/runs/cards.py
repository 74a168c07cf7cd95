"""The ranks of a run side by side: the lowest, median and highest of each reading, and the ranks that slow the others.

All ranks wait for the slowest one in every step, so one hot or throttled card sets the speed of all. The readings are
the columns `ranks` of step events, which training/readings.py writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.runs.events import Event, finite, section

# field, name, unit, decimals
_READINGS = (
    ("forward_ms", "forward passes of a step", "ms", 1),
    ("data_wait_ms", "waiting for data", "ms", 1),
    ("sm_clock_mhz", "GPU clock", "MHz", 0),
    ("power_w", "power", "W", 0),
    ("temperature_c", "temperature", "°C", 0),
    ("gpu_util", "utilisation", "%", 0),
    ("gpu_memory_gib", "memory in use", "GiB", 1),
    ("memory_gib", "peak memory", "GiB", 1),
)
_LINES = 10  # newest log lines over which a rank's reading is averaged (median)
_MOST_RANKS = 4096
_SLOW = 1.05  # times the median: a rank that takes longer is named
_HOT = 8.0  # °C above the median: a card that is hotter is named
_FAULTS = {"thermal", "hw_thermal", "hw_slowdown", "power_brake"}

Values = list[float | None]  # one for each rank


@dataclass(frozen=True)
class Spread:
    """The lowest, median and highest value of a reading, and the ranks that have them."""

    key: str
    name: str
    unit: str
    decimals: int
    low: float
    median: float
    high: float
    low_rank: int
    high_rank: int


@dataclass(frozen=True)
class Cards:
    """The readings of all ranks, and sentences about those that slow the others."""

    count: int
    spreads: tuple[Spread, ...]
    stragglers: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "spreads": [asdict(spread) for spread in self.spreads]}

    def lines(self) -> list[str]:
        """Return the spreads and sentences as text."""
        shown = [
            f"{s.name} {s.low:.{s.decimals}f} / {s.median:.{s.decimals}f} / {s.high:.{s.decimals}f} {s.unit}"
            for s in self.spreads
        ]
        return [f"min / median / max of {self.count} ranks: {', '.join(shown)}", *self.stragglers]


def cards_of(recent: Iterable[Event]) -> Cards | None:
    """Return the readings of the newest step events; None if they are those of a single rank."""
    columns = [section(event, "ranks") for event in recent][-_LINES:]
    if not columns or not columns[-1]:
        return None
    count = _count(columns[-1])
    if not 1 < count <= _MOST_RANKS:
        return None
    alike = [column for column in columns if _count(column) == count]  # a resumed run may have other ranks
    values = {key: _medians([_numbers(column, key, count) for column in alike], count) for key, *_ in _READINGS}
    spreads = [_spread(values[key], key, name, unit, digits) for key, name, unit, digits in _READINGS]
    found = [*_slowest(values), *_throttled(columns[-1], values["temperature_c"], count), *_hottest(values)]
    return Cards(count, tuple(spread for spread in spreads if spread is not None), tuple(found))


def _count(columns: Mapping[str, Any]) -> int:
    return max((len(column) for column in columns.values() if isinstance(column, list)), default=0)


def _numbers(columns: Mapping[str, Any], key: str, count: int) -> Values:
    column = columns.get(key)
    values = [finite(value) for value in column] if isinstance(column, list) else []
    return values + [None] * (count - len(values))


def _medians(lines: Sequence[Values], count: int) -> Values:
    """Return each rank's median over the log lines."""
    each = [[value for line in lines if (value := line[rank]) is not None] for rank in range(count)]
    return [statistics.median(values) if values else None for values in each]


def _known(values: Values) -> list[tuple[float, int]]:
    return [(value, rank) for rank, value in enumerate(values) if value is not None]


def _spread(values: Values, key: str, name: str, unit: str, decimals: int) -> Spread | None:
    known = _known(values)
    if not known:
        return None
    (low, low_rank), (high, high_rank) = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
    middle = statistics.median(value for value, _ in known)
    return Spread(key, name, unit, decimals, low, middle, high, low_rank, high_rank)


def _slowest(values: Mapping[str, Values]) -> list[str]:
    """Name the rank whose forward passes and waiting for data take longest, if it takes longer than the others."""
    forward, wait = values["forward_ms"], values["data_wait_ms"]
    own = [None if f is None else f + (w or 0.0) for f, w in zip(forward, wait, strict=True)]
    known = _known(own)
    if len(known) < 2:
        return []
    highest, rank = max(known)
    middle = statistics.median(value for value, _ in known)
    others = statistics.median(value for value, other in known if other != rank)
    if highest <= _SLOW * max(others, 1e-9):
        return []
    waited = wait[rank] or 0.0
    cause = ", most of it waiting for data" if waited > highest / 2 else ""
    times = f"forward passes and data take it {highest:.1f} ms a step{cause}; the median is {middle:.1f} ms"
    return [f"Rank {rank} is the slowest: {times}"]


def _throttled(columns: Mapping[str, Any], degrees: Values, count: int) -> list[str]:
    """Name the cards that are throttled for a fault, and those at their power limit if others are not."""
    column = columns.get("throttle")
    reasons = [set(text.split("+")) if isinstance(text, str) else set() for text in column or []][:count]
    faulty = [rank for rank, names in enumerate(reasons) if names & _FAULTS]
    capped = [rank for rank, names in enumerate(reasons) if "power_cap" in names]
    found = []
    if faulty:
        hot = [f"{rank} ({degrees[rank]:.0f} °C)" if degrees[rank] is not None else str(rank) for rank in faulty[:8]]
        more = f" and {len(faulty) - 8} more" if len(faulty) > 8 else ""
        found.append(f"Throttled for heat or power supply: the card of rank {', '.join(hot)}{more}")
    if 0 < len(capped) < count:
        listed = ", ".join(map(str, capped[:8])) + (f" and {len(capped) - 8} more" if len(capped) > 8 else "")
        found.append(f"At its power limit, unlike the others: the card of rank {listed}")
    return found


def _hottest(values: Mapping[str, Values]) -> list[str]:
    known = _known(values["temperature_c"])
    if len(known) < 2:
        return []
    highest, rank = max(known)
    middle = statistics.median(value for value, _ in known)
    return (
        [f"Rank {rank} has the hottest card: {highest:.0f} °C; the median is {middle:.0f}"]
        if highest - middle >= _HOT
        else []
    )
