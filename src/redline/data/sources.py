"""Sources: what the name of a source stands for, and how its documents and rows are read.

A source is a text file, a folder, JSONL, Parquet, a URL of these, a dataset of the hub, the embedded corpus, or
generated facts. Documents come in an order that never changes. Neither numpy nor a tokenizer is loaded, so that
`redline plan` can find a prepared folder quickly.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import sys
import sysconfig
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from redline.cache import cache_dir, read_bytes, read_text
from redline.data import downloads, facts
from redline.data.tokenizer import named_vocabulary, trained_size
from redline.errors import UserError, install_hint
from redline.hub import DATASET, SCHEME, HubId, fetch, parse_address
from redline.remote import RemoteFile, is_url

# ----------------------------------------------------------------------------------------------------
# Documents, the text files they are read from, and the embedded corpus.
#
# The embedded corpus lets every recipe run without a download: the documentation topics and the standard library of the
# running Python, about 13 MB of code with much English in it, which is the same for a given Python.
#
# Text files may be compressed. A long file is read in pieces, so that memory does not grow with its length.


EMBEDDED = "embedded"
EMBEDDED_BYTES = 13_000_000

# Not natural language: installed packages, caches, character maps, build settings, and the topics in raw form.
_SKIPPED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "config-*",
    "lib-dynload",
    "pydoc_data",
)
# Files written by programs: long tables from which a model learns nothing but numbers.
_GENERATED = ("_sysconfigdata*.py", "stringprep.py", "re/_casefix.py", "html/entities.py")
_TEST_FOLDERS = {"test", "tests", "idle_test"}

Inodes = tuple[tuple[int, int], ...]  # folders, by device and inode number


@dataclass(frozen=True)
class Document:
    """A text in memory."""

    name: str
    text: str

    def chunks(self) -> Iterator[str]:
        yield self.text

    def digest(self) -> bytes:
        """Return eight bytes that stand for the text."""
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=8).digest()


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. In the names of cache folders its size and modification time stand for its content."""

    name: str
    path: Path
    size: int
    mtime_ns: int
    url: str | None = None  # of the source, if the path is a copy that is made when the file is read
    remote: RemoteFile | None = None

    def at_hand(self) -> SourceFile:
        """Return the file itself, after copying it to the cache if it lies behind a URL."""
        if self.url is not None and self.remote is not None:
            downloads.download(self.url, self.remote)
        return self


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions put the documentation into a separate package
        return {}
    return dict(topics)


def _walk(
    root: Path, skipped_folders: tuple[str, ...], inside: str = "", *, follow: bool = False, parents: Inodes = ()
) -> Iterator[SourceFile]:
    """Yield the files below `root` without hidden ones. `scandir` is fast enough to list the library for each plan.

    With `follow`, links to folders are entered, except links to a parent folder, which would never end.
    """
    stat = root.stat()
    parents = (*parents, (stat.st_dev, stat.st_ino))
    with os.scandir(root) as entries:
        for entry in entries:
            name = inside + entry.name
            if entry.is_dir(follow_symlinks=follow):
                is_cycle = entry.is_symlink() and (entry.stat().st_dev, entry.stat().st_ino) in parents
                if not is_cycle and not any(fnmatch(entry.name, pattern) for pattern in skipped_folders):
                    yield from _walk(Path(entry.path), skipped_folders, f"{name}/", follow=follow, parents=parents)
            elif not entry.name.startswith(".") and entry.is_file():
                stat = entry.stat()
                yield SourceFile(name, Path(entry.path), stat.st_size, stat.st_mtime_ns)


def embedded_files() -> list[SourceFile]:
    """Return the library's source files by path, then as many of its tests by path as fit into EMBEDDED_BYTES."""
    root = sysconfig.get_paths()["stdlib"]
    # Every plan of a shipped recipe calls this. Most of the library's files are tests that are not chosen, so names are
    # listed first, and only the files that are chosen are opened for their size.
    names = sorted(_library_sources(root, ""))
    tests = [name for name in names if _is_test(name)]
    chosen = [file for name in names if not _is_test(name) and (file := _source_file(root, name)).size]
    total = sum(file.size for file in chosen) + sum(len(text) for text in _topics().values())
    for name in tests:
        if total >= EMBEDDED_BYTES:
            break
        if (file := _source_file(root, name)).size:
            chosen.append(file)
            total += file.size
    return chosen


def _library_sources(folder: str, inside: str) -> Iterator[str]:
    """Yield the paths of the Python files below a folder of the library, relative to the library."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = inside + entry.name
            if entry.is_dir(follow_symlinks=False):
                if not any(fnmatchcase(entry.name, pattern) for pattern in _SKIPPED_FOLDERS):
                    yield from _library_sources(entry.path, f"{name}/")
            elif (
                name.endswith(".py")
                and not entry.name.startswith(".")
                and entry.is_file(follow_symlinks=False)
                and not any(fnmatchcase(name, pattern) for pattern in _GENERATED)
            ):
                yield name


def _source_file(root: str, name: str) -> SourceFile:
    path = Path(root, name)
    stat = path.stat()
    return SourceFile(name, path, stat.st_size, stat.st_mtime_ns)


def _is_test(name: str) -> bool:
    return not _TEST_FOLDERS.isdisjoint(name.split("/")[:-1])


def embedded_documents() -> Iterator[Document]:
    """Yield the running Python's documentation topics, then the source files of its library, in a fixed order."""
    for topic, text in sorted(_topics().items()):
        yield Document(f"topics/{topic}", text)
    for file in embedded_files():
        try:
            yield Document(f"lib/{file.name}", file.path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue  # a few of Python's own tests are in other encodings on purpose


def source_files(source: str) -> list[SourceFile]:
    """Return the files of a path or of a URL, by name. Files behind a URL are not copied yet."""
    if not is_url(source):
        return text_files(Path(source).expanduser())
    return [
        SourceFile(file.name, downloads.local_copy(source, file), file.size or 0, 0, source, file)
        for file in downloads.remote_files(source)
    ]


def local_path(source: str) -> Path:
    """Return the path of a source; of a URL that names a file, that of its copy."""
    if not is_url(source):
        return Path(source).expanduser()
    files = source_files(source)
    return (
        files[0].at_hand().path if len(files) == 1 else downloads.local_copy(source, downloads.remote_files(source)[0])
    )


def text_files(path: Path) -> list[SourceFile]:
    """Return the file itself, or the non-empty files of a folder by path, without hidden ones (.git, .DS_Store)."""
    try:
        return _text_files(path)
    except OSError as error:  # for example a name that is too long, or a folder that may not be entered
        what = f"the path cannot be read ({error.strerror})."
        raise UserError(what, where=str(path), fix="Check the path and its permissions.") from None


def _text_files(path: Path) -> list[SourceFile]:
    if not path.exists():
        raise UserError("no such file or folder.", where=str(path), fix="Check the path of the text.")
    if path.is_file():
        stat = path.stat()
        if not stat.st_size:
            raise UserError("the file is empty.", where=str(path), fix="Give a file that holds text.")
        return [SourceFile(path.name, path, stat.st_size, stat.st_mtime_ns)]
    files = sorted((file for file in _walk(path, (".*",), follow=True) if file.size), key=lambda file: file.name)
    if not files:
        raise UserError("the folder holds no text.", where=str(path), fix="Give a folder of text files.")
    return files


# ----------------------------------------------------------------------------------------------------
# Reading text files, plain or compressed, in constant memory.


COMPRESSED = (".gz", ".zst")
_IN_MEMORY_BYTES = 1 << 22  # a longer file is read in chunks
_CHUNK_BYTES = 1 << 20
BINARY = "the file is binary, not text."


class NotTextError(Exception):
    """The file is not UTF-8 text; the message is the reason."""


@dataclass(frozen=True)
class LongDocument:
    """Bytes `start` to `stop` of a text file, which are read only when they are needed."""

    name: str
    path: Path
    start: int
    stop: int
    recorded_digest: bytes
    on_read: Callable[[float], None]  # called with the number of bytes that were read from disk
    disk_share: float  # bytes on disk per byte of text

    def chunks(self) -> Iterator[str]:
        # At the start of a file the bytes of a byte-order mark are not text; elsewhere they are.
        decoder = codecs.getincrementaldecoder("utf-8-sig" if self.start == 0 else "utf-8")()
        for chunk in _read_between(self.path, self.start, self.stop):
            self.on_read(len(chunk) * self.disk_share)
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)

    def digest(self) -> bytes:
        return self.recorded_digest

    def cut(self, fraction: float) -> tuple[LongDocument, LongDocument]:
        """Return the document without its last `fraction` of bytes, and those bytes, as `cut_tail` does."""
        low, at = tail_bounds(self.stop - self.start, fraction)
        window = _read_between(self.path, self.start + low, min(self.start + at + 1, self.stop))
        start = self.start + tail_start(window, low, at)
        return replace(self, stop=start), replace(self, start=start)


AnyDocument = Document | LongDocument


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """Return the text without its last `fraction` of bytes, and those bytes; cut at the start of a line if possible."""
    content = text.encode("utf-8")
    low, at = tail_bounds(len(content), fraction)
    start = tail_start([content[low : at + 1]], low, at)
    return content[:start].decode("utf-8"), content[start:].decode("utf-8")


def tail_bounds(size: int, fraction: float) -> tuple[int, int]:
    """Return the earliest byte at which the tail may begin, and the byte at which it should.

    The search for the start of a line is bounded, because otherwise one enormous line would be held out as a whole.
    """
    held_out = int(size * fraction)
    return max(0, size - 2 * held_out), size - held_out


def tail_start(window: Iterable[bytes], low: int, at: int) -> int:
    """Return the start of the last line in bytes `low` to `at`; without a line break, of the character at `at`.

    `window` yields bytes `low` to `at + 1`.
    """
    position, line, character = low, 0, low
    for chunk in window:
        inside = chunk[: at - position]
        if (newline := inside.rfind(b"\n")) >= 0:
            line = position + newline + 1
        first = max(0, at - position - 3)
        for offset in range(first, min(len(chunk), at - position + 1)):
            if chunk[offset] & 0xC0 != 0x80:  # the first byte of a character
                character = position + offset
        position += len(chunk)
    return line or (at if position <= at else character)


def read_document(file: SourceFile, on_read: Callable[[float], None]) -> Document | LongDocument:
    """Read the file as a document; raise NotTextError if it is not UTF-8 text."""
    with open_decompressed(file.path) as (stream, _):
        start = stream.read(_IN_MEMORY_BYTES + 1)
    if len(start) > _IN_MEMORY_BYTES:
        size, digest = _scan(file.path)
        return LongDocument(file.name, file.path, 0, size, digest, on_read, file.size / size)
    on_read(file.size)
    if b"\0" in start:
        raise NotTextError(BINARY)
    try:
        return Document(file.name, start.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise NotTextError(f"not UTF-8 text (byte {error.start}).") from None


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open the file; yield its decompressed bytes, and the raw file, whose position shows the progress."""
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            yield stack.enter_context(_decompressed(path, raw)), raw
    except PermissionError:
        fix = "Change its permissions, for example with `chmod u+r`."
        raise UserError("no permission to read the file.", where=str(path), fix=fix) from None
    except FileNotFoundError:
        fix = "Do not change the folder while it is read."
        raise UserError("the file has disappeared.", where=str(path), fix=fix) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, error) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise _damaged(path, error) from None


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.suffix.lower() == ".zst":
        reader = _zstandard(path).ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return cast(BinaryIO, io.BufferedReader(reader, _CHUNK_BYTES))
    return raw


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        fix = f"Install it: {install_hint('data')}; or decompress the file."
        raise UserError("reading .zst needs the zstandard package.", where=str(path), fix=fix) from None
    return zstandard


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"the compressed file is damaged ({error}).", where=str(path), fix="Copy it again.")


def _read_between(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with open_decompressed(path) as (stream, _):
        _skip(stream, start, compressed=path.suffix.lower() in COMPRESSED)
        while start < stop and (chunk := stream.read(min(_CHUNK_BYTES, stop - start))):
            start += len(chunk)
            yield chunk


def _skip(stream: BinaryIO, count: int, *, compressed: bool) -> None:
    if not compressed:
        stream.seek(count)
    while compressed and count and (chunk := stream.read(min(_CHUNK_BYTES, count))):
        count -= len(chunk)


def _scan(path: Path) -> tuple[int, bytes]:
    """Return the size and the digest of a long text file; raise NotTextError if any part of it is not text.

    The file is read to its end before it is used: otherwise bad bytes at its end would stop a preparation after hours.
    """
    digest, decoder, size = hashlib.blake2b(digest_size=8), codecs.getincrementaldecoder("utf-8")(), 0
    with open_decompressed(path) as (stream, _):
        while chunk := stream.read(_CHUNK_BYTES):
            if b"\0" in chunk:
                raise NotTextError(BINARY)
            pending = len(decoder.getstate()[0])  # bytes of an incomplete character
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise NotTextError(f"not UTF-8 text (byte {size - pending + error.start}).") from None
            digest.update(chunk.removeprefix(codecs.BOM_UTF8) if not size else chunk)
            size += len(chunk)
    if decoder.getstate()[0]:
        raise NotTextError(f"not UTF-8 text (byte {size - len(decoder.getstate()[0])}).")
    return size, digest.digest()


# ----------------------------------------------------------------------------------------------------
# Statistics of one reading of a source: rows that cannot be used, files that are not text, duplicate documents.
#
# This module and `splits.py` fill them; `meta.json` stores them; `omission_messages` describes them.


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
# Rows of JSONL (plain, .gz, .zst), Parquet, hub datasets and SQuAD's JSON. All rows of all jobs are read here.
#
# A row is a dictionary together with its place (file and line). A row that cannot be used is counted in `ReadStats`
# with the reason; a source of which more than half of the rows cannot be used is refused.


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
    """`owner/name[:config][@split]`, or `hf://owner/name[@revision]`, on a hub."""

    name: str
    config: str | None
    split: str
    address: HubId | None = None  # of hf://…, whose files are downloaded and read as a folder

    def folder(self) -> Path:
        """Return the folder of its files, after downloading them."""
        assert self.address is not None
        return fetch(f"{SCHEME}{self.name}", self.address, DATASET, [f"*{suffix}" for suffix in _DATA_SUFFIXES])


_DATASET = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_FILE_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".ndjson", ".parquet", ".bin", ".tok", ".gz", ".zst", ".csv", ".py")
_DATA_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".parquet", ".gz", ".zst")  # no README, licence or code
_OFFLINE = ("OfflineModeIsEnabled", "ConnectionError", "ConnectTimeout", "ReadTimeout", "LocalEntryNotFoundError")
_UNKNOWN = ("DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError")


def dataset_id(source: str) -> DatasetId | None:
    """Return the dataset that `source` names; None if it is an existing path or has the suffix of a file."""
    if address := parse_address(source):
        return DatasetId(address.name, None, "", address)
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
    if facts.is_facts(source):
        what = "generated facts are texts to learn reading from, or texts for LatentWire; this job reads rows."
        raise UserError(what, where=source, fix=f"{instead} {fix}")
    if dataset := dataset_id(source):
        if dataset.address is not None:
            return _rows_in_files(str(dataset.folder()), stats, fields, fix)
        return dataset_rows(source, dataset, stats)
    return _rows_in_files(source, stats, fields, fix)


def _rows_in_files(source: str, stats: ReadStats, fields: Sequence[str], fix: str) -> Iterator[Row]:
    def choose(names: list[str]) -> list[str]:
        if chosen := [name for name in names if name in fields]:
            return chosen
        raise UserError(f"none of the columns is known: {', '.join(names)}.", where=str(file.path), fix=fix)

    files = source_files(source)
    for file in files:
        kind = row_format(file)
        if kind:
            file.at_hand()
        if kind == ".jsonl":
            yield from json_rows(file, stats, f"Write one JSON object per line. {fix}")
        elif kind == ".parquet":
            yield from parquet_rows(file, stats, choose)
        else:  # a licence or a readme that lies in the same folder
            stats.binary_file(file.name, "neither JSONL nor Parquet")
    if stats.binary_files == len(files):
        single = _is_one_file(source, files)
        what = "the file is neither JSONL nor Parquet." if single else "the folder holds no JSONL or Parquet."
        raise UserError(what, where=source, fix=f"{_JSONL_HINT} {fix}")


def _is_one_file(source: str, files: Sequence[SourceFile]) -> bool:
    if is_url(source):
        return len(files) == 1 and urlsplit(source).path.endswith(files[0].name)
    return Path(source).expanduser().is_file()


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


# ----------------------------------------------------------------------------------------------------
# A source by its name: which documents it has, and the name of its prepared folder in the cache.
#
# The name of a folder in the cache is a digest of everything that its tokens depend on.


SCHEMA = "redline-tokens-1"
# The version of the rules by which documents are read, cut and split. Raise it when one of them changes, so that
# folders prepared by the old rules are not used.
RULES = 4
TEXT_KEY = "text"


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
    if facts.is_facts(source):
        return facts.document_bytes(source)
    if dataset_id(source):
        return None
    return sum(file.size for file in source_files(source))


def source_documents(source: str, stats: ReadStats, text_key: str = TEXT_KEY) -> Iterator[AnyDocument]:
    """Yield every document of the source; count what cannot be used, and raise UserError if that is most of it."""
    if source == EMBEDDED:
        for document in embedded_documents():
            stats.read(len(document.text))
            yield document
    elif facts.is_facts(source):
        for number, text in enumerate(facts.documents(source)):
            stats.read(len(text))
            yield Document(f"{source}/{number}", text)
    elif (dataset := dataset_id(source)) and dataset.address is not None:
        yield from _documents_in_files(str(dataset.folder()), stats, text_key)
    elif dataset:
        yield from documents_in_dataset(source, dataset, text_key, stats)
    else:
        yield from _documents_in_files(source, stats, text_key)
    stats.refuse_mostly_bad()


def _documents_in_files(source: str, stats: ReadStats, text_key: str) -> Iterator[AnyDocument]:
    files = source_files(source)
    is_only_file = _is_one_file(source, files)
    for file in files:
        if row_format(file.at_hand()):
            yield from documents_in_rows(file, text_key, stats)
        else:
            yield from _text_document(file, stats, is_only_file=is_only_file)
    stats.refuse_mostly_not_utf8(len(files))
    if stats.binary_files == len(files):
        what = f"the folder holds no text: all of its {len(files):,} files are binary."
        raise UserError(what, where=source, fix="Give a folder of UTF-8 text, JSONL or Parquet files.")


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
    if facts.is_facts(source):
        return [source, facts.VERSION]
    if dataset := dataset_id(source):
        if dataset.address is not None:
            return ["hub", dataset.name, dataset.folder().name]
        return ["dataset", dataset.name, dataset.config, dataset.split]
    if is_url(source):
        return downloads.identity(downloads.remote_files(source), source)
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
