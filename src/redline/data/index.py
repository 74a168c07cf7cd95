"""The order of samples, and how samples are packed into sequences.

Which tokens the n-th sample has is a function of the seed and n alone.

The order of an epoch is a stateless pseudo-random permutation. So any sample of any epoch is computed directly, a
resumed run needs no saved state, and neither the number of ranks nor the micro-batch changes the data of a step.
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
    """Returns the first token of each sample. Samples are numbered through all epochs, without end."""

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...


def _mix(x: UInt64s) -> UInt64s:
    """Apply the finaliser of splitmix64 (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _encrypt(x: UInt64s, half_bits: int, keys: UInt64s) -> UInt64s:
    """Apply a Feistel network on 2·half_bits bits: a bijection for any round function (Luby & Rackoff 1988)."""
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> half, x & mask
    for number in range(1, _ROUNDS + 1):
        round_key = _mix(keys + np.uint64(number * _GOLDEN & _MASK))
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << half) | right


def permute(i: npt.NDArray[np.int64], n: int, key: int | UInt64s) -> npt.NDArray[np.int64]:
    """Return where a permutation of range(n) maps each i; `key` selects it, for all i or for each of them.

    The network permutes range(m), where m is the next power of four. A value outside range(n) is mapped again until it
    is inside (cycle walking). The result is still a bijection, and takes fewer than four rounds on average.
    """
    if n < 1 or (np.size(i) and (np.min(i) < 0 or np.max(i) >= n)):
        raise ValueError(f"positions must lie in range({n})")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    # 1-d arrays throughout: the unsigned overflow is intended, and numpy warns about it for scalars only.
    values = np.array(i, dtype=np.uint64, ndmin=1)
    keys = np.broadcast_to(key if isinstance(key, np.ndarray) else np.uint64(key & _MASK), values.shape)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _encrypt(values[outside], half_bits, keys[outside])
        outside = values >= np.uint64(n)
    return values.astype(np.int64).reshape(np.shape(i))


def order_keys(seed: int, epochs: npt.NDArray[np.int64], group: int = 0) -> UInt64s:
    """Return a key for `permute` for each epoch. Each group (a shard, a source, a purpose) has keys of its own."""
    origin = _mix(np.array([(seed + (group << 32)) & _MASK], dtype=np.uint64))
    return _mix(np.atleast_1d(epochs).astype(np.uint64) * np.uint64(_GOLDEN) + origin)


class PassIndex:
    """The order of the `size` items of one source: pass after pass, each in another seeded order."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self.seed, self.shuffle, self._size = seed, shuffle, size

    def __len__(self) -> int:
        """Return the number of items per pass."""
        return self._size

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the item of each sample. Samples are numbered through all passes, without end."""
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError("sample numbers are not negative")
        passes, positions = np.divmod(samples, self._size)
        if self.shuffle:
            positions = permute(positions, self._size, order_keys(self.seed, passes))
        return positions


class WindowIndex:
    """The order of the windows of seq_len + 1 tokens, shuffled anew in each epoch.

    A window's last token is also the first of the next one, so every token after the first is a target once.
    """

    def __init__(self, tokens: int, seq_len: int, seed: int, shuffle: bool = True) -> None:
        self.seq_len = seq_len
        windows = max(0, tokens - 1) // seq_len
        if not windows:
            raise UserError(
                f"the data has {tokens} tokens, less than one sequence of {seq_len + 1}.",
                fix="Give more data" + (f", or set data.seq_len to at most {tokens - 1}." if tokens > 1 else "."),
            )
        self._passes = PassIndex(windows, seed, shuffle)

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return len(self._passes)

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first token of each sample's window. Samples are numbered through all epochs, without end."""
        return self._passes.starts(samples) * self.seq_len


# ----------------------------------------------------------------------------------------------------
# Sequence packing: which samples share a sequence, where documents begin in a batch, and the targets of a batch.


IGNORE = -100  # a target without loss; the same number as IGNORE in redline.kernels
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


def document_ids(tokens_BT: npt.NDArray[np.integer], eot: int) -> Int32s:
    """Return for each token the number of its document in its row, from 0. Its end-of-text token begins a document."""
    started_BT = np.cumsum(tokens_BT == eot, axis=1, dtype=np.int32)
    return started_BT - started_BT[:, :1]


def cu_seqlens(ids_BT: Int32s) -> Int32s:
    """Return where documents begin in the flattened batch, and its length: [0, …, B·T]. No document spans two rows."""
    is_start_BT = np.ones(ids_BT.shape, dtype=bool)
    is_start_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    return np.append(np.flatnonzero(is_start_BT), ids_BT.size).astype(np.int32)


def inputs_and_targets(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Split rows of T + 1 tokens into inputs [B, T] and targets [B, T]: each token predicts the next one.

    No target is ignored, with document masks or without. The last token of a document predicts the end-of-text token,
    from which a model learns to stop. The end-of-text token is the first of the next document, and under the mask it
    attends to itself alone; it predicts that document's first word, from which a model learns how texts begin.
    """
    return rows[:, :-1], rows[:, 1:]


def best_fit(lengths: Int64s, capacity: int) -> Int64s:
    """Return the bin of each item: the open bin that it fills best, or a new one. Items are placed in order.

    Open bins are kept in one list per remaining space. The set bits of `nonempty` are the spaces whose list is not
    empty, so the lowest set bit at or above the item's length is the best fit, without a search over the bins.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"lengths must lie between 1 and {capacity}")
    bins = np.empty(len(lengths), dtype=np.int64)
    bins_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    nonempty, opened = 0, 0
    for item, length in enumerate(lengths.tolist()):
        if fitting := nonempty >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                nonempty ^= 1 << space
        else:
            space, chosen = capacity, opened
            opened += 1
        bins[item] = chosen
        space -= length
        if space:
            bins_by_space[space].append(chosen)
            nonempty |= 1 << space
    return bins
