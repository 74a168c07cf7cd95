"""What every rank reads of its card and of its last step, brought together on rank 0 for the log.

Each rank reads the card that it trains on, so the cards of all nodes are seen. The ranks exchange a few numbers when a
step is logged; rank 0 writes them as columns of the step event, one value for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from redline.hardware.nvml import Nvml, Reading, ThrottleWatch
from redline.training.distributed import Ranks

_TIMES = ("forward_ms", "data_wait_ms", "memory_gib")


class RankReadings:
    """Reads this rank's card, and exchanges readings with the other ranks."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self._nvml = Nvml(ranks.local_rank) if device.type == "cuda" else None
        self._watches = [ThrottleWatch() for _ in range(ranks.size)]

    def read(self) -> Reading:
        """Return the sensors of this rank's card."""
        return self._nvml.read() if self._nvml else Reading()

    def exchange(self, card: Reading, **times: float | None) -> dict[str, Any]:
        """Return the columns of the step event; every rank must call this. One process has none.

        `times` are the rank's own `forward_ms`, `data_wait_ms` and `memory_gib`.
        """
        if self.ranks.size == 1:
            self._cards = [card]
            return {}
        own = [*(times[name] for name in _TIMES), *card.numbers()]
        # A sum over tables that are zero but for one row each. NaN, for a value that is not known, stays NaN.
        table = [0.0] * (len(own) * self.ranks.size)
        begin = len(own) * self.ranks.rank
        table[begin : begin + len(own)] = [math.nan if value is None else float(value) for value in own]
        summed = self.ranks.sum(*table)
        rows = [summed[n : n + len(own)] for n in range(0, len(summed), len(own))]
        self._cards = [Reading.from_numbers(row[len(_TIMES) :]) for row in rows]
        columns: dict[str, list[Any]] = {name: [_known(row[n]) for row in rows] for n, name in enumerate(_TIMES)}
        fields = [reading.fields() for reading in self._cards]
        columns |= {name: [each[name] for each in fields] for name in fields[0]}
        return {"ranks": {name: values for name, values in columns.items() if any(v is not None for v in values)}}

    def warnings(self) -> list[str]:
        """Return the warnings about throttled cards that are due after the last `exchange`.

        Cards of which the same is due at once share one warning: all cards of a node often reach their power limit
        together.
        """
        due: dict[str, list[tuple[int, str]]] = {}
        for rank, (watch, card) in enumerate(zip(self._watches, self._cards, strict=True)):
            if found := watch.note(card):
                due.setdefault(found.kind, []).append((rank, found.text))
        if self.ranks.size == 1:
            return [text for same in due.values() for _, text in same]
        return [f"{_named([rank for rank, _ in same])}: {same[0][1]}" for same in due.values()]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({', '.join(map(str, ranks))}), the first"
