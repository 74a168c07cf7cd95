"""Several sources in given proportions: which of them the n-th sample is from is a function of n alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from redline.data.index import Index

Int64s = npt.NDArray[np.int64]

_LONGEST_ROUND = 1 << 16


def whole_shares(weights: Sequence[float]) -> list[int]:
    """The weights as small whole numbers: exact when their sum allows it, else to one part in 65,536."""
    fractions = [Fraction(weight).limit_denominator(_LONGEST_ROUND) for weight in weights]
    if all(fractions) and all(math.isclose(f, w, rel_tol=1e-12) for f, w in zip(fractions, weights, strict=True)):
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * scale) for fraction in fractions]
        divisor = math.gcd(*whole)
        if sum(whole) // divisor <= _LONGEST_ROUND:
            return [share // divisor for share in whole]
    total = math.fsum(weights)
    return [max(1, round(_LONGEST_ROUND * weight / total)) for weight in weights]


def turns(shares: Sequence[int]) -> Int64s:
    """A round in which each part has its share of turns, spread so evenly that at no point it is one off.

    Tijdeman's rule (1980): among those that are due by a margin, whoever would be overdue first.
    """
    parts, period = len(shares), sum(shares)
    if parts == 1:
        return np.zeros(period, dtype=np.int64)
    margin = 2 * parts - 2
    had = [0] * parts
    order = []
    for turn in range(1, period + 1):
        due = [(turn * share - count * period) * margin for share, count in zip(shares, had, strict=True)]
        eligible = [part for part in range(parts) if due[part] >= period]
        chosen = min(eligible, key=lambda part: (Fraction(period * (margin - 1) - due[part], shares[part]), part))
        had[chosen] += 1
        order.append(chosen)
    return np.array(order, dtype=np.int64)


class MixtureIndex:
    """Takes samples from each part's own index in turn; `offsets` say where its tokens begin among those of all."""

    def __init__(self, indices: Sequence[Index], offsets: Sequence[int], weights: Sequence[float]) -> None:
        self._indices, self._offsets = list(indices), list(offsets)
        shares = whole_shares(weights)
        self._order, self._shares = turns(shares), np.array(shares, dtype=np.int64)
        is_turn = self._order == np.arange(len(shares))[:, None]
        self._before = np.cumsum(is_turn, axis=1) - is_turn  # turns that a part had earlier in the round

    def parts(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """For each sample its part, and which sample of that part it is."""
        rounds, places = np.divmod(np.asarray(samples, dtype=np.int64), len(self._order))
        parts = self._order[places]
        return parts, rounds * self._shares[parts] + self._before[parts, places]

    def starts(self, samples: Int64s) -> Int64s:
        parts, numbers = self.parts(samples)
        starts = np.empty(parts.shape, dtype=np.int64)
        for part in np.unique(parts):
            rows = parts == part
            starts[rows] = self._offsets[part] + self._indices[part].starts(numbers[rows])
        return starts
