"""Documents, the text files they are read from, and the embedded corpus.

The embedded corpus lets every recipe run without a download: the documentation topics and the standard library of the
running Python, about 13 MB of code with much English in it, which is the same for a given Python.

Text files may be compressed. A long file is read in pieces, so that memory does not grow with its length.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, cast

from redline.errors import UserError, install_hint

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
