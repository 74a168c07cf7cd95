"""The order of samples from several sources: the source of the n-th sample, and its row or window there.

There are two rules, the same for every job (docs/decisions/0025-what-a-weight-means.md):

- No source has a weight: an epoch has every row (or window) once, or `repeat` times, in one shuffle (`EpochIndex`).
- A source has a weight: weights are shares of the samples. Each source is read in passes of its own, and its samples
  are spread evenly (`MixtureIndex`). An epoch has as many samples as all sources have rows.

Everything is a function of the seed and the sample number, so a resumed run needs no saved state.
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

_MAX_ROUND = 1 << 16
_SAMPLED_ROWS = 1 << 16  # the means of a longer epoch are taken over so many of its rows
_SEED_STEP = 1_000_003  # the distance between the seeds of two sources


class RowIndex(Protocol):
    """Returns the row of each sample. Samples count through all epochs, without end."""

    def __len__(self) -> int: ...

    def sequences(self, samples: Int64s) -> Int64s: ...


def stated_weights(parts: Sequence[Part]) -> list[float] | None:
    """Return the weights of the sources, or None if no source has one. If any source has one, the default is 1.

    The weight of a single source has no effect, so it counts as none.
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
    """Return the rows of an epoch, each as often as it occurs; of a long epoch, evenly spaced rows."""
    count = min(len(index), _SAMPLED_ROWS)
    return index.sequences(np.arange(count, dtype=np.int64) * len(index) // count)


def row_mixture_key(parts: Sequence[Part]) -> list[Any]:
    """Return what the fingerprint of a job that reads rows must contain about the mixture.

    Without weights these are plain numbers, as in older releases, where `weight` meant what `repeat` means now: a run
    of that time must have the same fingerprint as its lock when it is resumed.
    """
    weights = stated_weights(parts)
    return list(_repeats(parts)) if weights is None else [["share", weight] for weight in weights]


def window_mixture_key(parts: Sequence[Part]) -> list[Any]:
    """Return what the fingerprint of a job that reads windows must contain about the mixture.

    Weights are plain numbers, as in older releases, in which they were always shares.
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
    """Return where each source begins when all are concatenated."""
    return [sum(sizes[:number]) for number in range(len(sizes))]


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights as small whole numbers: exactly if their sum allows it, otherwise to one part in 65,536."""
    fractions = [Fraction(weight).limit_denominator(_MAX_ROUND) for weight in weights]
    if all(fractions) and all(math.isclose(f, w, rel_tol=1e-12) for f, w in zip(fractions, weights, strict=True)):
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * scale) for fraction in fractions]
        divisor = math.gcd(*whole)
        if sum(whole) // divisor <= _MAX_ROUND:
            return [share // divisor for share in whole]
    total = math.fsum(weights)
    return [max(1, round(_MAX_ROUND * weight / total)) for weight in weights]


def turns(shares: Sequence[int]) -> Int64s:
    """Return a round in which each source has its share of turns, never more than one turn ahead or behind.

    This is Tijdeman's rule (1980): of the sources that are due by a margin, take the one with the earliest deadline.
    """
    parts, period = len(shares), sum(shares)
    if parts == 1:
        return np.zeros(period, dtype=np.int64)
    margin = 2 * parts - 2
    taken = [0] * parts
    order = []
    for turn in range(1, period + 1):
        due = [(turn * share - count * period) * margin for share, count in zip(shares, taken, strict=True)]
        eligible = [part for part in range(parts) if due[part] >= period]
        chosen = min(eligible, key=lambda part: (Fraction(period * (margin - 1) - due[part], shares[part]), part))
        taken[chosen] += 1
        order.append(chosen)
    return np.array(order, dtype=np.int64)


class MixtureIndex:
    """Takes samples from the index of each source in turn. `offsets` has the first token of each source."""

    def __init__(self, indices: Sequence[Index], offsets: Sequence[int], weights: Sequence[float]) -> None:
        self._indices, self._offsets = list(indices), list(offsets)
        shares = whole_shares(weights)
        self._order, self._shares = turns(shares), np.array(shares, dtype=np.int64)
        is_turn = self._order == np.arange(len(shares))[:, None]
        self._before = np.cumsum(is_turn, axis=1) - is_turn  # turns of the source earlier in the round

    def parts(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return for each sample its source, and the number of the sample within that source."""
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
    """The order of rows of several sources, in shares that follow from their weights.

    An epoch has as many samples as all sources have rows. So a source with a large share is read more than once in an
    epoch, and one with a small share only in part; the next epoch continues its pass where this one ended.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self._rows = sum(sizes)
        passes = [PassIndex(size, seed + _SEED_STEP * number, shuffle) for number, size in enumerate(sizes)]
        self._mixture = MixtureIndex(passes, _firsts(sizes), weights)

    def __len__(self) -> int:
        """Return the number of rows per epoch."""
        return self._rows

    def sequences(self, samples: Int64s) -> Int64s:
        return self._mixture.starts(samples)


class EpochIndex:
    """The order of sequences of several sources without weights.

    Of a source with n sequences and the repeat w, an epoch reads w·n, rounded, and at least one. The source's own
    seeded order continues from epoch to epoch, and begins again after its last sequence; so with a repeat below 1 each
    epoch reads other sequences. Within an epoch all sources are shuffled together.
    """

    def __init__(self, sizes: Sequence[int], repeats: Sequence[float], seed: int, shuffle: bool = True) -> None:
        self.seed, self.shuffle = seed, shuffle
        self._sizes = np.array(sizes, dtype=np.int64)
        self._per_epoch = np.maximum(1, np.rint(np.array(repeats) * self._sizes)).astype(np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes  # the first sequence of each source
        self._ends = np.cumsum(self._per_epoch)

    def __len__(self) -> int:
        """Return the number of sequences per epoch."""
        return int(self._ends[-1])

    def sequences(self, samples: Int64s) -> Int64s:
        """Return the sequence of each sample. Samples are numbered through all epochs, without end."""
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError("sample numbers are not negative")
        epochs, places = np.divmod(samples, len(self))
        if self.shuffle:
            places = permute(places, len(self), order_keys(self.seed, epochs))
        parts = np.searchsorted(self._ends, places, side="right")
        turns = epochs * self._per_epoch[parts] + places - (self._ends - self._per_epoch)[parts]
        rounds, within = np.divmod(turns, self._sizes[parts])
        if self.shuffle:
            for part in np.unique(parts):
                own = parts == part
                keys = order_keys(self.seed, rounds[own], group=int(part) + 1)
                within[own] = permute(within[own], int(self._sizes[part]), keys)
        return self._first[parts] + within


class UnionIndex:
    """The order of windows of several sources without weights."""

    def __init__(self, epochs: EpochIndex, windows: Sequence[int], offsets: Sequence[int], seq_len: int) -> None:
        self._epochs, self._seq_len = epochs, seq_len
        self._ends = np.cumsum(np.array(windows, dtype=np.int64))
        self._first = self._ends - np.array(windows, dtype=np.int64)
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return len(self._epochs)

    def starts(self, samples: Int64s) -> Int64s:
        windows = self._epochs.sequences(samples)
        parts = np.searchsorted(self._ends, windows, side="right")
        return self._offsets[parts] + (windows - self._first[parts]) * self._seq_len
