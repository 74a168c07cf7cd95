"""Documents to pieces, and pieces to token ids by as many processes as there are cores.

Processes, not threads: turning ids into Python integers holds the interpreter's lock. They are spawned, so that they
inherit no open files and no torch threads, and they exit when the parent does, even if it is killed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from redline.data.sources import AnyDocument
from redline.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, tokenizer_from
from redline.errors import UserError

_PIECE_CHARACTERS = 1 << 20
_MAX_PIECE = 4  # times _PIECE_CHARACTERS
# A newline between two words, or a space between two. GPT-2's pre-tokenizer always splits there (a space begins the
# next word), so a long document that is cut there has the same tokens as if it were encoded as a whole.
_NEWLINE_BETWEEN_WORDS = re.compile(r"(?<=\S\n)(?=\S)")
_SPACE_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")

_BATCH_PIECES = 256
_BATCH_CHARACTERS = 1 << 20
# Starting processes takes about half a second. One process encodes less text than this in less time.
_MIN_CHARACTERS_FOR_WORKERS = 16 << 20
_BATCHES_PER_WORKER = 2  # submitted and not yet collected

Ids = npt.NDArray[np.uint32]


# ----------------------------------------------------------------------------------------------------
# Pieces: a long document is cut, so that it is never in memory as a whole.


class Piece(NamedTuple):
    split: str
    text: str
    begins: bool  # it begins a document, so an end-of-text token is written before it


def cut_pieces(documents: Iterable[tuple[str, AnyDocument]]) -> Iterator[Piece]:
    """Cut each document into pieces whose tokens are those of the whole document."""
    for split, document in documents:
        begins = True
        for text in _cut_text(document.chunks()):
            yield Piece(split, text, begins)
            begins = False


def _cut_text(chunks: Iterable[str]) -> Iterator[str]:
    """Cut the text of the chunks anew. Where depends on the text alone, not on the size of the chunks."""
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
    """Return where the piece that begins at `start` ends.

    None means that this depends on text that follows, or, of the last chunk, that the piece is the rest of the text.
    """
    earliest, latest = start + _PIECE_CHARACTERS, start + _MAX_PIECE * _PIECE_CHARACTERS
    if cut := _NEWLINE_BETWEEN_WORDS.search(text, earliest, latest + 1):
        return cut.start()
    if len(text) <= latest + 1:
        return None
    cut = _SPACE_BETWEEN_WORDS.search(text, earliest, latest + 2)
    return cut.start() if cut else latest


# ----------------------------------------------------------------------------------------------------
# Encoding.


class Encoded(NamedTuple):
    piece: Piece
    ids: Ids
    utf8_bytes: int


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """Yield every piece with its ids, in order. At most a few batches per worker are in memory."""
    batches = _batches(pieces)
    if isinstance(tokenizer, ByteTokenizer):  # encoding bytes is faster than sending them to another process
        workers = 1
    beginning, characters = [], 0
    while characters < _MIN_CHARACTERS_FOR_WORKERS and (batch := next(batches, None)):
        beginning.append(batch)
        characters += sum(len(piece.text) for piece in batch)
    if workers < 2 or characters < _MIN_CHARACTERS_FOR_WORKERS:
        for batch in itertools.chain(beginning, batches):
            yield from _join(batch, _encode(tokenizer, [piece.text for piece in batch]))
        return
    yield from _encode_in_workers(itertools.chain(beginning, batches), tokenizer, workers)


def _encode_in_workers(batches: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    definition = tokenizer.definition() if isinstance(tokenizer, LibraryTokenizer) else None
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(tokenizer.name, definition))
    submitted: deque[tuple[list[Piece], Future[_EncodedTexts]]] = deque()
    try:
        for batch in batches:
            submitted.append((batch, pool.submit(_encode_in_worker, [piece.text for piece in batch])))
            if len(submitted) > _BATCHES_PER_WORKER * workers:
                batch, future = submitted.popleft()
                yield from _join(batch, future.result())
        while submitted:
            batch, future = submitted.popleft()
            yield from _join(batch, future.result())
    except BrokenProcessPool:
        what = "a process that encodes text was killed, perhaps because the machine ran out of memory."
        raise UserError(what, fix="Try again with fewer processes (--workers 1).") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _EncodedTexts(NamedTuple):
    """Encoded texts as three flat sequences, which are sent between processes much faster than one array per text."""

    ids: Ids
    counts: list[int]
    utf8_bytes: list[int]


def _join(batch: list[Piece], texts: _EncodedTexts) -> Iterator[Encoded]:
    ends = list(itertools.accumulate(texts.counts, initial=0))
    for number, piece in enumerate(batch):
        yield Encoded(piece, texts.ids[ends[number] : ends[number + 1]], texts.utf8_bytes[number])


def _encode(tokenizer: Tokenizer, texts: list[str]) -> _EncodedTexts:
    ids = tokenizer.encode_arrays(texts)
    return _EncodedTexts(
        np.concatenate(ids), [len(some) for some in ids], [len(text.encode("utf-8")) for text in texts]
    )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) == _BATCH_PIECES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- in a worker process

_tokenizer: Tokenizer


def _start_worker(name: str, definition: str | None) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process
    _tokenizer = tokenizer_from(name, definition)


def _encode_in_worker(texts: list[str]) -> _EncodedTexts:
    return _encode(_tokenizer, texts)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
