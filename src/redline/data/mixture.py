"""Several sources: which of them the n-th sample is from, and which of its rows or windows.

Two rules, the same for every job (docs/decisions/0025-what-a-weight-means.md):

- No source states a weight: an epoch has every row (or window) once, or `repeat` times, in one shuffle (`EpochIndex`).
- A source states a weight: weights are shares of the samples. Each source is read in passes of its own, and the turns
  are spread evenly (`MixtureIndex`). An epoch is as many samples as the sources hold rows together.

All of it is a function of (seed, sample number), so that a resumed run needs no saved state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from redline.data.index import Index, PassIndex, WindowIndex, order_keys, permute
from redline.errors import UserError
from redline.recipe.schema import Part

Int64s = npt.NDArray[np.int64]

_LONGEST_ROUND = 1 << 16
_SAMPLED = 1 << 16  # rows whose means stand for those of a long epoch
_SEED_STEP = 1_000_003  # between the seeds of two sources of a weighted mixture


class RowIndex(Protocol):
    """Returns the row of each sample. Samples count through all epochs, without end."""

    def __len__(self) -> int: ...

    def sequences(self, samples: Int64s) -> Int64s: ...


def stated_weights(parts: Sequence[Part]) -> list[float] | None:
    """Return the sources' weights, or None if no source states one. Beside stated weights an unstated one is 1.

    The weight of a single source is no weight: its share is everything.
    """
    if len(parts) == 1 or all(part.weight is None for part in parts):
        return None
    return [1.0 if part.weight is None else part.weight for part in parts]


def shares_of(sizes: Sequence[int], parts: Sequence[Part]) -> list[float]:
    """Return each source's share of the samples; `sizes` are the rows or windows of each."""
    weights = stated_weights(parts)
    amounts = weights or [size * repeat for size, repeat in zip(sizes, _repeats(parts), strict=True)]
    total = math.fsum(amounts)
    return [amount / total for amount in amounts]


def epoch_sample(index: RowIndex) -> Int64s:
    """Return the rows of an epoch, each as often as it comes; of a long epoch, evenly spread ones."""
    count = min(len(index), _SAMPLED)
    return index.sequences(np.arange(count, dtype=np.int64) * len(index) // count)


def row_mixture_key(parts: Sequence[Part]) -> list[Any]:
    """Return what the fingerprint of a job that reads rows must name of the mixture.

    Without weights these are plain numbers, as in runs that were begun when `weight` meant what `repeat` means now:
    such a run must find the fingerprint in its lock again.
    """
    weights = stated_weights(parts)
    return list(_repeats(parts)) if weights is None else [["share", weight] for weight in weights]


def window_mixture_key(parts: Sequence[Part]) -> list[Any]:
    """Return what the fingerprint of a job that reads windows must name of the mixture.

    Weights are plain numbers, as in older runs, in which they have always been shares.
    """
    weights = stated_weights(parts)
    return [["repeat", repeat] for repeat in _repeats(parts)] if weights is None else list(weights)


def row_index(sizes: Sequence[int], parts: Sequence[Part], seed: int, *, shuffle: bool) -> RowIndex:
    """Return the order of training for a job whose samples are rows; `sizes` are the rows of each source."""
    weights = stated_weights(parts)
    if weights is None:
        return EpochIndex(sizes, _repeats(parts), seed, shuffle)
    return ShareIndex(sizes, weights, seed, shuffle)


def window_index(sizes: Sequence[int], parts: Sequence[Part], seq_len: int, seed: int, *, shuffle: bool) -> Index:
    """Return the order of training for a job whose samples are windows; `sizes` are the tokens of each source."""
    indices = []
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        try:
            indices.append(WindowIndex(size, seq_len, seed + _SEED_STEP * number, shuffle))
        except UserError as error:
            raise UserError(error.what, where=part.source, fix=error.fix) from None
    if len(parts) == 1 and parts[0].repeat is None:
        return indices[0]
    offsets = _firsts(sizes)
    weights = stated_weights(parts)
    if weights is not None:
        return MixtureIndex(indices, offsets, weights)
    windows = [len(index) for index in indices]
    return UnionIndex(EpochIndex(windows, _repeats(parts), seed, shuffle), windows, offsets, seq_len)


def _repeats(parts: Sequence[Part]) -> list[float]:
    return [part.reads_per_epoch for part in parts]


def _firsts(sizes: Sequence[int]) -> list[int]:
    """Return where each source begins when all are laid end to end."""
    return [sum(sizes[:number]) for number in range(len(sizes))]


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


class ShareIndex:
    """Rows of several sources in the shares that their weights state.

    An epoch has as many samples as the sources have rows together, so a source with a large share is read more than
    once in it and one with a small share only in part; its next pass goes on where the epoch ended.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self._rows = sum(sizes)
        passes = [PassIndex(size, seed + _SEED_STEP * number, shuffle) for number, size in enumerate(sizes)]
        self._mixture = MixtureIndex(passes, _firsts(sizes), weights)

    def __len__(self) -> int:
        """Rows per epoch."""
        return self._rows

    def sequences(self, samples: Int64s) -> Int64s:
        return self._mixture.starts(samples)


class EpochIndex:
    """Which sequence the n-th sample of training is: a function of (seed, n) and of nothing else.

    An epoch reads w·n sequences of a source that has n and the repeat w (to the nearest whole number, and at least
    one). The source's own seeded order continues from epoch to epoch and starts again after the last sequence, so
    that with a repeat below 1 each epoch reads other sequences. Within an epoch all sources are shuffled together.
    """

    def __init__(self, sizes: Sequence[int], repeats: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.seed, self.shuffle = seed, shuffle
        self._sizes = np.array(sizes, dtype=np.int64)
        self._given = np.maximum(1, np.rint(np.array(repeats) * self._sizes)).astype(np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes  # of each part's sequences among all
        self._ends = np.cumsum(self._given)

    def __len__(self) -> int:
        """Sequences per epoch."""
        return int(self._ends[-1])

    def sequences(self, samples: Int64s) -> Int64s:
        """Sample numbers count through all epochs, without end."""
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError("sample numbers are not negative")
        epochs, places = np.divmod(samples, len(self))
        if self.shuffle:
            places = permute(places, len(self), order_keys(self.seed, epochs))
        parts = np.searchsorted(self._ends, places, side="right")
        turns = epochs * self._given[parts] + places - (self._ends - self._given)[parts]
        rounds, within = np.divmod(turns, self._sizes[parts])
        if self.shuffle:
            for part in np.unique(parts):
                own = parts == part
                keys = order_keys(self.seed, rounds[own], group=int(part) + 1)
                within[own] = permute(within[own], int(self._sizes[part]), keys)
        return self._first[parts] + within


class UnionIndex:
    """Windows of several sources, each `repeat` times an epoch, as the first tokens of the windows."""

    def __init__(self, epochs: EpochIndex, windows: Sequence[int], offsets: Sequence[int], seq_len: int) -> None:
        self._epochs, self._seq_len = epochs, seq_len
        self._ends = np.cumsum(np.array(windows, dtype=np.int64))
        self._first = self._ends - np.array(windows, dtype=np.int64)
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        """Windows per epoch."""
        return len(self._epochs)

    def starts(self, samples: Int64s) -> Int64s:
        windows = self._epochs.sequences(samples)
        parts = np.searchsorted(self._ends, windows, side="right")
        return self._offsets[parts] + (windows - self._first[parts]) * self._seq_len
