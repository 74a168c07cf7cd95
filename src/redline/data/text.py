"""Documents: text with a name; which files a source has; and the running Python's own library as a corpus.

The embedded corpus lets every recipe run without a download: Python's documentation topics and the
sources of its standard library, about 13 MB of English-rich code that is the same for a given Python.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from redline.errors import UserError

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
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:  # some distributions package the documentation apart
        return {}
    return dict(module.topics)


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
