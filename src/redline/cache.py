"""The cache folder, and how files and folders are opened, written and replaced.

The cache holds what can be made again: prepared data, file fingerprints, tokenizers. `regular` is the opener for every
file that may come from someone else; `atomic_dir` writes a folder that appears complete or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redline.errors import UserError

# `.NAME.PID-HEX.tmp` is locked by its process for as long as that lives; `.NAME.PID-HEX` was written by older releases.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,9})-[0-9a-f]{8}(?P<locked>\.tmp)?", re.DOTALL)
_OLD_S = 24 * 3600.0  # nothing was written for so long: the process that made an unlocked folder is gone


def cache_dir() -> Path:
    """$REDLINE_CACHE, else redline's folder in the user's cache (it may not exist yet)."""
    if own := os.environ.get("REDLINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "redline"
    return Path.home() / ".cache" / "redline"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
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


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
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
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def read_text(path: Path, *, errors: str = "strict") -> str:
    with open(path, encoding="utf-8", errors=errors, opener=open_regular) as file:
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


@contextmanager
def atomic_dir(final: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder to write to; at the end, sync its files and rename it to `final`.

    `final` appears complete or not at all: on an error nothing is left behind, and a folder that already has content is
    never replaced (POSIX rename; OSError). A process that is killed leaves its temporary folder; the next `atomic_dir`
    for the same place, or in the same folder of the cache, removes it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(final)
    temporary, lock = _locked_folder(final)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        temporary.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if it was renamed
        os.close(lock)


def discard_dir(folder: Path) -> None:
    """Rename a folder out of the way, so that nobody sees it half removed, then delete it."""
    doomed = _temporary_folder(folder)
    with suppress(OSError):  # another process did the same
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_stale(final: Path) -> None:
    """Delete temporary folders for `final` whose process is dead; in the cache, those for its neighbours too."""
    every = final.is_relative_to(cache_dir())
    try:
        entries = list(final.parent.iterdir())
    except PermissionError:  # a folder may be writable without being readable
        return
    for entry in entries:
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or not (every or match["name"] == final.name) or entry.is_symlink() or not entry.is_dir():
            continue
        if match["locked"] or (_is_dead(int(match["pid"])) and _is_old(entry)):
            _remove_unlocked(entry)


def _temporary_folder(final: Path) -> Path:
    return final.with_name(f"{temporary_sibling(final).name}.tmp")


def _locked_folder(final: Path) -> tuple[Path, int]:
    """Make a temporary folder and lock it; return it with the descriptor that holds the lock until it is closed."""
    while True:
        temporary = _temporary_folder(final)
        temporary.mkdir()
        try:
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process took it for a stale one before it was locked
            continue
        if _take_lock(lock) is not False and temporary.exists():
            return temporary, lock
        os.close(lock)


def _take_lock(descriptor: int) -> bool | None:
    """Whether the lock is ours; None on a file system without locks (on NFS, a folder cannot be locked)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_unlocked(folder: Path) -> None:
    """Delete the folder unless a live process holds its lock, or nobody can know that."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone already, or not ours to open
        return
    try:
        if _take_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it lives, and is someone else's
        return False
    return pid == os.getpid()


def _is_old(folder: Path) -> bool:
    """Whether nothing in it changed for a day: its process may live on another machine that shares the disk."""
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - newest > _OLD_S
