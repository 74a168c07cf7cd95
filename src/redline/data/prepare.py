"""Documents to a prepared folder of tokens, the cache of such folders, and a preview of what a model will read.

Memory does not grow with the text: documents are read and written in pieces, and eight bytes are kept of each.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from redline.cache import atomic_dir, discard_dir, explain_write_errors, read_text, write_atomically
from redline.data.sources import (
    EMBEDDED,
    SCHEMA,
    AnyDocument,
    Progress,
    ProgressCallback,
    Reading,
    ReadStats,
    holds_tokens,
    nothing_to_train_on,
    prepared_folder,
    source_bytes,
    source_documents,
)
from redline.data.splits import TRAIN, VAL, split_documents, without_duplicates
from redline.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer, tokenizer_from
from redline.data.tokens import (
    ShardWriter,
    TokenData,
    TokenFile,
    data_fingerprint,
    open_tokens,
    token_dtype,
    with_digest,
)
from redline.errors import UsageError, UserError

if TYPE_CHECKING:
    from redline.recipe.schema import Data

# ----------------------------------------------------------------------------------------------------
# Documents to pieces, and pieces to token ids by as many processes as there are cores.
#
# Processes, not threads, for much text: a part of the work holds the interpreter's lock. They are spawned, so that they
# inherit no open files and no torch threads, and they exit when the parent does, even if it is killed.


_PIECE_CHARACTERS = 1 << 20
_MAX_PIECE = 4  # times _PIECE_CHARACTERS
# A newline between two words, or a space between two. GPT-2's pre-tokenizer always splits there (a space begins the
# next word), so a long document that is cut there has the same tokens as if it were encoded as a whole.
_NEWLINE_BETWEEN_WORDS = re.compile(r"(?<=\S\n)(?=\S)")
_SPACE_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")

_BATCH_PIECES = 256
_BATCH_CHARACTERS = 1 << 20
# Starting processes takes about half a second. Threads of this process encode less text than this in less time.
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
    if workers < 2:
        for batch in itertools.chain(beginning, batches):
            yield from _join(batch, _encode(tokenizer, [piece.text for piece in batch]))
        return
    if characters < _MIN_CHARACTERS_FOR_WORKERS:
        with ThreadPoolExecutor(workers) as threads:
            encoded = threads.map(lambda batch: _encode(tokenizer, [piece.text for piece in batch]), beginning)
            for batch, texts in zip(beginning, encoded, strict=True):
                yield from _join(batch, texts)
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


SHARD_TOKENS = 100_000_000
# Words repeat, so more text than this hardly changes a trained vocabulary and takes long to read.
_TOKENIZER_BYTES = 64 << 20


# ----------------------------------------------------------------------------------------------------
# Writing a prepared folder.


def prepare(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    out: Path,
    *,
    val_fraction: float = 0.05,
    dedup: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 1,
    stats: ReadStats | None = None,
    progress: ProgressCallback | None = None,
) -> TokenData:
    """Write the prepared folder `out`, which appears complete or not at all, and open it.

    `stats` are those in which the reading of `documents` counts what it leaves out.
    """
    refuse_content(out)
    stats = stats or ReadStats(str(out))
    pieces = cut_pieces(split_documents(without_duplicates(documents, stats, drop=dedup), val_fraction))
    try:
        with ExitStack() as stack:
            with explain_write_errors(out):
                temporary = stack.enter_context(atomic_dir(out))
            meta = _write_splits(pieces, tokenizer, temporary, shard_tokens, workers, stats, progress)
            tokenizer.save(temporary / "tokenizer.json")
            write_atomically(temporary / "meta.json", json.dumps(with_digest(meta, temporary), indent=1) + "\n")
    except OSError:
        refuse_content(out)  # another process has written the folder in the meantime
        raise
    return open_tokens(out, tokenizer.fingerprint)


def _write_splits(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    folder: Path,
    shard_tokens: int,
    workers: int,
    stats: ReadStats,
    progress: ProgressCallback | None,
) -> dict[str, Any]:
    counts = {split: {"tokens": 0, "bytes": 0, "documents": 0} for split in (TRAIN, VAL)}
    written = 0

    def report(tokens: int) -> None:
        if progress:
            progress(Progress(f"preparing {stats.source}", int(stats.bytes), stats.total, tokens))

    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                ShardWriter(
                    folder,
                    split,
                    vocab_size=tokenizer.vocab_size,
                    tokenizer_fingerprint=tokenizer.fingerprint,
                    shard_tokens=shard_tokens,
                )
            )
            for split in counts
        }
        report(0)
        for piece, ids, utf8_bytes in encode_pieces(pieces, tokenizer, workers):
            writers[piece.split].append(np.concatenate([[tokenizer.eot], ids]) if piece.begins else ids)
            count_piece(counts[piece.split], piece, len(ids), utf8_bytes)
            written += len(ids) + piece.begins
            report(written)
        files = {split: writer.finish() for split, writer in writers.items()}
    if not files[TRAIN]:
        raise nothing_to_train_on(stats)
    return description(tokenizer, files, counts, stats)


def count_piece(count: dict[str, int], piece: Piece, tokens: int, utf8_bytes: int) -> None:
    """Add a piece to the counts of its split."""
    count["tokens"] += tokens + piece.begins
    count["bytes"] += utf8_bytes
    count["documents"] += piece.begins


def description(
    tokenizer: Tokenizer, files: dict[str, list[TokenFile]], counts: dict[str, dict[str, int]], stats: ReadStats
) -> dict[str, Any]:
    """Return the content of meta.json. The counts are not part of the fingerprint, because they change no token."""
    splits = {
        split: {
            "shards": [
                {"file": file.path.name, "tokens": file.tokens, "sha256": file.sha256, "max_id": file.max_id}
                for file in files[split]
            ],
            **counts[split],
        }
        for split in counts
    }
    return {
        "schema": SCHEMA,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "splits": splits,
        "counts": stats.counts(),
        "fingerprint": data_fingerprint(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eot, splits),
    }


def refuse_content(out: Path) -> None:
    """Raise UserError if `out` cannot become a new folder."""
    # A folder cannot be renamed onto `.` or onto a link.
    if not out.name or out.is_file() or out.is_symlink() or (out.is_dir() and any(out.iterdir())):
        raise UserError("the path exists and is not an empty folder.", where=str(out), fix="Choose another --out.")


# ----------------------------------------------------------------------------------------------------
# The text that a tokenizer is trained on.


def training_texts(
    sources: Sequence[str], reading: Reading, *, max_bytes: int = _TOKENIZER_BYTES, from_start: bool = False
) -> Iterator[str]:
    """Yield text to train a tokenizer on: every n-th piece that is not held out, about `max_bytes` in total.

    With `from_start`, and of a source whose size is not known, yield the first pieces instead.
    """
    sizes = [source_bytes(source) for source in sources]
    total = sum(size for size in sizes if size is not None)
    for source, size in zip(sources, sizes, strict=True):
        pieces = _training_pieces(source, reading)
        if from_start or size is None:
            yield from _first(pieces, max_bytes)
        else:
            # n follows from the bytes on disk. Of compressed files these are fewer than the bytes of text, so the
            # amount of text is limited too.
            yield from _first(itertools.islice(pieces, 0, None, max(1, -(-total // max_bytes))), 4 * max_bytes)


def _training_pieces(source: str, reading: Reading) -> Iterator[str]:
    stats = ReadStats(source)
    documents = source_documents(source, stats, reading.text_key)
    unique = without_duplicates(documents, stats, drop=reading.dedup)
    pieces = cut_pieces(split_documents(unique, reading.val_fraction))
    return (piece.text for piece in pieces if piece.split == TRAIN)


def _first(texts: Iterable[str], max_characters: int) -> Iterator[str]:
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters >= max_characters:
            return


def tokenizer_for(
    sources: Sequence[str], spec: str, reading: Reading, progress: ProgressCallback | None = None
) -> Tokenizer:
    """Return the tokenizer that `spec` names; train it on the texts of all sources if that is train:N."""

    def texts() -> Iterator[str]:
        if progress:
            progress(Progress(f"training the tokenizer {spec}", 0, None, 0))
        return training_texts(sources, reading)

    return load_tokenizer(spec, texts)


# ----------------------------------------------------------------------------------------------------
# Sources, and the cache of prepared folders.


def prepare_source(
    source: str,
    tokenizer: Tokenizer,
    out: Path,
    reading: Reading,
    *,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> TokenData:
    """Write the tokens of a source of text to the new folder `out`, and open it."""
    stats = ReadStats(source, source_bytes(source))
    return prepare(
        source_documents(source, stats, reading.text_key),
        tokenizer,
        out,
        val_fraction=reading.val_fraction,
        dedup=reading.dedup,
        workers=default_workers() if workers is None else workers,
        stats=stats,
        progress=progress,
    )


def prepare_cached(
    source: str,
    tokenizer_spec: str,
    reading: Reading | None = None,
    *,
    progress: ProgressCallback | None = None,
    load: Callable[[], Tokenizer] | None = None,
) -> TokenData:
    """Open the tokens of a source, and prepare them in the cache first if they are not there yet.

    `load` returns the tokenizer if the spec does not say enough to load it (one that is trained on several sources).
    """
    reading = reading or Reading()
    path = Path(source).expanduser()
    if source != EMBEDDED and holds_tokens(path):
        return open_tokens(path, tokenizer_spec)
    out = prepared_folder(source, tokenizer_spec, reading)
    if out.exists():
        try:
            return open_tokens(out)
        except UserError:  # damaged: prepare it again
            discard_dir(out)
    tokenizer = load() if load else tokenizer_for([source], tokenizer_spec, reading, progress)
    try:
        return prepare_source(source, tokenizer, out, reading, progress=progress)
    except UserError:
        if not out.exists():
            raise
        return open_tokens(out)  # another process has prepared the same source in the meantime


def require_text(source: str, *, fix: str) -> None:
    """Refuse a source that holds tokens, or that does not exist, before a tokenizer is loaded or trained for it."""
    if source != EMBEDDED and holds_tokens(Path(source).expanduser()):
        raise UsageError("the source holds tokens, not text.", where=source, fix=fix)
    source_bytes(source)


def verify_tokens(folder: Path, tokenizer: str | None = None) -> dict[str, int]:
    """Compare all tokens with their digests, and return how many files and tokens there are.

    `tokenizer` is for token files made elsewhere, which do not state it; a prepared folder does.
    """
    if not holds_tokens(folder):
        fix = "Name a prepared folder, or add --out DIR to prepare the text and verify the result."
        raise UsageError("the source holds no tokens.", where=str(folder), fix=fix)
    data = open_tokens(folder, None if (folder / "meta.json").is_file() else tokenizer)
    data.verify()
    return {"files": len(data.files), "tokens": sum(file.tokens for file in data.files)}


def prepared_summary(folder: Path) -> dict[str, Any]:
    """Return what the meta.json of a prepared folder says, with the number of shards instead of their list."""
    meta = json.loads(read_text(folder / "meta.json"))
    splits = {name: {**entry, "shards": len(entry["shards"])} for name, entry in meta["splits"].items()}
    return {
        "tokenizer": meta["tokenizer"]["name"],
        "vocab_size": meta["vocab_size"],
        **splits,
        "counts": meta["counts"],
        "fingerprint": meta["fingerprint"],
    }


# ----------------------------------------------------------------------------------------------------
# A preview of documents as a model reads them: tokens, and the text of each.


_PREVIEW_TOKENS = 400
_MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes, and a token at least one
_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


@dataclass(frozen=True)
class Span:
    """Tokens that together make complete characters: nearly always one token."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Preview:
    spans: list[Span]
    tokens: int  # of the document, or of its first piece if it is long
    complete: bool  # whether the spans are all tokens of the document
    more: bool = False  # whether the document is so long that `tokens` counts only its first piece

    @property
    def ids(self) -> list[int]:
        return [i for span in self.spans for i in span.ids]


def preview(
    source: str, tokenizer: Tokenizer, reading: Reading, count: int, *, max_tokens: int = _PREVIEW_TOKENS
) -> Iterator[Preview]:
    """Yield the beginnings of the first `count` training documents; the first token is the end-of-text token."""
    stats = ReadStats(source)
    documents = without_duplicates(source_documents(source, stats, reading.text_key), stats, drop=reading.dedup)
    pieces = cut_pieces(split_documents(documents, reading.val_fraction))
    pairs = itertools.pairwise(itertools.chain(pieces, [None]))
    first_pieces = ((piece, after) for piece, after in pairs if piece and piece.split == TRAIN and piece.begins)
    for piece, after in itertools.islice(first_pieces, count):
        ids = [tokenizer.eot, *tokenizer.encode(piece.text)]
        more = after is not None and not after.begins
        yield Preview(spans(tokenizer, ids[:max_tokens]), len(ids), len(ids) <= max_tokens and not more, more)


def preview_data(data: Data, count: int, progress: ProgressCallback | None = None) -> Iterator[tuple[str, Preview]]:
    """Yield each source of a recipe's data with the beginnings of its first `count` training documents."""
    sources = [part.source for part in data.parts]
    for source in sources:
        require_text(source, fix="Preview the text that they were made from: redline prepare TEXT --preview N.")
    reading = Reading(data.val_fraction, data.text_key, data.dedup)
    tokenizer = tokenizer_for(sources, data.tokenizer, reading, progress)
    for source in sources:
        for document in preview(source, tokenizer, reading, count):
            yield source, document


def spans(tokenizer: Tokenizer, ids: list[int]) -> list[Span]:
    """Return the text of each token. Tokens that end inside a character are joined with those that complete it."""
    joined = []
    start = 0
    while start < len(ids):
        for end in range(start + 1, min(start + _MAX_CHARACTER_TOKENS, len(ids)) + 1):
            text = tokenizer.decode(ids[start:end])
            if not text.endswith(_REPLACEMENT):
                break
        else:
            end, text = start + 1, tokenizer.decode(ids[start : start + 1])
        joined.append(Span(text, tuple(ids[start:end])))
        start = end
    return joined
