"""Which tokens a sample is made of: a function of (seed, sample number) and of nothing else.

The order of an epoch is a stateless pseudo-random permutation, so any sample of any epoch is found at once,
a resumed run needs no saved state, and neither ranks nor micro-batches can change what is learned from.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from redline.errors import UserError

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

UInt64s = npt.NDArray[np.uint64]


class Index(Protocol):
    """Says where the n-th sample begins; samples count through all epochs, without end."""

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...


def _mix(x: UInt64s) -> UInt64s:
    """The finaliser of splitmix64 (Steele et al. 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _encrypt(x: UInt64s, half_bits: int, keys: UInt64s) -> UInt64s:
    """A Feistel network on 2·half_bits bits: a bijection whatever the round function (Luby & Rackoff 1988)."""
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> half, x & mask
    for number in range(1, _ROUNDS + 1):
        round_key = _mix(keys + np.uint64(number * _GOLDEN & _MASK))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << half) | right


def permute(i: npt.NDArray[np.int64], n: int, key: int | UInt64s) -> npt.NDArray[np.int64]:
    """Where a permutation of range(n) sends each i; `key` chooses the permutation (one, or one for each i).

    The network permutes the next power of four; a value outside the range is sent on until it falls inside
    (cycle walking), which keeps the map a bijection and takes under four rounds on average.
    """
    if n < 1 or (np.size(i) and (np.min(i) < 0 or np.max(i) >= n)):
        raise ValueError(f"positions must lie in range({n})")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    # 1-d arrays throughout: numpy warns about unsigned overflow, which is meant here, for scalars alone.
    values = np.array(i, dtype=np.uint64, ndmin=1)
    keys = np.broadcast_to(key if isinstance(key, np.ndarray) else np.uint64(key & _MASK), values.shape)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _encrypt(values[outside], half_bits, keys[outside])
        outside = values >= np.uint64(n)
    return values.astype(np.int64).reshape(np.shape(i))


def order_keys(seed: int, epochs: npt.NDArray[np.int64], group: int = 0) -> UInt64s:
    """A key for `permute` for each epoch, of this seed; groups of windows that are ordered apart have their own."""
    origin = _mix(np.array([(seed + (group << 32)) & _MASK], dtype=np.uint64))
    return _mix(np.atleast_1d(epochs).astype(np.uint64) * np.uint64(_GOLDEN) + origin)


class PassIndex:
    """Reads the `size` items of one source again and again, in another seeded order in each pass."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self.seed, self.shuffle, self._size = seed, shuffle, size

    def __len__(self) -> int:
        """Items per pass."""
        return self._size

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return which item each sample is. Sample numbers count through all passes, without end."""
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError("sample numbers are not negative")
        passes, positions = np.divmod(samples, self._size)
        if self.shuffle:
            positions = permute(positions, self._size, order_keys(self.seed, passes))
        return positions


class WindowIndex:
    """Cuts `tokens` into windows of seq_len + 1 that share their border token, and orders them anew each epoch."""

    def __init__(self, tokens: int, seq_len: int, seed: int, shuffle: bool = True) -> None:
        self.seq_len = seq_len
        windows = max(0, tokens - 1) // seq_len
        if not windows:
            raise UserError(
                f"the data hold {tokens} tokens, less than one sequence of {seq_len + 1}.",
                fix="Give more data" + (f", or set data.seq_len to at most {tokens - 1}." if tokens > 1 else "."),
            )
        self._passes = PassIndex(windows, seed, shuffle)

    def __len__(self) -> int:
        """Windows per epoch."""
        return len(self._passes)

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first token of each sample's window. Sample numbers count through all epochs, without end."""
        return self._passes.starts(samples) * self.seq_len
