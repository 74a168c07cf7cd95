"""Rows of JSONL (plain, .gz, .zst), Parquet, hub datasets and SQuAD's JSON. All rows of all jobs are read here.

A row is a dictionary together with its place (file and line). A row that cannot be used is counted in `ReadStats` with
the reason; a source of which more than half of the rows cannot be used is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from redline.data.text import COMPRESSED, EMBEDDED, Document, SourceFile, open_decompressed, text_files
from redline.errors import UserError, install_hint

# ----------------------------------------------------------------------------------------------------
# Statistics of one reading of a source: rows that cannot be used, files that are not text, duplicate documents.
#
# This module, `sources.py` and `splits.py` fill them; `meta.json` stores them; `omission_messages` describes them.


_CHECK_FROM_ROWS = 1000  # a source whose first rows are all unusable is refused after this many
_MAX_SLOTS = 1 << 25
# A reason may quote a row, and a row may come from anyone: each reason is kept short and printable, and few are kept.
_MAX_CHARACTERS, _MAX_REASONS, _OTHER_REASONS = 200, 100, "other reasons"
_EXAMPLES = 5
EMPTY = "empty "  # the prefix of a reason that says that a question or an answer is empty


def printable(text: str) -> str:
    """Return a reason or a piece of advice as it is stored and printed: without lone surrogates, and short."""
    plain = text[: _MAX_CHARACTERS + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return plain if len(plain) <= _MAX_CHARACTERS else f"{plain[:_MAX_CHARACTERS]}…"


@dataclass
class ReadStats:
    """Counts of one reading of a source, from its beginning."""

    source: str
    total: int | None = None  # bytes of its files on disk, if known
    bytes: float = 0.0  # of the files on disk, read so far
    rows: int = 0
    bad_rows: Counter[str] = field(default_factory=Counter)  # by reason
    first_bad_row: str | None = None
    examples: list[str] = field(default_factory=list)  # the first few bad rows: place and reason
    fix: str = ""  # for the first bad row
    binary_files: int = 0
    first_binary_file: str | None = None
    not_utf8_files: int = 0  # among the binary files: text in another encoding
    first_not_utf8_file: str | None = None
    duplicates: int = 0

    def read(self, count: float) -> None:
        """Add `count` bytes to those read so far."""
        self.bytes += count

    def bad_row(self, place: str, reason: str, fix: str) -> None:
        """Count a row that cannot be used; raise UserError once many rows were read and none of them is usable."""
        reason = printable(reason)
        if not self.bad_rows:
            self.first_bad_row, self.fix = f"{place}: {reason}", printable(fix)
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{place}: {reason}")
        known = reason in self.bad_rows or len(self.bad_rows) < _MAX_REASONS
        self.bad_rows[reason if known else _OTHER_REASONS] += 1
        if self.rows == self.bad_rows.total() >= _CHECK_FROM_ROWS:
            self.refuse_mostly_bad()

    def binary_file(self, place: str, reason: str) -> None:
        """Count a file that is not text."""
        self.binary_files += 1
        self.first_binary_file = self.first_binary_file or f"{place}: {reason}"

    def not_utf8_file(self, place: str) -> None:
        """Count a text file in another encoding, separately from binary ones: leaving it out is probably a mistake."""
        self.binary_files += 1
        self.not_utf8_files += 1
        self.first_not_utf8_file = self.first_not_utf8_file or place

    @property
    def empty_rows(self) -> int:
        """Rows whose question or answer is empty."""
        return sum(count for reason, count in self.bad_rows.items() if reason.startswith(EMPTY))

    def refuse_mostly_not_utf8(self, files: int) -> None:
        """Raise UserError if more than half of the files are text in another encoding."""
        count = self.not_utf8_files
        if 2 * count > files:
            what = f"{count:,} of {files:,} files are not UTF-8; the first is {self.first_not_utf8_file}."
            raise UserError(what, where=self.source, fix="Convert them, for example with `iconv -t UTF-8`.")

    def refuse_mostly_bad(self) -> None:
        """Raise UserError if more than half of the rows cannot be used: the format or the key is probably wrong."""
        bad = self.bad_rows.total()
        if 2 * bad > self.rows:
            what = f"{bad:,} of {self.rows:,} rows cannot be used; the first is {self.first_bad_row}."
            raise UserError(what, where=self.source, fix=self.fix)

    def counts(self) -> dict[str, Any]:
        """Return the counts for meta.json and the summary."""
        return {
            "rows": self.rows,
            "bad_rows": self.bad_rows.total(),
            "bad_rows_by_reason": dict(sorted(self.bad_rows.items())),
            "first_bad_row": self.first_bad_row,
            "binary_files": self.binary_files,
            "first_binary_file": self.first_binary_file,
            "not_utf8_files": self.not_utf8_files,
            "first_not_utf8_file": self.first_not_utf8_file,
            "duplicates": self.duplicates,
        }


def omission_messages(counts: Any) -> tuple[str, ...]:
    """Describe which rows and files were left out, one sentence for each kind.

    `counts` comes from a meta.json, which anyone may have written: every value is checked before it is used.
    """
    if not isinstance(counts, dict):
        return ()
    bad, rows, binary = (counts.get(key) for key in ("bad_rows", "rows", "binary_files"))
    messages = []
    if isinstance(bad, int) and isinstance(rows, int) and bad > 0:
        first = printable(str(counts.get("first_bad_row")))
        messages.append(f"{bad:,} of {rows:,} rows are left out; the first is {first}")
    not_utf8 = counts.get("not_utf8_files")
    not_utf8 = not_utf8 if isinstance(not_utf8, int) and not_utf8 > 0 else 0
    for number, why, place in (
        (not_utf8, "not UTF-8", counts.get("first_not_utf8_file")),
        (binary - not_utf8 if isinstance(binary, int) else 0, "not text", counts.get("first_binary_file")),
    ):
        if number > 0:
            are = "files are" if number > 1 else "file is"
            messages.append(f"{number:,} {are} left out ({why}); the first is {printable(str(place))}")
    return tuple(messages)


class DigestSet:
    """A set of 8-byte digests in at most 256 MiB: enough for 16.7 million documents; later ones are not remembered.

    Open addressing in one array, because a Python set takes eight times the memory.
    """

    def __init__(self, max_slots: int = _MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._slots = array("Q", bytes(8 << 10))
        self._used = 0

    def add(self, digest: bytes) -> bool:
        """Add the digest; return whether the set already had it."""
        value = int.from_bytes(digest, "little") or 1  # 0 marks an empty slot
        slot = self._slot_of(value)
        if self._slots[slot] == value:
            return True
        if 2 * (self._used + 1) > len(self._slots):  # at most half full, so that probing stays short
            if len(self._slots) >= self._max_slots:
                return False
            self._grow()
            slot = self._slot_of(value)
        self._slots[slot] = value
        self._used += 1
        return False

    def _slot_of(self, value: int) -> int:
        """Return the slot that holds the value, or the empty one where it belongs."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = value & mask
        while slots[slot] and slots[slot] != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in filter(None, old):
            self._slots[self._slot_of(value)] = value


def nothing_to_train_on(stats: ReadStats) -> UserError:
    """Return the error for a source of which nothing is left for training."""
    fix = "Check that it holds text, give more of it, or hold less out (data.val_fraction)."
    return UserError("no text is left for training.", where=stats.source, fix=fix)


# ----------------------------------------------------------------------------------------------------
# Progress of a preparation, for the progress bar.


class Progress(NamedTuple):
    stage: str  # "training the tokenizer", "preparing NAME", …
    done: int  # bytes of the source's files, read so far
    total: int | None  # of all of them; None when unknown
    tokens: int  # written so far


ProgressCallback = Callable[[Progress], None]


# ----------------------------------------------------------------------------------------------------
# Formats and limits.


JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
MAX_ROW_BYTES = 64 << 20
_PARQUET_BATCH_ROWS = 512
_MAX_JSON_BYTES = 1 << 30  # of SQuAD's JSON, which is parsed at once

T = TypeVar("T")
Fields = Mapping[str, Any]
Row = tuple[str, dict[str, Any]]  # place and fields


class UnusableRowError(Exception):
    """A row cannot be used; the message is the reason."""


# ----------------------------------------------------------------------------------------------------
# Files: JSON Lines and Parquet.


def row_format(file: SourceFile) -> str | None:
    """Return ".jsonl" or ".parquet" for a file of rows, None for a text file."""
    suffixes = [suffix.lower() for suffix in file.path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return ".jsonl" if last in JSON_LINES else last if last == PARQUET else None


def json_rows(file: SourceFile, stats: ReadStats, fix: str) -> Iterator[Row]:
    """Yield every line that is a JSON object; count the other lines, with `fix` as the advice for the first."""
    with open_decompressed(file.path) as (stream, raw):
        number, position = 0, 0
        # The length is bounded because a damaged file may be one line of many gigabytes.
        while line := stream.readline(MAX_ROW_BYTES):
            number += 1
            complete = line.endswith(b"\n") or len(line) < MAX_ROW_BYTES
            while not complete and (rest := stream.readline(MAX_ROW_BYTES)):
                complete = rest.endswith(b"\n")
            stats.read(raw.tell() - position)
            position = raw.tell()
            if not line.strip():
                continue
            stats.rows += 1
            place = f"{file.name}:{number}"
            row = _parse_object(line, place, stats, fix)
            if row is not None:
                yield place, row


def _parse_object(line: bytes, place: str, stats: ReadStats, fix: str) -> dict[str, Any] | None:
    if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
        stats.bad_row(place, f"longer than {MAX_ROW_BYTES >> 20} MiB", fix)
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        stats.bad_row(place, "not JSON", fix)
        return None
    if not isinstance(row, dict):
        stats.bad_row(place, "not a JSON object", fix)
        return None
    return row


def parquet_rows(file: SourceFile, stats: ReadStats, choose: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    """Yield the rows, with the columns that `choose` picks; no more than a row group is held in memory."""
    pq = _pyarrow_parquet(file)
    try:
        table = pq.ParquetFile(file.path)
        columns = choose(table.schema_arrow.names)
        number = 0
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(_PARQUET_BATCH_ROWS, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    stats.rows += 1
                    yield f"{file.name}:{number}", row
            stats.read(file.size / table.num_row_groups)
    except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
        what = f"the Parquet file cannot be read ({str(error).splitlines()[0]})."
        raise UserError(what, where=str(file.path), fix="Copy or write the file again.") from None


def _pyarrow_parquet(file: SourceFile) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        fix = f"Install it: {install_hint('data')}; or convert the file to JSONL."
        raise UserError("reading Parquet needs the pyarrow package.", where=str(file.path), fix=fix) from None
    return pq


def squad_rows(path: Path, stats: ReadStats, fix: str) -> Iterator[Row]:
    """Yield a row with title, context, question and answers for each question of a file in SQuAD's own JSON layout."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError("too large")
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        rows = [
            (f"{path.name}: {qa['id'] if 'id' in qa else qa['question']}", article, paragraph, qa)
            for article in articles
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"the JSON file does not have SQuAD's layout ({type(error).__name__})."
        fix = f"{fix} Rows belong in a .jsonl file, one object per line."
        raise UserError(what, where=str(path), fix=fix) from None
    for place, article, paragraph, qa in rows:
        stats.rows += 1
        fields = {"title": article.get("title"), "context": paragraph.get("context")}
        yield place, {**fields, "question": qa.get("question"), "answers": qa.get("answers")}


# ----------------------------------------------------------------------------------------------------
# Hub datasets by their id, streamed row by row through the optional `datasets` package.


@dataclass(frozen=True)
class DatasetId:
    """`owner/name[:config][@split]` on a hub."""

    name: str
    config: str | None
    split: str


_DATASET = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_FILE_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".ndjson", ".parquet", ".bin", ".tok", ".gz", ".zst", ".csv", ".py")
_OFFLINE = ("OfflineModeIsEnabled", "ConnectionError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")
_UNKNOWN = ("DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError")


def dataset_id(source: str) -> DatasetId | None:
    """Return the dataset that `source` names; None if it is an existing path or has the suffix of a file."""
    match = _DATASET.fullmatch(source)
    if match is None or source.endswith(_FILE_SUFFIXES):
        return None
    try:
        if Path(source).expanduser().exists():
            return None
    except OSError:  # the name is too long for a path, or a folder above it may not be entered
        return None
    return DatasetId(match["name"], match["config"], match["split"] or "train")


def dataset_rows(source: str, dataset: DatasetId, stats: ReadStats) -> Iterator[Row]:
    """Yield the rows of a hub dataset as they arrive."""
    rows = open_dataset(source, dataset)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the package, the network and each file format raise errors of their own
            raise dataset_error(source, dataset, error) from None
        if row is None:
            return
        stats.rows += 1
        yield f"{source}:{stats.rows}", row


def open_dataset(source: str, dataset: DatasetId) -> Iterator[dict[str, Any]]:
    """Open a hub dataset for streaming."""
    try:
        import datasets
    except ImportError:
        what = "no such file or folder, and reading a hub dataset needs the datasets package."
        raise UserError(what, where=source, fix=f"Check the path, or install it: {install_hint('data')}.") from None
    try:
        opened = datasets.load_dataset(dataset.name, dataset.config, split=dataset.split, streaming=True)
        return iter(opened)
    except Exception as error:
        raise dataset_error(source, dataset, error) from None


def dataset_error(source: str, dataset: DatasetId, error: Exception) -> UserError:
    """Explain an error of the `datasets` package to the user who typed the id."""
    chain = list(_causes(error))
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    text = " ".join(str(cause) for cause in chain)
    if "GatedRepoError" in names or "gated" in text:
        fix = "Accept its terms on its page, then log in: `hf auth login`, or set HF_TOKEN."
        return UserError("the dataset is gated: it can be read only with an account.", where=source, fix=fix)
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") or names & {*_OFFLINE}:
        fix = "Go online (and unset HF_HUB_OFFLINE), or give a path to files on this machine."
        return UserError("no such file or folder, and the hub cannot be reached.", where=source, fix=fix)
    if names & {*_UNKNOWN}:
        fix = "Check the spelling (owner/name); a private dataset needs HF_TOKEN."
        return UserError("no such file or folder, and no such dataset on the hub.", where=source, fix=fix)
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    fix = "Write the id as owner/name:config@split."
    return UserError(f"the dataset {dataset.name} cannot be read: {first_line.rstrip('.')}.", where=source, fix=fix)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


# ----------------------------------------------------------------------------------------------------
# Rows with one text each, for training on plain text.


def documents_in_rows(file: SourceFile, text_key: str, stats: ReadStats) -> Iterator[Document]:
    """Yield a document for each usable row of a JSONL or Parquet file."""
    if row_format(file) == ".jsonl":
        fix = f"Write one JSON object per line, with the text under {text_key!r}."
        return _documents(json_rows(file, stats, fix), text_key, stats)

    def choose(names: list[str]) -> list[str]:
        if text_key in names:
            return [text_key]
        raise _no_column(text_key, names, str(file.path))

    return _documents(parquet_rows(file, stats, choose), text_key, stats)


def documents_in_dataset(source: str, dataset: DatasetId, text_key: str, stats: ReadStats) -> Iterator[Document]:
    """Yield a document for each usable row of a hub dataset."""
    rows = dataset_rows(source, dataset, stats)
    for first in rows:
        if text_key not in first[1]:
            raise _no_column(text_key, list(first[1]), source)
        yield from _documents(itertools.chain([first], rows), text_key, stats)


def _no_column(text_key: str, names: Sequence[str], where: str) -> UserError:
    what = f"there is no column {text_key!r}; the columns are {', '.join(names)}."
    return UserError(what, where=where, fix="Set data.text_key (--text-key) to the column that holds the text.")


def _documents(rows: Iterable[Row], text_key: str, stats: ReadStats) -> Iterator[Document]:
    for place, row in rows:
        if text_key not in row:
            stats.bad_row(place, f"no {text_key!r} field", _advise_key(row))
            continue
        try:
            yield Document(place, text_field(row[text_key], text_key))
        except UnusableRowError as reason:
            fix = f"Check the values of {text_key!r}, or set data.text_key (--text-key) to another key."
            stats.bad_row(place, str(reason), fix)


def _advise_key(row: Fields) -> str:
    keys = ", ".join(str(key) for key in list(row)[:20])
    return f"Set data.text_key (--text-key) to one of: {keys}." if keys else "Give rows with a text."


# ----------------------------------------------------------------------------------------------------
# Rows with several fields, for the jobs that learn from questions and answers.


_JSONL_HINT = "Write one object per line in a .jsonl file (also .gz, .zst); `jq -c '.[]'` converts a JSON list."


def source_rows(source: str, stats: ReadStats, fields: Sequence[str], *, fix: str, instead: str) -> Iterator[Row]:
    """Yield every row of a file, a folder or a hub dataset, in a fixed order; of Parquet only the columns in `fields`.

    `fix` says which fields a row needs, `instead` which source to use in place of the embedded text.
    """
    if source == EMBEDDED:
        what = "the embedded corpus is plain text without questions and answers."
        raise UserError(what, where="data.source", fix=f"{instead} {fix}")
    if dataset := dataset_id(source):
        return dataset_rows(source, dataset, stats)
    return _rows_in_files(Path(source).expanduser(), stats, fields, fix)


def _rows_in_files(path: Path, stats: ReadStats, fields: Sequence[str], fix: str) -> Iterator[Row]:
    def choose(names: list[str]) -> list[str]:
        if chosen := [name for name in names if name in fields]:
            return chosen
        raise UserError(f"none of the columns is known: {', '.join(names)}.", where=str(file.path), fix=fix)

    files = text_files(path)
    for file in files:
        kind = row_format(file)
        if kind == ".jsonl":
            yield from json_rows(file, stats, f"Write one JSON object per line. {fix}")
        elif kind == ".parquet":
            yield from parquet_rows(file, stats, choose)
        else:  # a licence or a readme that lies in the same folder
            stats.binary_file(file.name, "neither JSONL nor Parquet")
    if stats.binary_files == len(files):
        what = "the file is neither JSONL nor Parquet." if path.is_file() else "the folder holds no JSONL or Parquet."
        raise UserError(what, where=str(path), fix=f"{_JSONL_HINT} {fix}")


def parse_rows(rows: Iterable[Row], parse: Callable[[str, Fields], T], stats: ReadStats, fix: str) -> Iterator[T]:
    """Yield `parse(place, fields)` of each row, and count the rows for which it raises UnusableRowError.

    Raise UserError at the end if more than half of the rows, or all of them, are unusable.
    """
    usable = False
    for place, row in rows:
        try:
            parsed = parse(place, row)
        except UnusableRowError as reason:
            stats.bad_row(place, str(reason), fix)
            continue
        usable = True
        yield parsed
    stats.refuse_mostly_bad()
    if not usable:
        raise UserError("the source holds no rows.", where=stats.source, fix=fix)


def text_field(value: Any, name: str) -> str:
    """Return the value of the field `name` if it is usable text; otherwise raise UnusableRowError."""
    if not isinstance(value, str):
        raise UnusableRowError(f"{name!r} is not text")
    if not value.strip():
        raise UnusableRowError(f"{EMPTY}{name!r}")
    if not is_clean(value):
        raise UnusableRowError(f"{name!r} is binary data, not text")
    return value


def is_clean(text: str) -> bool:
    """Return whether the text is valid UTF-8 without NUL bytes. JSON can spell lone surrogates, which UTF-8 cannot."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class RowReport:
    """How many rows a source has, and why some of them cannot be used."""

    source: str
    rows: int
    bad: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # bad rows by reason
    examples: list[str] = field(default_factory=list)  # the first few bad rows: place and reason

    @classmethod
    def of(cls, stats: ReadStats) -> RowReport:
        counts = stats.counts()
        return cls(stats.source, stats.rows, counts["bad_rows"], counts["bad_rows_by_reason"], stats.examples)

    def line(self) -> str:
        """Return the report as one line."""
        text = f"{self.source}: {self.rows:,} rows"
        if not self.bad:
            return text
        why = ", ".join(f"{count:,} × {reason}" for reason, count in self.reasons.items())
        return f"{text}, {self.bad:,} of them unusable: {why}; the first is {self.examples[0]}"
