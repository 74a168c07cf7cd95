"""A source of text by its name: which documents it has, and the name of its prepared folder in the cache.

Neither numpy nor a tokenizer is loaded, so that `redline plan` can find a prepared folder quickly. The name of a
folder in the cache is a digest of everything that its tokens depend on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.cache import cache_dir, read_bytes, read_text
from redline.data.rows import ReadStats, dataset_id, documents_in_dataset, documents_in_rows, row_format
from redline.data.text import (
    BINARY,
    EMBEDDED,
    EMBEDDED_BYTES,
    Document,
    LongDocument,
    NotTextError,
    SourceFile,
    embedded_documents,
    embedded_files,
    read_document,
    text_files,
)
from redline.data.tokenizer import named_vocabulary, trained_size
from redline.errors import UserError

SCHEMA = "redline-tokens-1"
# The version of the rules by which documents are read, cut and split. Raise it when one of them changes, so that
# folders prepared by the old rules are not used.
RULES = 4
TEXT_KEY = "text"

AnyDocument = Document | LongDocument


@dataclass(frozen=True)
class Reading:
    """The options by which documents are read from a source. They are part of the name of its prepared folder."""

    val_fraction: float = 0.05
    text_key: str = TEXT_KEY
    dedup: bool = False


# ----------------------------------------------------------------------------------------------------
# The documents of a source, in an order that never changes.


def source_bytes(source: str) -> int | None:
    """Return the bytes of its files on disk; None if the size is not known before it is read."""
    if source == EMBEDDED:
        return EMBEDDED_BYTES
    if dataset_id(source):
        return None
    return sum(file.size for file in text_files(Path(source).expanduser()))


def source_documents(source: str, stats: ReadStats, text_key: str = TEXT_KEY) -> Iterator[AnyDocument]:
    """Yield every document of the source; count what cannot be used, and raise UserError if that is most of it."""
    if source == EMBEDDED:
        for document in embedded_documents():
            stats.read(len(document.text))
            yield document
    elif dataset := dataset_id(source):
        yield from documents_in_dataset(source, dataset, text_key, stats)
    else:
        yield from _documents_in_files(Path(source).expanduser(), stats, text_key)
    stats.refuse_mostly_bad()


def _documents_in_files(path: Path, stats: ReadStats, text_key: str) -> Iterator[AnyDocument]:
    files = text_files(path)
    for file in files:
        if row_format(file):
            yield from documents_in_rows(file, text_key, stats)
        else:
            yield from _text_document(file, stats, is_only_file=path.is_file())
    stats.refuse_mostly_not_utf8(len(files))
    if stats.binary_files == len(files):
        what = f"the folder holds no text: all of its {len(files):,} files are binary."
        raise UserError(what, where=str(path), fix="Give a folder of UTF-8 text, JSONL or Parquet files.")


def _text_document(file: SourceFile, stats: ReadStats, *, is_only_file: bool) -> Iterator[AnyDocument]:
    """Yield the file as a document. If it is not text, count it; raise UserError if it is the only file."""
    try:
        document = read_document(file, stats.read)
    except NotTextError as reason:
        binary = str(reason) == BINARY
        if is_only_file:
            fix = "Give a text file, or convert this one." if binary else "Convert it, e.g. with `iconv -t UTF-8`."
            raise UserError(str(reason), where=str(file.path), fix=fix) from None
        if binary:
            stats.binary_file(file.name, str(reason))
        else:
            stats.not_utf8_file(file.name)
        return
    yield document


# ----------------------------------------------------------------------------------------------------
# The identity of a source, and the names of folders in the cache. These formulas must not change: a folder that was
# prepared by an older release is found by the same name (tests/data/test_prepared_before.py).


def holds_tokens(source: Path) -> bool:
    """Return whether the path holds tokens rather than text: a prepared folder, or token files made elsewhere."""
    try:
        if (source.suffix == ".bin" and source.is_file()) or (source / "train.bin").is_file():
            return True
        meta = source / "meta.json"
        return meta.is_file() and SCHEMA in read_text(meta, errors="replace")
    except OSError:  # the caller reads the path next and explains what is wrong with it
        return False


def source_identity(source: str) -> list[Any]:
    """Return what stands for the content of a source in the name of its folder.

    Files count by path, size and modification time, because a digest of their content would take long to compute.
    """
    if source == EMBEDDED:
        return [EMBEDDED, sys.version, [[file.name, file.size] for file in embedded_files()]]
    if dataset := dataset_id(source):
        return ["dataset", dataset.name, dataset.config, dataset.split]
    path = Path(source).expanduser()
    return ["files", [[str(file.path.resolve()), file.size, file.mtime_ns] for file in text_files(path)]]


def tokenizer_identity(spec: str) -> list[Any]:
    """Return the spec of a tokenizer, and for a file the digest of its content."""
    if named_vocabulary(spec):
        return [spec]
    if (size := trained_size(spec)) is not None:  # train:1k is train:1000
        return [f"train:{size}"]
    path = Path(spec).expanduser()
    try:
        path = path / "tokenizer.json" if path.is_dir() else path
        return [spec, hashlib.sha256(read_bytes(path)).hexdigest()] if path.is_file() else [spec]
    except OSError:  # the caller loads the tokenizer next and explains what is wrong with the path
        return [spec]


def prepared_folder(source: str, tokenizer: str, reading: Reading, *, stream: bool = False) -> Path:
    """Return the folder in the cache for the tokens of this source, whether it exists yet or not."""
    key = _key(source_identity(source), tokenizer_identity(tokenizer), reading)
    return cache_dir() / ("streams" if stream else "data") / key


def shared_tokenizer(sources: Sequence[str], spec: str, reading: Reading) -> Path:
    """Return the file in the cache for a tokenizer that is trained on the texts of several sources."""
    key = _key([source_identity(source) for source in sources], tokenizer_identity(spec), reading)
    return cache_dir() / "tokenizers" / key / "tokenizer.json"


def _key(identity: list[Any], tokenizer: list[Any], reading: Reading) -> str:
    content = [SCHEMA, RULES, identity, tokenizer, vars(reading)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
