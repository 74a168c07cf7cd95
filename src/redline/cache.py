"""The cache folder, and how files and folders are opened, written and replaced.

The cache holds what can be made again: prepared data, file fingerprints, tokenizers. `regular` is the opener for every
file that may come from someone else; `atomic_dir` writes a folder that appears complete or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redline.errors import UserError


def cache_dir() -> Path:
    """$REDLINE_CACHE, else redline's folder in the user's cache (it may not exist yet)."""
    if own := os.environ.get("REDLINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "redline"
    return Path.home() / ".cache" / "redline"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What fails while `path` is written is said in a sentence: in the cache, nobody has named that path."""
    try:
        yield
    except OSError as error:
        what, fix = "cannot be written", "Name another folder with --out."
        if path.is_relative_to(cache_dir()):
            what, fix = f"the cache {what}", "Make room there, or name another folder with REDLINE_CACHE."
        raise UserError(f"{what} ({error.strerror}).", where=str(path), fix=fix) from None


# --- opening files that may come from someone else


class IrregularFileError(OSError):
    """A FIFO, socket or device where a regular file is expected."""


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and refuse everything else: `open(path, opener=regular)`.

    A run directory or a prepared folder may come from someone else. Opening a FIFO in it would wait forever for the
    other end, and reading a device may never end. `stat` comes first because some devices act when they are opened;
    O_NONBLOCK and `fstat` cover a file that is replaced between the two calls.
    """
    with suppress(FileNotFoundError):  # the flags may ask for it to be created
        _refuse_irregular(Path(path).stat().st_mode, path)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _refuse_irregular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> Path:
    """Return the path if it is a regular file, for libraries that open files by name; otherwise raise an OSError."""
    _refuse_irregular(path.stat().st_mode, path)
    return path


def read_bytes(path: Path) -> bytes:
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_text(path: Path, *, errors: str = "strict") -> str:
    with open(path, encoding="utf-8", errors=errors, opener=regular) as file:
        return file.read()


def _refuse_irregular(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode), "a device")
        raise IrregularFileError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


# --- writing


def temporary_sibling(path: Path) -> Path:
    """A name beside `path` that no other process uses, so that a rename onto `path` stays on one file system."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")


def sync(path: Path) -> None:
    """Until this file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that a power cut does not take away again."""
    path.mkdir(parents=True, exist_ok=True)
    # those that exist too: whoever made them may have been killed before it synced them
    for folder in (path.resolve(), *path.resolve().parents):
        if folder.is_mount():
            break
        with suppress(OSError):  # one that may not be opened is somebody else's, and not new
            sync(folder.parent)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
