"""The rules for what is held out for validation. Every job uses one of these; nothing else decides a split.

- document hash (`split_documents`): the hash of a document's text decides; of a small source, the end of each document.
- row (`split_rows`): a seeded hash of a row's content decides; a row with the same content is never on both sides.
- group (`split_groups`): a seeded hash of a name decides for all rows with this name, such as the questions about one
  article.
- tail (`tail_tokens`): the end of a raw token file, which has no documents or rows that could be told apart.

All of them depend on content alone (and the seed), never on order or on neighbours. A change of any rule would move
rows between training and validation in runs that are resumed: `tests/data/test_prepared_before.py` forbids it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from redline.data.sources import AnyDocument, DigestSet, Document, LongDocument, ReadStats, cut_tail
from redline.errors import UserError

if TYPE_CHECKING:  # `redline plan` calls `tail_tokens` and has to start without numpy
    import numpy as np
    import numpy.typing as npt

    UInt64s = npt.NDArray[np.uint64]
    Int64s = npt.NDArray[np.int64]

TRAIN, VAL = "train", "val"
REST = "rest"  # documents after `val_within`: for training as well, but nothing among them is held out
FEW_DOCUMENTS = 64
_TAIL_MAX_TOKENS = 1_000_000
_TAIL_MIN_TOKENS = 8_192
_SPLIT_STREAM = 1 << 16  # the number of the random stream for splits; epochs use the numbers of their sources


# ----------------------------------------------------------------------------------------------------
# Documents.


def without_duplicates(documents: Iterable[AnyDocument], stats: ReadStats, *, drop: bool) -> Iterator[AnyDocument]:
    """Count documents whose text is equal to an earlier one, byte for byte; with `drop`, leave them out."""
    seen = DigestSet()
    for document in documents:
        is_duplicate = seen.add(document.digest())
        stats.duplicates += is_duplicate
        if not (is_duplicate and drop):
            yield document


def split_documents(
    documents: Iterable[AnyDocument], val_fraction: float, *, val_within: int | None = None
) -> Iterator[tuple[str, AnyDocument]]:
    """Yield each document with its split, `train` or `val`.

    In a large collection the hash of a document's text decides. In a small one (a single file is one document) that
    could hold out nothing or nearly everything, so the end of every document is held out instead, cut at a line.

    With `val_within`, only documents that begin within so many characters are held out; later ones are `rest`. A stream
    needs this, because validation has to be complete before training begins.
    """
    if not 0 <= val_fraction < 1:
        what = f"data.val_fraction={val_fraction} is not a share."
        raise UserError(what, fix="Use a number of at least 0 and below 1, for example 0.05.")
    stream = iter(documents)
    first = list(itertools.islice(stream, FEW_DOCUMENTS))
    if len(first) < FEW_DOCUMENTS:
        cut = [_cut(document, val_fraction) for document in first]
        yield from (
            (VAL, tail) for _, tail in cut
        )  # first, so that a stream can begin to train before the rest is read
        yield from ((TRAIN if val_within is None else REST, head) for head, _ in cut)
        return
    characters, held_out = 0, set[bytes]()
    for document in itertools.chain(first, stream):
        digest = document.digest()
        if val_within is not None and characters >= val_within:
            if digest not in held_out:  # a copy of a held-out document is never trained on, however late it comes
                yield REST, document
            continue
        if is_held_out(digest, val_fraction):
            held_out.add(digest)
        yield VAL if digest in held_out else TRAIN, document
        characters += len(document.text) if isinstance(document, Document) else document.stop - document.start


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Return whether the document with this digest is held out.

    The text alone decides, so a copy of the document in this source, or in another source of many documents, is on the
    same side.
    """
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def _cut(document: AnyDocument, fraction: float) -> tuple[AnyDocument, AnyDocument]:
    if isinstance(document, LongDocument):
        return document.cut(fraction)
    head, tail = cut_tail(document.text, fraction)
    return Document(document.name, head), Document(document.name, tail)


# ----------------------------------------------------------------------------------------------------
# Rows and groups of rows.


class RowSplit(NamedTuple):
    """Positions of the rows of one source that are trained on, and of those that are held out, in their order."""

    train: Int64s
    val: Int64s


def key_of(text: str) -> int:
    """Return 64 bits that stand for the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split_rows(
    sources: Sequence[str],
    keys: Sequence[UInt64s],
    seed: int,
    fraction: float,
    *,
    dedup: bool,
    rows: Sequence[Int64s] | None = None,
) -> list[RowSplit]:
    """Split the rows of several sources by their content, which `keys` stand for.

    At least one row of each source is held out, and at least one is not. A row that is held out in one source is not
    trained on in any other. Validation has each row once; training too if `dedup`.

    A row may stand at several positions (fine-tuning may make several samples of one conversation): `rows` then has
    the number of the row at each position, and the positions of one row are kept or left out together.
    """
    import numpy as np

    held_out = np.unique(np.concatenate([_held_out_keys(some, seed, fraction) for some in keys]))
    seen = np.empty(0, dtype=np.uint64)  # keys in earlier sources
    splits = []
    for number, (source, some) in enumerate(zip(sources, keys, strict=True)):
        numbers = np.arange(len(some)) if rows is None else rows[number]
        is_held_out, is_first = np.isin(some, held_out), _is_first(some, numbers, seen)
        seen = np.union1d(seen, some)
        split = RowSplit(
            np.flatnonzero(~is_held_out & (is_first | (not dedup))), np.flatnonzero(is_held_out & is_first)
        )
        if not len(split.train):
            what = "no row is left for training: all of them are held out or repeat earlier ones."
            fix = "Give more rows, set data.val_fraction=0, or remove the source from data.source."
            raise UserError(what, where=source, fix=fix)
        splits.append(split)
    return splits


def _held_out_keys(keys: UInt64s, seed: int, fraction: float) -> UInt64s:
    """Return the keys whose seeded hash falls below `fraction`; at least one, and not all."""
    import numpy as np

    from redline.data.loader import order_keys

    distinct = np.unique(keys)
    if not fraction:
        return distinct[:0]
    chance = order_keys(seed, distinct.view(np.int64), _SPLIT_STREAM)
    count = int((chance < np.uint64(fraction * 2.0**64)).sum())
    return distinct[np.argsort(chance)][: min(max(count, 1), len(distinct) - 1)]


def _is_first(keys: UInt64s, rows: Int64s, seen: UInt64s) -> npt.NDArray[np.bool_]:
    """Return for each position whether no earlier row has the same key."""
    import numpy as np

    _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
    is_same_row: npt.NDArray[np.bool_] = rows == rows[first][kind]
    return is_same_row & ~np.isin(keys, seen)


def split_groups(
    sources: Sequence[str],
    groups: Sequence[Sequence[str]],
    texts: Sequence[Sequence[str]],
    seed: int,
    fraction: float,
) -> list[RowSplit]:
    """Split the rows of several sources so that all rows of a group are on one side.

    `groups` and `texts` have the name of the group and the text of each row. At least one group of each source is held
    out, and at least one is not. A row whose text is held out anywhere is not trained on.
    """
    import numpy as np

    held_out = [_held_out_groups(names, seed, fraction, source) for source, names in zip(sources, groups, strict=True)]
    is_val = [
        np.array([name in held for name in names], dtype=bool) for names, held in zip(groups, held_out, strict=True)
    ]
    held_out_texts = {
        some[place] for some, mask in zip(texts, is_val, strict=True) for place in np.flatnonzero(mask).tolist()
    }
    splits = []
    for some, mask in zip(texts, is_val, strict=True):
        is_read = np.array([text in held_out_texts for text in some], dtype=bool)
        splits.append(RowSplit(np.flatnonzero(~mask & ~is_read), np.flatnonzero(mask)))
    return splits


def _held_out_groups(names: Sequence[str], seed: int, fraction: float, source: str) -> set[str]:
    import numpy as np

    if not fraction:
        return set()
    distinct = set(names)
    if len(distinct) < 2:
        what = "the source has one text (or article), so none can be held out."
        raise UserError(what, where=source, fix="Give more texts, or set data.val_fraction=0.")
    keys = np.array([key_of(name) for name in distinct], dtype=np.uint64)
    held_out = set(_held_out_keys(keys, seed, fraction).tolist())
    return {name for name in distinct if key_of(name) in held_out}


# ----------------------------------------------------------------------------------------------------
# Raw token files.


def tail_tokens(tokens: int) -> int:
    """Return how many tokens are held out at the end of a raw file that comes without a validation file.

    One per cent, but between 8,192 (or a tenth of a short file) and a million.
    """
    return min(_TAIL_MAX_TOKENS, max(tokens // 100, min(_TAIL_MIN_TOKENS, tokens // 10)))
