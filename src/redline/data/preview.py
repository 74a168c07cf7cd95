"""A look at documents as a model will see them: their tokens, and the text of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from redline.data.origin import Reading
from redline.data.read_stats import Tally
from redline.data.sources import source_documents
from redline.data.splits import TRAIN, cut_pieces, split_documents, without_duplicates
from redline.data.tokenizer import Tokenizer

_MOST_TOKENS = 400
_LONGEST_CHARACTER = 4  # in tokens: a character has at most so many bytes
_NO_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Span:
    """Tokens that make whole characters together: nearly always one."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Preview:
    spans: list[Span]
    tokens: int
    whole: bool  # all of the document is shown
    more: bool = False  # it is so long that only the tokens of its first million characters or so were counted

    @property
    def ids(self) -> list[int]:
        return [i for span in self.spans for i in span.ids]


def preview(
    source: str, tokenizer: Tokenizer, reading: Reading, count: int, *, most: int = _MOST_TOKENS
) -> Iterator[Preview]:
    """The beginnings of the first documents that are trained on; the first token is the end-of-text mark."""
    tally = Tally(source)
    documents = without_duplicates(source_documents(source, tally, reading.text_key), tally, drop=reading.dedup)
    pieces = cut_pieces(split_documents(documents, reading.val_fraction))
    followed = itertools.pairwise(itertools.chain(pieces, [None]))
    beginnings = ((piece, after) for piece, after in followed if piece and piece.split == TRAIN and piece.begins)
    for piece, after in itertools.islice(beginnings, count):
        ids = [tokenizer.eot, *tokenizer.encode(piece.text)]
        more = after is not None and not after.begins
        yield Preview(spans(tokenizer, ids[:most]), len(ids), len(ids) <= most and not more, more)


def spans(tokenizer: Tokenizer, ids: list[int]) -> list[Span]:
    """The text of each token; tokens that end within a character are joined with those that complete it."""
    found = []
    start = 0
    while start < len(ids):
        for end in range(start + 1, min(start + _LONGEST_CHARACTER, len(ids)) + 1):
            text = tokenizer.decode(ids[start:end])
            if not text.endswith(_NO_CHARACTER):
                break
        else:
            end, text = start + 1, tokenizer.decode(ids[start : start + 1])
        found.append(Span(text, tuple(ids[start:end])))
        start = end
    return found
