"""Which documents are held out, which are dropped, and how long ones are cut into pieces that encode alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from redline.data.read_stats import Seen, Tally
from redline.data.sources import AnyDocument
from redline.data.text import Document, LongDocument, cut_tail, is_validation
from redline.errors import UserError

TRAIN, VAL = "train", "val"
REST = "rest"  # to train on as well, and from here on nothing more is held out
FEW_DOCUMENTS = 64
_PIECE_CHARACTERS = 1 << 20
_LONGEST_PIECE = 4
# A newline between two words, or a space between two. GPT-2's pre-tokenizer always splits there (a space begins
# the next word), so cutting a long document at one leaves its tokens as they would be in one go.
_QUIET_NEWLINE = re.compile(r"(?<=\S\n)(?=\S)")
_QUIET_SPACE = re.compile(r"(?<=\S)(?= \S)")


class Piece(NamedTuple):
    split: str
    text: str
    begins: bool  # a document: the end-of-text token goes before it


def without_duplicates(documents: Iterable[AnyDocument], tally: Tally, *, drop: bool) -> Iterator[AnyDocument]:
    """Counts documents whose text came before, byte for byte, and leaves them out if that is wanted."""
    seen = Seen()
    for document in documents:
        again = seen.add(document.digest())
        tally.duplicates += again
        if not (again and drop):
            yield document


def split_documents(
    documents: Iterable[AnyDocument], val_fraction: float, *, val_within: int | None = None
) -> Iterator[tuple[str, AnyDocument]]:
    """Each document with its split, `train` or `val`.

    In a large collection the hash of its text decides. Of a small one (a single file is one document) that could
    hold out nothing, or nearly all: there the end of every document is held out, cut at a line.
    With `val_within` only documents that begin within so many characters are held out; later ones are the `rest`.
    """
    if not 0 <= val_fraction < 1:
        raise UserError(f"{val_fraction} is not a fraction for validation.", fix="Give one of at least 0 and below 1.")
    stream = iter(documents)
    first = list(itertools.islice(stream, FEW_DOCUMENTS))
    if len(first) < FEW_DOCUMENTS:
        cut = [_cut(document, val_fraction) for document in first]
        yield from ((VAL, tail) for _, tail in cut)  # first, so that a run may begin before the rest is read
        yield from ((TRAIN if val_within is None else REST, head) for head, _ in cut)
        return
    met, held_out = 0, set[bytes]()
    for document in itertools.chain(first, stream):
        digest = document.digest()
        if val_within is not None and met >= val_within:
            if digest not in held_out:  # a copy of what is held out is not trained on, however late it comes
                yield REST, document
            continue
        if is_validation(digest, val_fraction):
            held_out.add(digest)
        yield VAL if digest in held_out else TRAIN, document
        met += len(document.text) if isinstance(document, Document) else document.stop - document.start


def _cut(document: AnyDocument, fraction: float) -> tuple[AnyDocument, AnyDocument]:
    if isinstance(document, LongDocument):
        return document.cut(fraction)
    head, tail = cut_tail(document.text, fraction)
    return Document(document.name, head), Document(document.name, tail)


def cut_pieces(documents: Iterable[tuple[str, AnyDocument]]) -> Iterator[Piece]:
    for split, document in documents:
        begins = True
        for text in _pieces(document.chunks()):
            yield Piece(split, text, begins)
            begins = False


def _pieces(chunks: Iterable[str]) -> Iterator[str]:
    """The text of the chunks, cut anew: where depends on the text alone, not on how it arrived."""
    text, start = "", 0
    for chunk in chunks:
        text, start = text[start:] + chunk, 0
        while (end := _piece_end(text, start, last=False)) is not None:
            yield text[start:end]
            start = end
    while start < len(text):
        end = _piece_end(text, start, last=True) or len(text)
        yield text[start:end]
        start = end


def _piece_end(text: str, start: int, *, last: bool) -> int | None:
    """Where the piece from `start` on ends; None when that depends on text that is yet to come (or, last, on none)."""
    soonest, latest = start + _PIECE_CHARACTERS, start + _LONGEST_PIECE * _PIECE_CHARACTERS
    if quiet := _QUIET_NEWLINE.search(text, soonest, latest + 1):
        return quiet.start()
    if len(text) <= latest + 1:
        return None
    quiet = _QUIET_SPACE.search(text, soonest, latest + 2)
    return quiet.start() if quiet else latest
