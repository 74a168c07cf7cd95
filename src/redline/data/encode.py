"""Pieces of text to ids, in order, by as many processes as there are cores.

Processes, not threads: turning ids into Python's integers holds the interpreter's lock. They are spawned, so that
nothing of the parent (open files, threads of torch) comes with them, and end with the parent, however it ends.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
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

from redline.data.splits import Piece
from redline.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, tokenizer_from
from redline.errors import UserError

_BATCH_PIECES = 256
_BATCH_CHARACTERS = 1 << 20
# Starting processes takes about half a second: less text than this is encoded sooner by one.
_WORTH_WORKERS = 16 << 20
_AHEAD = 2  # batches per worker that wait or are done

Ids = npt.NDArray[np.uint32]


class Encoded(NamedTuple):
    piece: Piece
    ids: Ids
    utf8_bytes: int


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """Every piece with its ids, in the order they came. At most a few batches per worker are in memory."""
    batches = _batches(pieces)
    if isinstance(tokenizer, ByteTokenizer):  # encoded sooner than sent to another process
        workers = 1
    beginning, characters = [], 0
    while characters < _WORTH_WORKERS and (batch := next(batches, None)):
        beginning.append(batch)
        characters += sum(len(piece.text) for piece in batch)
    if workers < 2 or characters < _WORTH_WORKERS:
        for batch in itertools.chain(beginning, batches):
            yield from _zipped(batch, _encode(tokenizer, [piece.text for piece in batch]))
        return
    yield from _by_workers(itertools.chain(beginning, batches), tokenizer, workers)


def _by_workers(batches: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    definition = tokenizer.definition() if isinstance(tokenizer, LibraryTokenizer) else None
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(tokenizer.name, definition))
    underway: deque[tuple[list[Piece], Future[_Texts]]] = deque()
    try:
        for batch in batches:
            underway.append((batch, pool.submit(_work, [piece.text for piece in batch])))
            if len(underway) > _AHEAD * workers:
                yield from _finished(*underway.popleft())
        while underway:
            yield from _finished(*underway.popleft())
    except BrokenProcessPool:
        what = "a process that encodes text was ended from outside, perhaps for want of memory."
        raise UserError(what, fix="Try again with fewer of them (--workers 1).") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Texts(NamedTuple):
    """Encoded texts, in a form that travels between processes at once."""

    ids: Ids
    counts: list[int]
    utf8_bytes: list[int]


def _finished(batch: list[Piece], future: Future[_Texts]) -> Iterator[Encoded]:
    return _zipped(batch, future.result())


def _zipped(batch: list[Piece], texts: _Texts) -> Iterator[Encoded]:
    ends = list(itertools.accumulate(texts.counts, initial=0))
    for number, piece in enumerate(batch):
        yield Encoded(piece, texts.ids[ends[number] : ends[number + 1]], texts.utf8_bytes[number])


def _encode(tokenizer: Tokenizer, texts: list[str]) -> _Texts:
    ids = tokenizer.encode_arrays(texts)
    return _Texts(np.concatenate(ids), [len(one) for one in ids], [len(text.encode("utf-8")) for text in texts])


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


# --- in a worker

_tokenizer: Tokenizer


def _begin(name: str, definition: str | None) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    _tokenizer = tokenizer_from(name, definition)


def _work(texts: list[str]) -> _Texts:
    return _encode(_tokenizer, texts)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
