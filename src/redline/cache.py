"""The cache folder, and safe ways to open, write and replace files and folders.

The cache holds what can be made again: prepared data, file fingerprints, tokenizers. `open_regular` is the opener for
every file that may come from someone else; `atomic_dir` writes a folder that appears complete or not at all.
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

# `.NAME.PID-HEX.tmp` is locked as long as its process is alive; `.NAME.PID-HEX` was written by older releases.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,9})-[0-9a-f]{8}(?P<locked>\.tmp)?", re.DOTALL)
_OLD_S = 24 * 3600.0  # an unlocked folder that did not change for so long is abandoned


def cache_dir() -> Path:
    """Return $REDLINE_CACHE, otherwise redline's folder in the user's cache; it may not exist yet."""
    if own := os.environ.get("REDLINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "redline"
    return Path.home() / ".cache" / "redline"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while `path` is written into a UserError, which explains a path that the user did not choose."""
    try:
        yield
    except OSError as error:
        what, fix = "the output", "Choose another folder with --out."
        if path.is_relative_to(cache_dir()):
            what, fix = "the cache", "Free some space there, or set REDLINE_CACHE to another folder."
        raise UserError(f"{what} cannot be written ({error.strerror}).", where=str(path), fix=fix) from None


# --- opening files that may come from someone else


class IrregularFileError(OSError):
    """A FIFO, socket or device where a regular file is expected."""


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and refuse everything else: `open(path, opener=open_regular)`.

    A run directory or a prepared folder may come from someone else. Opening a FIFO in it would wait forever for the
    other end, and reading a device may never end. `stat` comes first because opening some devices has an effect;
    O_NONBLOCK and `fstat` cover a file that is replaced between the two calls.
    """
    with suppress(FileNotFoundError):  # the flags may say that the file is to be created
        _refuse_irregular(Path(path).stat().st_mode, path)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _refuse_irregular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> Path:
    """Return the path of a regular file, for libraries that open files by name; for anything else raise an OSError."""
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
    """Return an unused name in the folder of `path`, so that a rename to `path` stays within one file system."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")


def sync(path: Path) -> None:
    """Write the content of a file, or the entries of a folder, to the disk; return when this is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its parents so that they survive a power failure."""
    path.mkdir(parents=True, exist_ok=True)
    # Existing parents are synced too, because the process that made them may have been killed before it synced them.
    for folder in (path.resolve(), *path.resolve().parents):
        if folder.is_mount():
            break
        with suppress(OSError):  # a folder that may not be opened belongs to another user, and is not new
            sync(folder.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file so that a reader sees the old text or the new text, but never a part of it."""
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
    """Yield a temporary folder next to `final` to write to; at the end, sync its files and rename it to `final`.

    `final` appears complete or not at all. On an error nothing is left behind. A folder with content is never replaced
    (POSIX rename raises OSError). A process that is killed leaves its temporary folder behind; the next `atomic_dir`
    for the same path, or in the same folder of the cache, removes it.
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
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename it does not exist
        os.close(lock)


def discard_dir(folder: Path) -> None:
    """Rename a folder before deleting it, so that no process sees it half deleted."""
    renamed = _temporary_folder(folder)
    with suppress(OSError):  # another process has done the same
        folder.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def remove_stale(final: Path) -> None:
    """Delete temporary folders for `final` whose process is dead; in the cache, those for other folders too."""
    in_cache = final.is_relative_to(cache_dir())
    try:
        entries = list(final.parent.iterdir())
    except PermissionError:  # a folder may be writable without being readable
        return
    for entry in entries:
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or not (in_cache or match["name"] == final.name) or entry.is_symlink() or not entry.is_dir():
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
        except FileNotFoundError:  # another process removed it as stale before it was locked
            continue
        if _take_lock(lock) is not False and temporary.exists():
            return temporary, lock
        os.close(lock)


def _take_lock(descriptor: int) -> bool | None:
    """Try to lock; return whether it worked, or None on a file system without locks (NFS cannot lock folders)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_unlocked(folder: Path) -> None:
    """Delete the folder, unless a live process holds its lock or the file system has no locks."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is deleted already, or belongs to another user
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
    except OSError:  # the process is alive and belongs to another user
        return False
    return pid == os.getpid()


def _is_old(folder: Path) -> bool:
    """Return whether nothing in the folder changed for a day. Its process may run on another machine with this disk."""
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - newest > _OLD_S
