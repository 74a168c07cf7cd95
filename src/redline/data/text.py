"""Documents: text with a name; which files a source has; and the running Python's own library as a corpus.

The embedded corpus lets every recipe run without a download: Python's documentation topics and the
sources of its standard library, about 13 MB of English-rich code that is the same for a given Python.
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
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from redline.errors import UserError, install_hint

EMBEDDED_BYTES = 13_000_000

# Not language: installed packages, caches, character maps, build settings, and the raw form of the topics.
_SKIPPED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "config-*",
    "lib-dynload",
    "pydoc_data",
)
# Written by programs: long tables that teach a model nothing but their numbers.
_GENERATED = ("_sysconfigdata*.py", "stringprep.py", "re/_casefix.py", "html/entities.py")
_TEST_FOLDERS = {"test", "tests", "idle_test"}

Places = tuple[tuple[int, int], ...]  # folders, by device and number


@dataclass(frozen=True)
class Document:
    """A text that is held in memory."""

    name: str
    text: str

    def chunks(self) -> Iterator[str]:
        yield self.text

    def digest(self) -> bytes:
        """Eight bytes that stand for the text."""
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=8).digest()


@dataclass(frozen=True)
class SourceFile:
    """A file that will be read as one document; size and time stand for its content in cache keys."""

    name: str
    path: Path
    size: int
    mtime_ns: int


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package the documentation apart
        return {}
    return dict(topics)


def _walk(
    root: Path, skipped_folders: tuple[str, ...], inside: str = "", *, follow: bool = False, above: Places = ()
) -> Iterator[SourceFile]:
    """The files below `root`; hidden ones are left out. `scandir`, because plans list the library while one waits.

    With `follow` links to folders are entered, but for those that lead back to where they are met.
    """
    stat = root.stat()
    above = (*above, (stat.st_dev, stat.st_ino))
    with os.scandir(root) as entries:
        for entry in entries:
            name = inside + entry.name
            if entry.is_dir(follow_symlinks=follow):
                again = entry.is_symlink() and (entry.stat().st_dev, entry.stat().st_ino) in above
                if not again and not any(fnmatch(entry.name, pattern) for pattern in skipped_folders):
                    yield from _walk(Path(entry.path), skipped_folders, f"{name}/", follow=follow, above=above)
            elif not entry.name.startswith(".") and entry.is_file():
                stat = entry.stat()
                yield SourceFile(name, Path(entry.path), stat.st_size, stat.st_mtime_ns)


def embedded_files() -> list[SourceFile]:
    """The library's sources by path; then, while there is room in the budget, its tests by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [
        file
        for file in sorted(_walk(root, _SKIPPED_FOLDERS), key=lambda file: file.name)
        if file.name.endswith(".py")
        and file.size
        and not file.path.is_symlink()
        and not any(fnmatch(file.name, pattern) for pattern in _GENERATED)
    ]
    chosen = [file for file in sources if not _is_test(file)]
    total = sum(file.size for file in chosen) + sum(len(text) for text in _topics().values())
    for file in filter(_is_test, sources):
        if total >= EMBEDDED_BYTES:
            break
        chosen.append(file)
        total += file.size
    return chosen


def _is_test(file: SourceFile) -> bool:
    return not _TEST_FOLDERS.isdisjoint(PurePosixPath(file.name).parts[:-1])


def embedded_documents() -> Iterator[Document]:
    """The running Python's documentation topics, then its library's sources. The same on every call."""
    for topic, text in sorted(_topics().items()):
        yield Document(f"topics/{topic}", text)
    for file in embedded_files():
        try:
            yield Document(f"lib/{file.name}", file.path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue  # a few tests of Python itself are in other encodings on purpose


def text_files(path: Path) -> list[SourceFile]:
    """The file itself, or the non-empty files of a folder by path; hidden ones (.git, .DS_Store) are left out."""
    try:
        return _text_files(path)
    except OSError as error:  # a name too long for any file, a folder that may not be entered, a device
        what = f"cannot be read ({error.strerror})."
        raise UserError(what, where=str(path), fix="Check the path of the text.") from None


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


def is_validation(digest: bytes, fraction: float) -> bool:
    """Whether a document is held out: by its text alone, so that no order, name or neighbour matters, and no copy of it
    in this source, or in another of many documents, is on the other side."""
    return int.from_bytes(digest, "big") < fraction * 2.0**64


# ----------------------------------------------------------------------------------------------------
# Text files, plain or compressed, at constant memory: a long one is read in pieces, however long it is.


COMPRESSED = (".gz", ".zst")
_WHOLE_BYTES = 1 << 22  # up to here a file is simply read
_CHUNK_BYTES = 1 << 20
BINARY = "this is a binary file, not text."


class NotTextError(Exception):
    """The file holds something else: why."""


@dataclass(frozen=True)
class LongDocument:
    """Bytes `start` to `stop` of a text file, read when they are asked for."""

    name: str
    path: Path
    start: int
    stop: int
    recorded_digest: bytes
    # hears how many of the file's bytes on disk have been read
    on_read: Callable[[float], None]
    disk_share: float  # bytes on disk per byte of text

    def chunks(self) -> Iterator[str]:
        # A byte-order mark is no part of the text; elsewhere in a file the same bytes are.
        decoder = codecs.getincrementaldecoder("utf-8-sig" if self.start == 0 else "utf-8")()
        for chunk in _read_between(self.path, self.start, self.stop):
            self.on_read(len(chunk) * self.disk_share)
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)

    def digest(self) -> bytes:
        return self.recorded_digest

    def cut(self, fraction: float) -> tuple[LongDocument, LongDocument]:
        """Without its last `fraction` of bytes, and those: the rule of `cut_tail`."""
        low, at = tail_bounds(self.stop - self.start, fraction)
        window = _read_between(self.path, self.start + low, min(self.start + at + 1, self.stop))
        border = self.start + tail_start(window, low, at)
        return replace(self, stop=border), replace(self, start=border)


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """The text without its last `fraction` of bytes, and those; at a line's start if one is near."""
    content = text.encode("utf-8")
    low, at = tail_bounds(len(content), fraction)
    border = tail_start([content[low : at + 1]], low, at)
    return content[:border].decode("utf-8"), content[border:].decode("utf-8")


def tail_bounds(size: int, fraction: float) -> tuple[int, int]:
    """Where the tail would begin, and how far back at most: what comes before one enormous line must not move all."""
    held_out = int(size * fraction)
    return max(0, size - 2 * held_out), size - held_out


def tail_start(window: Iterable[bytes], low: int, at: int) -> int:
    """The start of the last line in bytes `low` to `at` (`window` holds one more); else of the character at `at`."""
    position, line, character = low, 0, low
    for chunk in window:
        inside = chunk[: at - position]
        if (found := inside.rfind(b"\n")) >= 0:
            line = position + found + 1
        first = max(0, at - position - 3)
        for offset in range(first, min(len(chunk), at - position + 1)):
            if chunk[offset] & 0xC0 != 0x80:  # not the continuation of a character
                character = position + offset
        position += len(chunk)
    return line or (at if position <= at else character)


def read_document(file: SourceFile, on_read: Callable[[float], None]) -> Document | LongDocument:
    """The file as a document; raises NotTextError for what is no UTF-8."""
    with opened(file.path) as (stream, _):
        start = stream.read(_WHOLE_BYTES + 1)
    if len(start) > _WHOLE_BYTES:
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
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file's bytes, decompressed; and the file as it lies on disk, whose position tells how far one is."""
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(open(path, "rb"))
            yield stack.enter_context(_decompressed(path, raw)), raw
    except PermissionError:
        raise UserError("the file may not be read.", where=str(path), fix="Give yourself the right to.") from None
    except FileNotFoundError:
        raise UserError("the file is gone.", where=str(path), fix="Leave the text alone while it is read.") from None
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
    with opened(path) as (stream, _):
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
    """Size and digest of a long text. Read through before use, so that junk at its end is found before, not after."""
    digest, decoder, size = hashlib.blake2b(digest_size=8), codecs.getincrementaldecoder("utf-8")(), 0
    with opened(path) as (stream, _):
        while chunk := stream.read(_CHUNK_BYTES):
            if b"\0" in chunk:
                raise NotTextError(BINARY)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise NotTextError(f"not UTF-8 text (byte {size - waiting + error.start}).") from None
            digest.update(chunk.removeprefix(codecs.BOM_UTF8) if not size else chunk)
            size += len(chunk)
    if decoder.getstate()[0]:
        raise NotTextError(f"not UTF-8 text (byte {size - len(decoder.getstate()[0])}).")
    return size, digest.digest()
