"""From documents to a prepared folder of tokens, once; and the cache of such folders.

Memory does not grow with the text: documents stream through in pieces, and what is remembered of each is eight bytes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from redline.cache import atomic_dir, discard_dir, explain_write_errors, write_atomically
from redline.data.encode import default_workers, encode_pieces
from redline.data.origin import EMBEDDED, SCHEMA, Reading, holds_tokens, prepared_folder
from redline.data.read_stats import Progress, ProgressCallback, Tally, nothing_to_train_on
from redline.data.shards import ShardWriter, TokenFile, token_dtype
from redline.data.sources import AnyDocument, source_bytes, source_documents
from redline.data.splits import TRAIN, VAL, Piece, cut_pieces, split_documents, without_duplicates
from redline.data.tokenizer import Tokenizer, load_tokenizer
from redline.data.tokens import TokenData, data_fingerprint, open_tokens, sealed
from redline.errors import UserError

SHARD_TOKENS = 100_000_000
# Words repeat: more text than this changes a trained vocabulary little, and takes long to learn from.
_TOKENIZER_BYTES = 64 << 20


def prepare(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    out: Path,
    *,
    val_fraction: float = 0.05,
    dedup: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 1,
    tally: Tally | None = None,
    progress: ProgressCallback | None = None,
) -> TokenData:
    """Write the prepared folder `out`, whole or not at all; `tally` is where the reading of `documents` counts."""
    refuse_content(out)
    tally = tally or Tally(str(out))
    pieces = cut_pieces(split_documents(without_duplicates(documents, tally, drop=dedup), val_fraction))
    try:
        with ExitStack() as stack:
            with explain_write_errors(out):
                temporary = stack.enter_context(atomic_dir(out))
            meta = _write_splits(pieces, tokenizer, temporary, shard_tokens, workers, tally, progress)
            tokenizer.save(temporary / "tokenizer.json")
            write_atomically(temporary / "meta.json", json.dumps(sealed(meta, temporary), indent=1) + "\n")
    except OSError:
        refuse_content(out)  # another process was first
        raise
    return open_tokens(out, tokenizer.fingerprint)


def _write_splits(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    folder: Path,
    shard_tokens: int,
    workers: int,
    tally: Tally,
    progress: ProgressCallback | None,
) -> dict[str, Any]:
    counts = {split: {"tokens": 0, "bytes": 0, "documents": 0} for split in (TRAIN, VAL)}
    written = 0

    def say(tokens: int) -> None:
        if progress:
            progress(Progress(f"preparing {tally.source}", int(tally.bytes), tally.total, tokens))

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
        say(0)
        for piece, ids, utf8_bytes in encode_pieces(pieces, tokenizer, workers):
            writers[piece.split].append(np.concatenate([[tokenizer.eot], ids]) if piece.begins else ids)
            count_piece(counts[piece.split], piece, len(ids), utf8_bytes)
            written += len(ids) + piece.begins
            say(written)
        files = {split: writer.finish() for split, writer in writers.items()}
    if not files[TRAIN]:
        raise nothing_to_train_on(tally)
    return description(tokenizer, files, counts, tally)


def count_piece(count: dict[str, int], piece: Piece, tokens: int, utf8_bytes: int) -> None:
    count["tokens"] += tokens + piece.begins
    count["bytes"] += utf8_bytes
    count["documents"] += piece.begins


def description(
    tokenizer: Tokenizer, files: dict[str, list[TokenFile]], counts: dict[str, dict[str, int]], tally: Tally
) -> dict[str, Any]:
    """What meta.json holds. What was counted on the way is no part of the fingerprint: it changes no token."""
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
        "counts": tally.counts(),
        "fingerprint": data_fingerprint(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eot, splits),
    }


def refuse_content(out: Path) -> None:
    # neither `.` nor a link can be renamed onto
    if not out.name or out.is_file() or out.is_symlink() or (out.is_dir() and any(out.iterdir())):
        raise UserError("there is something already.", where=str(out), fix="Name a new folder for the tokens.")


def training_texts(
    sources: Sequence[str], reading: Reading, *, most: int = _TOKENIZER_BYTES, beginning: bool = False
) -> Iterator[str]:
    """Text to train a tokenizer on: what is not held out, evenly thinned to about `most` bytes.

    With `beginning`, and of a source whose size nobody knows, the first so many characters.
    """
    sizes = [source_bytes(source) for source in sources]
    known = sum(size for size in sizes if size is not None)
    for source, size in zip(sources, sizes, strict=True):
        pieces = _training_pieces(source, reading)
        if beginning or size is None:
            yield from _first(pieces, most)
        else:  # thinned by size on disk, which compression makes smaller than the text: hence a limit as well
            yield from _first(itertools.islice(pieces, 0, None, max(1, -(-known // most))), 4 * most)


def _training_pieces(source: str, reading: Reading) -> Iterator[str]:
    tally = Tally(source)
    documents = source_documents(source, tally, reading.text_key)
    unique = without_duplicates(documents, tally, drop=reading.dedup)
    pieces = cut_pieces(split_documents(unique, reading.val_fraction))
    return (piece.text for piece in pieces if piece.split == TRAIN)


def _first(texts: Iterable[str], most: int) -> Iterator[str]:
    met = 0
    for text in texts:
        yield text
        met += len(text)
        if met >= most:
            return


def prepare_source(
    source: str,
    tokenizer: Tokenizer,
    out: Path,
    reading: Reading,
    *,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> TokenData:
    """The tokens of a source of text, in the new folder `out`."""
    tally = Tally(source, source_bytes(source))
    return prepare(
        source_documents(source, tally, reading.text_key),
        tokenizer,
        out,
        val_fraction=reading.val_fraction,
        dedup=reading.dedup,
        workers=default_workers() if workers is None else workers,
        tally=tally,
        progress=progress,
    )


def tokenizer_for(
    sources: Sequence[str], spec: str, reading: Reading, progress: ProgressCallback | None = None
) -> Tokenizer:
    """The tokenizer that `spec` names; train:N learns from the texts of all the sources."""

    def texts() -> Iterator[str]:
        if progress:
            progress(Progress(f"training the tokenizer {spec}", 0, None, 0))
        return training_texts(sources, reading)

    return load_tokenizer(spec, texts)


def prepare_cached(
    source: str,
    tokenizer_spec: str,
    reading: Reading | None = None,
    *,
    progress: ProgressCallback | None = None,
    load: Callable[[], Tokenizer] | None = None,
) -> TokenData:
    """The tokens of a source, prepared at most once; what holds tokens already is opened.

    `load` gives the tokenizer where the spec alone does not (one trained on several sources).
    """
    reading = reading or Reading()
    path = Path(source).expanduser()
    if source != EMBEDDED and holds_tokens(path):
        return open_tokens(path, tokenizer_spec)
    out = prepared_folder(source, tokenizer_spec, reading)
    if out.exists():
        try:
            return open_tokens(out)
        except UserError:
            discard_dir(out)
    tokenizer = load() if load else tokenizer_for([source], tokenizer_spec, reading, progress)
    try:
        return prepare_source(source, tokenizer, out, reading, progress=progress)
    except UserError:
        if not out.exists():
            raise
        return open_tokens(out)  # another process prepared the same in the meantime
