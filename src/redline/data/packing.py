"""Sequence packing: which samples share a sequence, where documents begin in a batch, and the targets of a batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
