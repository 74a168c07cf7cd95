from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from redline.data.loader import cu_seqlens, document_ids, inputs_and_targets

EOT = 0
ROWS = np.array([[5, 6, EOT, 7, 8], [EOT, 9, EOT, EOT, 4]])


def test_documents_begin_at_their_end_of_text_token() -> None:
    assert document_ids(ROWS, EOT).tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 2, 2]]
    assert document_ids(ROWS, EOT).dtype == np.int32


def test_borders_of_documents_and_rows() -> None:
    borders = cu_seqlens(document_ids(ROWS, EOT))
    assert borders.tolist() == [0, 2, 5, 7, 8, 10]
    assert borders.dtype == np.int32


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 12)), elements=st.integers(0, 3)))
def test_segments_are_the_runs_of_one_document_in_one_row(rows: np.ndarray) -> None:
    ids, (B, T) = document_ids(rows, EOT), rows.shape
    borders = cu_seqlens(ids)
    assert borders[0] == 0
    assert borders[-1] == B * T
    for begin, end in pairwise(borders.tolist()):
        segment = rows.reshape(-1)[begin:end]
        assert begin < end
        assert begin // T == (end - 1) // T, "a segment lies within a row"
        assert EOT not in segment[1:], "a new document begins a new segment"
        assert begin % T == 0 or segment[0] == EOT


def test_every_token_predicts_the_next_across_borders_too() -> None:
    inputs, targets = inputs_and_targets(ROWS)
    assert inputs.tolist() == [[5, 6, EOT, 7], [EOT, 9, EOT, EOT]]
    assert targets.tolist() == [[6, EOT, 7, 8], [9, EOT, EOT, 4]]
