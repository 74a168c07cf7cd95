"""Tables of texts: JSONL (plain, .gz, .zst) and Parquet. A row is a document; what cannot be used is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from redline.data.filetext import COMPRESSED, opened
from redline.data.tally import Tally
from redline.data.text import Document, SourceFile
from redline.errors import UserError, install_hint

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
LONGEST_ROW = 64 << 20
_BATCH_ROWS = 512

Row = tuple[str, dict[str, Any]]  # where it stands, and what it holds


def table_kind(file: SourceFile) -> str | None:
    """ ".jsonl" or ".parquet" when the file is a table, else None: it is a text."""
    suffixes = [suffix.lower() for suffix in file.path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return ".jsonl" if last in JSON_LINES else last if last == PARQUET else None


def json_documents(file: SourceFile, text_key: str, tally: Tally) -> Iterator[Document]:
    for place, row in json_rows(file, tally, f"Write one JSON object a line, with a text under {text_key!r}."):
        text = usable_text(row, text_key, place, tally)
        if text is not None:
            yield Document(place, text)


def json_rows(file: SourceFile, tally: Tally, fix: str) -> Iterator[Row]:
    """Every line that holds a JSON object; the others are counted, with `fix` as the advice for the first."""
    with opened(file.path) as (stream, raw):
        number, position = 0, 0
        while line := stream.readline(LONGEST_ROW):
            number += 1
            whole = line.endswith(b"\n") or len(line) < LONGEST_ROW
            while not whole and (rest := stream.readline(LONGEST_ROW)):
                whole = rest.endswith(b"\n")
            tally.read(raw.tell() - position)
            position = raw.tell()
            if not line.strip():
                continue
            tally.rows += 1
            place = f"{file.name}:{number}"
            row = _object_of(line, place, tally, fix)
            if row is not None:
                yield place, row


def _object_of(line: bytes, place: str, tally: Tally, fix: str) -> dict[str, Any] | None:
    if len(line) == LONGEST_ROW and not line.endswith(b"\n"):
        tally.bad_row(place, f"longer than {LONGEST_ROW >> 20} MiB", fix)
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        tally.bad_row(place, "not JSON", fix)
        return None
    if not isinstance(row, dict):
        tally.bad_row(place, "not a JSON object", fix)
        return None
    return row


def usable_text(row: Mapping[str, Any], text_key: str, place: str, tally: Tally) -> str | None:
    """The row's text; None, and counted, when there is none to train on."""
    if text_key not in row:
        tally.bad_row(place, f"no {text_key!r} in it", _other_key(row))
        return None
    text = row[text_key]
    fix = f"Check what stands under {text_key!r}, or name another key (data.text_key, --text-key)."
    if not isinstance(text, str):
        tally.bad_row(place, f"{text_key!r} is no text", fix)
    elif not text.strip():
        tally.bad_row(place, "empty", fix)
    elif not is_clean(text):
        tally.bad_row(place, "binary data, not text", fix)
    else:
        return text
    return None


def is_clean(text: str) -> bool:
    """Text, not binary data. JSON can spell half a character, which no UTF-8 can hold."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _other_key(row: Mapping[str, Any]) -> str:
    keys = ", ".join(str(key) for key in list(row)[:20])
    return (
        f"Name the right one with data.text_key (--text-key); there are {keys}." if keys else "Give rows with a text."
    )


def parquet_documents(file: SourceFile, text_key: str, tally: Tally) -> Iterator[Document]:
    def chosen(names: list[str]) -> list[str]:
        if text_key in names:
            return [text_key]
        what = f"there is no column {text_key!r}; the columns are {', '.join(names)}."
        fix = "Name the one that holds the text with data.text_key (--text-key)."
        raise UserError(what, where=str(file.path), fix=fix)

    for place, row in parquet_rows(file, tally, chosen):
        text = usable_text(row, text_key, place, tally)
        if text is not None:
            yield Document(place, text)


def parquet_rows(file: SourceFile, tally: Tally, choose: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    """By row groups, and within them by batches: a group is all that is ever held. Of the columns what is chosen."""
    pq = _pyarrow_parquet(file)
    try:
        table = pq.ParquetFile(file.path)
        columns = choose(table.schema_arrow.names)
        number = 0
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    tally.rows += 1
                    yield f"{file.name}:{number}", row
            tally.read(file.size / table.num_row_groups)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        what = f"not a Parquet file that can be read ({str(error).splitlines()[0]})."
        raise UserError(what, where=str(file.path), fix="Copy it again, or write it anew.") from None


def _pyarrow_parquet(file: SourceFile) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        fix = f"Install it: {install_hint('data')}; or convert the file to JSONL."
        raise UserError("reading Parquet needs the pyarrow package.", where=str(file.path), fix=fix) from None
    return pq
