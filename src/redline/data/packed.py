"""Samples in sequences of one length: which of them share a sequence, in which order sequences come, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.data.answer_store import AnswerStore
from redline.data.index import order_keys, permute

IGNORE = -100  # kernels.cross_entropy.IGNORE: such a target is not learnt

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Members:
    """Samples of several stores, each from its beginning and perhaps not to its end."""

    stores: tuple[AnswerStore, ...]
    part: Int64s  # which store
    number: Int64s  # which of its samples
    length: Int64s  # how many of its tokens

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, place: int) -> tuple[Int32s, Bools]:
        """Tokens, and which of them are learnt."""
        store = self.stores[self.part[place]]
        begin = int(store.offsets[self.number[place]])
        end = begin + int(self.length[place])
        return store.tokens[begin:end], store.learnt[begin:end]

    def take(self, places: Int64s) -> Members:
        return Members(self.stores, self.part[places], self.number[places], self.length[places])

    @property
    def keys(self) -> list[int]:
        """One key per distinct row; rows that say the same have the same key."""
        every = [store.keys[self.number[self.part == part]] for part, store in enumerate(self.stores)]
        return [int(key) for key in np.unique(np.concatenate(every))]

    @property
    def learnt(self) -> int:
        """How many tokens of them are learnt."""
        return int(self._learnt().sum())

    def targets(self) -> Int64s:
        """How many targets each has: a sample's first token is nobody's."""
        first = np.zeros(len(self), dtype=np.int64)
        for part, store in enumerate(self.stores):
            own = self.part == part
            first[own] = store.learnt[store.offsets[self.number[own]]]
        return self._learnt() - first

    def _learnt(self) -> Int64s:
        found = np.zeros(len(self), dtype=np.int64)
        for part, store in enumerate(self.stores):
            own = np.flatnonzero(self.part == part)
            number, length = self.number[own], self.length[own]
            whole = store.lengths[number] == length
            found[own[whole]] = store.count[number[whole]]
            cut = zip(own[~whole], store.offsets[number[~whole]], length[~whole], strict=True)
            for place, begin, size in cut:
                found[place] = int(store.learnt[begin : begin + size].sum())
        return found


def joined(some: Sequence[Members]) -> Members:
    """All of them, one after the other; they are of the same stores."""
    columns = [np.concatenate([getattr(one, name) for one in some]) for name in ("part", "number", "length")]
    return Members(some[0].stores, *columns)


class PackedSplit:
    """Sequences of `seq_len` tokens. What no sample fills is padding: a document of its own that teaches nothing."""

    def __init__(self, members: Members, borders: Int64s, seq_len: int, pad: int) -> None:
        self.samples, self.seq_len, self.pad = members, seq_len, pad
        self.borders = borders  # sequence n has the samples from borders[n] to borders[n + 1]

    def __len__(self) -> int:
        return len(self.borders) - 1

    @property
    def fill(self) -> float:
        """The share of all positions that hold a token of a sample."""
        return int(self.samples.length.sum()) / (len(self) * self.seq_len)

    def means(self, numbers: Int64s, *, pack: bool) -> dict[str, Any]:
        """Over these sequences: the share of positions that have a target, and the mean length of the document that a
        position stands in; padding is a document of its own. Without `pack`, a row is one document."""
        lengths, ends = self.samples.length, np.cumsum(self.samples.length)
        squares = np.concatenate([[0], np.cumsum(lengths**2)])
        targets = np.concatenate([[0], np.cumsum(self.samples.targets())])
        first, last = self.borders[numbers], self.borders[numbers + 1]
        filled = np.concatenate([[0], ends])
        padding = self.seq_len - (filled[last] - filled[first])
        positions = len(numbers) * self.seq_len
        squared = int((squares[last] - squares[first] + padding**2).sum())
        found = {"scored": int((targets[last] - targets[first]).sum()) / positions}
        return found | ({"document": squared / positions} if pack else {})

    def rows(self, numbers: Int64s) -> dict[str, npt.NDArray[np.integer]]:
        """`inputs` and `targets` [n, seq_len], the running number of the sample and the position in it."""
        shape = (len(numbers), self.seq_len)
        inputs_BT = np.full(shape, self.pad, dtype=np.int64)
        targets_BT = np.full(shape, IGNORE, dtype=np.int64)
        documents_BT, positions_BT = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        count_T = np.arange(self.seq_len, dtype=np.int32)
        for row, number in enumerate(np.asarray(numbers).tolist()):
            at = 0
            places = range(int(self.borders[number]), int(self.borders[number + 1]))
            for document, place in enumerate(places):
                tokens, learnt = self.samples[place]
                end = at + len(tokens)
                inputs_BT[row, at:end] = tokens
                targets_BT[row, at : end - 1] = np.where(learnt[1:], tokens[1:], IGNORE)
                documents_BT[row, at:end] = document
                positions_BT[row, at:end] = count_T[: end - at]
                at = end
            documents_BT[row, at:] = len(places)
            positions_BT[row, at:] = count_T[: self.seq_len - at]
        return {"inputs": inputs_BT, "targets": targets_BT, "documents": documents_BT, "positions": positions_BT}


def packed(members: Members, seq_len: int, *, pack: bool, seed: int | None, group: int) -> tuple[Members, Int64s]:
    """The samples in the order of their sequences, and where each sequence begins. Without `seed`: not shuffled."""
    count = len(members)
    order = np.arange(count, dtype=np.int64)
    if seed is not None:
        order = permute(order, count, int(order_keys(seed, np.zeros(1, dtype=np.int64), group)[0]))
    shuffled = members.take(order)
    if not pack:
        return shuffled, np.arange(count + 1, dtype=np.int64)
    bins = best_fit(shuffled.length, seq_len)
    borders = np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64)
    return shuffled.take(np.argsort(bins, kind="stable")), borders


def best_fit(lengths: Int64s, room: int) -> Int64s:
    """Which bin each item goes to, in their order: the one that it fills best, or a new one.

    Open bins lie in piles by the room they have left, and the bits of one whole number say which piles are not empty:
    the lowest bit at or above a length is the pile to take from, without a search.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= room:
        raise ValueError(f"lengths must lie between 1 and {room}")
    bins = np.empty(len(lengths), dtype=np.int64)
    piles: list[list[int]] = [[] for _ in range(room + 1)]
    filled, opened = 0, 0
    for item, length in enumerate(lengths.tolist()):
        if fitting := filled >> length:
            left = length + (fitting & -fitting).bit_length() - 1
            chosen = piles[left].pop()
            if not piles[left]:
                filled ^= 1 << left
        else:
            left, chosen = room, opened
            opened += 1
        bins[item] = chosen
        left -= length
        if left:
            piles[left].append(chosen)
            filled |= 1 << left
    return bins
