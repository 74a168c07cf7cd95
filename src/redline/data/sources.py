"""From a source's name to its documents, in an order that never changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from redline.data.origin import EMBEDDED, TEXT_KEY, dataset_id
from redline.data.read_stats import Tally
from redline.data.rows import hub_documents, json_documents, parquet_documents, table_kind
from redline.data.text import (
    BINARY,
    EMBEDDED_BYTES,
    Document,
    LongDocument,
    NotTextError,
    SourceFile,
    embedded_documents,
    read_document,
    text_files,
)
from redline.errors import UserError

AnyDocument = Document | LongDocument


def source_bytes(source: str) -> int | None:
    """How many bytes its files have on disk; None when nobody knows beforehand."""
    if source == EMBEDDED:
        return EMBEDDED_BYTES
    if dataset_id(source):
        return None
    return sum(file.size for file in text_files(Path(source).expanduser()))


def source_documents(source: str, tally: Tally, text_key: str = TEXT_KEY) -> Iterator[AnyDocument]:
    """Every document of the source. What cannot be used is counted in `tally`; too much of it is refused."""
    if source == EMBEDDED:
        for document in embedded_documents():
            tally.read(len(document.text))
            yield document
    elif dataset := dataset_id(source):
        yield from hub_documents(source, dataset, text_key, tally)
    else:
        yield from _file_documents(Path(source).expanduser(), tally, text_key)
    tally.refuse_mostly_bad()


def _file_documents(path: Path, tally: Tally, text_key: str) -> Iterator[AnyDocument]:
    files = text_files(path)
    for file in files:
        kind = table_kind(file)
        if kind == ".jsonl":
            yield from json_documents(file, text_key, tally)
        elif kind == ".parquet":
            yield from parquet_documents(file, text_key, tally)
        else:
            yield from _text_document(file, tally, alone=path.is_file())
    tally.refuse_mostly_not_utf8(len(files))
    if tally.binary_files == len(files):
        what = f"the folder holds no text: all of its {len(files):,} files are binary."
        raise UserError(what, where=str(path), fix="Give a folder of UTF-8 text, JSONL or Parquet files.")


def _text_document(file: SourceFile, tally: Tally, *, alone: bool) -> Iterator[AnyDocument]:
    """One document, or none: among others a file that is no text is left out, and counted; alone it is refused."""
    try:
        document = read_document(file, tally.read)
    except NotTextError as reason:
        if alone:
            binary = str(reason) == BINARY
            fix = "Remove it or convert it to UTF-8 text." if binary else "Convert it, e.g. with `iconv -t UTF-8`."
            raise UserError(str(reason), where=str(file.path), fix=fix) from None
        if str(reason) == BINARY:
            tally.binary_file(file.name, str(reason))
        else:
            tally.not_utf8_file(file.name)
        return
    yield document
