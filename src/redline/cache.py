"""Where redline keeps what it can make again: prepared data, file fingerprints, tokenizers."""

from __future__ import annotations

import os
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
