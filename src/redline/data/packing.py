"""Documents within rows of tokens: numbers for masks, borders for variable-length attention, targets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORE = -100  # a target that adds nothing to the loss; equal to kernels.softmax_loss.IGNORE
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


def document_ids(tokens_BT: npt.NDArray[np.integer], eot: int) -> Int32s:
    """The running number of the document in its row, from 0. A document begins at its end-of-text token."""
    begun_BT = np.cumsum(tokens_BT == eot, axis=1, dtype=np.int32)
    return begun_BT - begun_BT[:, :1]


def cu_seqlens(ids_BT: Int32s) -> Int32s:
    """Where documents begin in the flattened batch, and its length: [0, …, B·T]. No document spans two rows."""
    begins_BT = np.ones(ids_BT.shape, dtype=bool)
    begins_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    return np.append(np.flatnonzero(begins_BT), ids_BT.size).astype(np.int32)


def inputs_and_targets(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Rows of T + 1 tokens → inputs [B, T] and targets [B, T]: each token is to predict the next.

    No target is ignored, with document masks or without. At a border the last token of a document predicts the
    end-of-text token, which is how a model learns to stop. That token, the first of the next document and all
    that it attends to under the mask, predicts that document's first word: how texts begin.
    """
    return rows[:, :-1], rows[:, 1:]
