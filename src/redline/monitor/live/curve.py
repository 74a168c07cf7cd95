"""Curves that stay small: of very many points the lows and the highs are kept, however long the run.

A bucket holds neighbouring points. When there are too many buckets, neighbours merge; early ones stay narrow, so that
a logarithmic axis shows the beginning too. What is kept depends on the points alone, never on when they were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MOST_BUCKETS = 1000  # of which each is drawn as two points
_PER_E = 32  # buckets while the run grows by a factor of e: narrow enough for a logarithmic axis

Value = float | None


class _Bucket:
    """Neighbouring points. `rising` says of each field whether its low came before its high."""

    __slots__ = ("count", "first", "high", "last", "low", "rising", "start")

    def __init__(self, start: int, x: Sequence[Value], values: Sequence[Value]) -> None:
        self.start, self.count = start, 1
        self.first = self.last = x
        self.low, self.high = list(values), list(values)
        self.rising = [True] * len(values)

    def add(self, x: Sequence[Value], values: Sequence[Value]) -> None:
        self.count += 1
        self.last = x
        for place, value in enumerate(values):
            if value is None:
                continue
            low, high = self.low[place], self.high[place]
            if low is None or high is None:
                self.low[place] = self.high[place] = value
            elif value < low:
                self.low[place], self.rising[place] = value, False
            elif value > high:
                self.high[place], self.rising[place] = value, True

    def absorb(self, later: _Bucket) -> None:
        self.count += later.count
        self.last = later.last
        for place, (low, high) in enumerate(zip(later.low, later.high, strict=True)):
            if low is None or high is None:
                continue
            own_low, own_high = self.low[place], self.high[place]
            if own_low is None or own_high is None:
                self.low[place], self.high[place], self.rising[place] = low, high, later.rising[place]
                continue
            lower, higher = low < own_low, high > own_high
            if lower and higher:
                self.rising[place] = later.rising[place]
            elif lower or higher:
                self.rising[place] = higher
            self.low[place], self.high[place] = min(low, own_low), max(high, own_high)

    def rows(self) -> list[tuple[Sequence[Value], list[Value]]]:
        if self.count == 1:
            return [(self.first, self.low)]
        pairs = list(zip(self.low, self.high, self.rising, strict=True))
        before = [low if rising else high for low, high, rising in pairs]
        after = [high if rising else low for low, high, rising in pairs]
        return [(self.first, before), (self.last, after)]


class Curve:
    """Fields over places (`axes`, of which the first orders the points). `rebuilt` counts changes of what was there."""

    def __init__(self, axes: Sequence[str], fields: Sequence[str], most: int = MOST_BUCKETS) -> None:
        self.axes, self.fields, self.rebuilt = tuple(axes), tuple(fields), 0
        self._most = most
        self._empty()

    def _empty(self) -> None:
        self._buckets: list[_Bucket] = []
        self._width, self._fine = 1, _PER_E
        self._points = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def clear(self) -> None:
        self._empty()
        self.rebuilt += 1

    def add(self, x: Sequence[Value], values: Sequence[Value]) -> None:
        last = self._buckets[-1] if self._buckets else None
        if last is not None and last.count < self._room(last):
            last.add(x, values)
        else:
            self._buckets.append(_Bucket(self._points, x, values))
            if len(self._buckets) > self._most:
                self._merge()
        self._points += 1

    def drop_beyond(self, limit: float) -> None:
        """Forget points after `limit`. A bucket that reaches beyond it goes whole: its lows and highs may lie there."""
        kept = [bucket for bucket in self._buckets if (bucket.last[0] or 0) <= limit]
        if len(kept) < len(self._buckets):
            self._buckets = kept
            self._points = kept[-1].start + kept[-1].count if kept else 0
            self.rebuilt += 1

    def lowest(self, field: str) -> Value:
        place = self.fields.index(field)
        return min((low for bucket in self._buckets if (low := bucket.low[place]) is not None), default=None)

    def since(self, buckets: int) -> dict[str, Any]:
        """What a reader lacks who has so many buckets; the last of those may have grown since."""
        known = max(0, min(buckets, len(self._buckets)) - 1)
        rows = [row for bucket in self._buckets[known:] for row in bucket.rows()]
        x = {name: [_short(row[0][place]) for row in rows] for place, name in enumerate(self.axes)}
        y = {name: [_short(row[1][place]) for row in rows] for place, name in enumerate(self.fields)}
        before = sum(1 if bucket.count == 1 else 2 for bucket in self._buckets[:known])
        told = {name: values for name, values in y.items() if any(value is not None for value in values)}
        return {"from": before, "buckets": len(self._buckets), "rows": len(rows), "x": x, "y": told}

    def _room(self, bucket: _Bucket) -> int:
        return max(1, min(self._width, bucket.start // self._fine if self._fine else self._width))

    def _merge(self) -> None:
        """Until a quarter is free, so that this is rare. Where the beginning alone fills it, that gets coarser, too."""
        self.rebuilt += 1
        before = 0
        while (now := len(self._buckets)) > 0.75 * self._most:
            self._width *= 2
            if now == before:
                self._fine //= 2
            before = now
            merged = [self._buckets[0]]
            for _, bucket in pairwise(self._buckets):
                if merged[-1].count + bucket.count <= self._room(merged[-1]):
                    merged[-1].absorb(bucket)
                else:
                    merged.append(bucket)
            self._buckets = merged


def _short(value: Value) -> Value:
    """Six digits are more than a screen has."""
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
