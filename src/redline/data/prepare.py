"""From documents to a prepared folder of tokens, once; and the cache of such folders.

Memory does not grow with the collection: documents stream through in batches. (One document is held whole,
and encoded in pieces.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from redline.cache import cache_dir, temporary_sibling, write_atomically
from redline.data.shards import ShardWriter, token_dtype
from redline.data.text import Document, embedded_documents, embedded_files, file_documents, is_validation, text_files
from redline.data.tokenizer import Tokenizer, load_tokenizer, named_vocabulary, trained_size
from redline.data.tokens import SCHEMA, TokenData, data_fingerprint, holds_tokens, open_tokens
from redline.errors import UserError

SHARD_TOKENS = 100_000_000
_BATCH_DOCUMENTS = 64
_PIECE_CHARACTERS = 1 << 20
_BATCH_CHARACTERS = 8 * _PIECE_CHARACTERS
# A newline between two words. GPT-2's pre-tokenizer always splits there, so cutting a long document at one
# leaves its tokens as they would be in one go.
_QUIET_NEWLINE = re.compile(r"(?<=\S\n)(?=\S)")


class _Piece(NamedTuple):
    split: str
    text: str
    begins: bool  # a document: the end-of-text token goes before it


def prepare(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    out: Path,
    *,
    val_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> TokenData:
    """Write the prepared folder `out`, whole or not at all. `progress` hears the number of tokens so far."""
    _refuse_content(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(out)
    temporary.mkdir()
    try:
        meta = _write_splits(documents, tokenizer, temporary, val_fraction, shard_tokens, progress)
        tokenizer.save(temporary / "tokenizer.json")
        write_atomically(temporary / "meta.json", json.dumps(meta, indent=1) + "\n")
        _commit(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_tokens(out, tokenizer.fingerprint)


def split_documents(documents: Iterable[Document], val_fraction: float) -> Iterator[tuple[str, Document]]:
    """Each document with its split, `train` or `val`.

    In a large collection the hash of its name decides. Of a small one (a single file is one document) that could
    hold out nothing, or nearly all: there the end of every document is held out, cut at a line.
    """
    if not 0 <= val_fraction < 1:
        raise UserError(f"{val_fraction} is not a fraction for validation.", fix="Give one of at least 0 and below 1.")
    stream = iter(documents)
    first = list(itertools.islice(stream, _BATCH_DOCUMENTS))
    if len(first) < _BATCH_DOCUMENTS:
        for document in first:
            head, tail = cut_tail(document.text, val_fraction)
            yield "train", Document(document.name, head)
            yield "val", Document(document.name, tail)
        return
    for document in itertools.chain(first, stream):
        yield "val" if is_validation(document.name, val_fraction) else "train", document


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """The text without its last `fraction` of characters, and those; at a line's start if one is near."""
    held_out = int(len(text) * fraction)
    cut = len(text) - held_out
    # No farther back than as much again: what comes before one enormous line must not move all of it.
    cut = text.rfind("\n", max(0, cut - held_out), cut) + 1 or cut
    return text[:cut], text[cut:]


def _write_splits(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    val_fraction: float,
    shard_tokens: int,
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    counts = {split: {"tokens": 0, "bytes": 0, "documents": 0} for split in ("train", "val")}
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
        for batch in _batches(_pieces(split_documents(documents, val_fraction))):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                writers[piece.split].append([tokenizer.eot, *ids] if piece.begins else ids)
                count = counts[piece.split]
                count["tokens"] += len(ids) + piece.begins
                count["bytes"] += len(piece.text.encode("utf-8"))
                count["documents"] += piece.begins
            if progress:
                progress(sum(count["tokens"] for count in counts.values()))
        files = {split: writer.finish() for split, writer in writers.items()}
    if not files["train"]:
        raise UserError("no text is left for training.", fix="Give more text, or hold less out (val_fraction).")
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
        "fingerprint": data_fingerprint(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eot, splits),
    }


def _pieces(documents: Iterable[tuple[str, Document]]) -> Iterator[_Piece]:
    for split, document in documents:
        start = 0
        while start < len(document.text):
            quiet = _QUIET_NEWLINE.search(document.text, start + _PIECE_CHARACTERS)
            end = quiet.start() if quiet else len(document.text)
            yield _Piece(split, document.text[start:end], begins=start == 0)
            start = end


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _refuse_content(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError("there is something already.", where=str(out), fix="Name a new folder for the tokens.")


def _commit(temporary: Path, out: Path) -> None:
    """Rename: the folder appears complete, or not. A folder with content is never replaced (POSIX rename)."""
    _sync_folder(temporary)
    try:
        temporary.rename(out)
    except OSError:
        _refuse_content(out)  # another process was first
        raise
    _sync_folder(out.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prepare_cached(source: str, tokenizer_spec: str, val_fraction: float = 0.05) -> TokenData:
    """The tokens of `embedded`, of a text file or of a folder of them, prepared at most once; tokens are opened."""
    path = Path(source).expanduser()
    if source != "embedded" and holds_tokens(path):
        return open_tokens(path, tokenizer_spec)
    out = cache_dir() / "data" / _cache_key(source, path, tokenizer_spec, val_fraction)
    if out.exists():
        try:
            return open_tokens(out)
        except UserError:  # damaged: set it aside in one step, so that nobody sees a half-removed folder
            aside = temporary_sibling(out)
            with suppress(OSError):  # another process did the same
                out.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def documents() -> Iterator[Document]:
        return embedded_documents() if source == "embedded" else file_documents(path)

    def training_texts() -> Iterator[str]:
        return (document.text for split, document in split_documents(documents(), val_fraction) if split == "train")

    tokenizer = load_tokenizer(tokenizer_spec, training_texts)
    try:
        return prepare(documents(), tokenizer, out, val_fraction=val_fraction)
    except UserError:
        if not out.exists():
            raise
        return open_tokens(out)  # another process prepared the same in the meantime


def _cache_key(source: str, path: Path, tokenizer_spec: str, val_fraction: float) -> str:
    """What the tokens depend on. Files count by path, size and time of change: reading them all would take long."""
    if source == "embedded":
        origin: list[Any] = [sys.version, [[file.name, file.size] for file in embedded_files()]]
    else:
        origin = [[str(file.path.resolve()), file.size, file.mtime_ns] for file in text_files(path)]
    tokenizer: list[Any] = [tokenizer_spec]
    if not named_vocabulary(tokenizer_spec) and trained_size(tokenizer_spec) is None:
        tokenizer.append(load_tokenizer(tokenizer_spec).fingerprint)
    key = json.dumps([SCHEMA, origin, tokenizer, val_fraction])
    return hashlib.sha256(key.encode()).hexdigest()[:24]
