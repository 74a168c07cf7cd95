"""Tables of texts: JSONL (plain, .gz, .zst) and Parquet. A row is a document; what cannot be used is counted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.data.origin import EMBEDDED, DatasetId, dataset_id
from redline.data.read_stats import Tally
from redline.data.text import COMPRESSED, Document, SourceFile, opened, text_files
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


# ----------------------------------------------------------------------------------------------------
# Datasets of a hub by their id, row by row as they arrive, through the optional `datasets` package.


_OFFLINE = ("OfflineModeIsEnabled", "ConnectionError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")
_UNKNOWN = ("DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError")


def hub_documents(source: str, dataset: DatasetId, text_key: str, tally: Tally) -> Iterator[Document]:
    rows = open_dataset(source, dataset)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the package, the network and each file format raise their own kinds
            raise dataset_error(source, dataset, error) from None
        if row is None:
            return
        if not tally.rows and text_key not in row:
            what = f"there is no column {text_key!r}; the columns are {', '.join(row)}."
            raise UserError(what, where=source, fix="Name the one that holds the text with data.text_key (--text-key).")
        tally.rows += 1
        place = f"{source}:{tally.rows}"
        text = usable_text(row, text_key, place, tally)
        if text is not None:
            yield Document(place, text)


def open_dataset(source: str, dataset: DatasetId) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        what = "is no file or folder here, and reading it as a dataset id needs the datasets package."
        raise UserError(what, where=source, fix=f"Check the path, or install it: {install_hint('data')}.") from None
    try:
        opened = datasets.load_dataset(dataset.name, dataset.config, split=dataset.split, streaming=True)
        return iter(opened)
    except Exception as error:
        raise dataset_error(source, dataset, error) from None


def dataset_error(source: str, dataset: DatasetId, error: Exception) -> UserError:
    """What the package's error means to the one who typed the id."""
    names = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    text = " ".join(str(one) for one in _chain(error))
    if "GatedRepoError" in names or "gated" in text:
        fix = "Accept its terms on its page, then log in: `hf auth login`, or set HF_TOKEN."
        return UserError("this dataset is gated: its owner wants to know who reads it.", where=source, fix=fix)
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") or names & {*_OFFLINE}:
        fix = "Go online (and unset HF_HUB_OFFLINE), or give a path to files on this machine."
        return UserError("is no file or folder here, and the hub cannot be reached for it.", where=source, fix=fix)
    if names & {*_UNKNOWN}:
        fix = "Check the spelling (owner/name); a private one needs HF_TOKEN."
        return UserError("is no file or folder here, and no dataset of that name is on the hub.", where=source, fix=fix)
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    fix = "An id is written owner/name:config@split."
    return UserError(f"the dataset {dataset.name} cannot be read: {first_line.rstrip('.')}.", where=source, fix=fix)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


# ----------------------------------------------------------------------------------------------------
# The rows of a source that holds tables: a file, a folder of them, or a dataset of a hub.


_AS_LINES = "One object a line, in a file that ends with .jsonl (also .gz, .zst); `jq -c '.[]'` turns a list into it."


def source_rows(source: str, tally: Tally, fields: Sequence[str], *, fix: str, instead: str) -> Iterator[Row]:
    """Every row, counted; of Parquet the columns among `fields` alone. `fix` says what a row must have; `instead`, what
    to name in place of running text."""
    if source == EMBEDDED:
        what = "the embedded corpus is running text, without questions and answers."
        raise UserError(what, where="data.source", fix=f"{instead} {fix}")
    if dataset := dataset_id(source):
        return _dataset_rows(source, dataset, tally)
    return _file_rows(Path(source).expanduser(), tally, fields, fix)


def _dataset_rows(source: str, dataset: DatasetId, tally: Tally) -> Iterator[Row]:
    rows = open_dataset(source, dataset)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the package, the network and each file format raise their own kinds
            raise dataset_error(source, dataset, error) from None
        if row is None:
            return
        tally.rows += 1
        yield f"{source}:{tally.rows}", row


def _file_rows(path: Path, tally: Tally, fields: Sequence[str], fix: str) -> Iterator[Row]:
    def columns(names: list[str]) -> list[str]:
        if chosen := [name for name in names if name in fields]:
            return chosen
        raise UserError(f"none of the known columns; there are {', '.join(names)}.", where=str(file.path), fix=fix)

    files = text_files(path)
    for file in files:
        kind = table_kind(file)
        if kind == ".jsonl":
            yield from json_rows(file, tally, f"Write one JSON object a line. {fix}")
        elif kind == ".parquet":
            yield from parquet_rows(file, tally, columns)
        else:  # a licence or a page about the data beside them
            tally.binary_file(file.name, "neither JSONL nor Parquet")
    if tally.binary_files == len(files):
        what = "neither JSONL nor Parquet." if path.is_file() else "the folder holds neither JSONL nor Parquet."
        raise UserError(what, where=str(path), fix=f"{_AS_LINES} {fix}")
