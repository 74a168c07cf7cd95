"""The rows of a source that holds tables: a file, a folder of them, or a dataset of a hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from redline.data import hub
from redline.data.origin import EMBEDDED, DatasetId, dataset_id
from redline.data.rows import Row, json_rows, parquet_rows, table_kind
from redline.data.tally import Tally
from redline.data.text import text_files
from redline.errors import UserError

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
    rows = hub.open_dataset(source, dataset)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the package, the network and each file format raise their own kinds
            raise hub.dataset_error(source, dataset, error) from None
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
