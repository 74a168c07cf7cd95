"""The shard format: a 64-byte header, then little-endian token ids of two or four bytes.

The header has a magic number, version, bytes per token, token count, the tokenizer's fingerprint, and zeros. Every byte
of it follows from `meta.json`, so a damaged header is found by comparison. The ids are covered by a SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from redline.cache import cache_dir, check_regular, open_regular
from redline.errors import UserError

MAGIC = b"redline1"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s24x")
HEADER_BYTES = _HEADER.size
_CHUNK_BYTES = 1 << 24


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_header(dtype: np.dtype[np.unsignedinteger], tokens: int, tokenizer_fingerprint: str) -> bytes:
    """Return the header of a shard."""
    return _HEADER.pack(MAGIC, _VERSION, dtype.itemsize, tokens, tokenizer_fingerprint.encode("ascii"))


@dataclass(frozen=True)
class Scan:
    """The result of reading all ids of a file."""

    sha256: str
    max_id: int
    max_odd: int  # the largest of every second id; 0 if the file has four-byte ids that are read as two-byte ids


def scan_tokens(path: Path, dtype: np.dtype[np.unsignedinteger], offset: int = 0) -> Scan:
    """Read all ids of a file, from `offset` on."""
    digest, max_id, max_odd = hashlib.sha256(), 0, 0
    with open(path, "rb", opener=open_regular) as file:
        file.seek(offset)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            ids = np.frombuffer(chunk, dtype, len(chunk) // dtype.itemsize)
            max_id = max(max_id, int(ids.max(initial=0)))
            max_odd = max(max_odd, int(ids[1::2].max(initial=0)))
    return Scan(digest.hexdigest(), max_id, max_odd)


class DamagedDataError(UserError):
    """A token file or its description is not what was written."""


class OtherTokenizerError(UserError):
    """The tokens were made with another tokenizer than the recipe names."""


@dataclass(frozen=True)
class TokenFile:
    """The ids in a file, from `offset` on, and what was recorded about them."""

    path: Path
    dtype: np.dtype[np.unsignedinteger]
    offset: int
    tokens: int
    sha256: str
    max_id: int

    def map(self) -> npt.NDArray[np.unsignedinteger]:
        """Map the ids into memory."""
        return np.memmap(check_regular(self.path), dtype=self.dtype, mode="r", offset=self.offset, shape=(self.tokens,))

    def check_vocabulary(self, name: str, vocab_size: int) -> None:
        """Raise OtherTokenizerError if the file has an id outside the vocabulary."""
        if self.max_id >= vocab_size:
            raise OtherTokenizerError(
                f"the token id {self.max_id} is outside the vocabulary of {name} ({vocab_size} ids).",
                where=str(self.path),
                fix="Set data.tokenizer to the tokenizer that the tokens were made with.",
            )

    def verify(self) -> None:
        """Read all ids; raise DamagedDataError if they differ from the recorded digest."""
        scan = scan_tokens(self.path, self.dtype, self.offset)
        if (scan.sha256, scan.max_id) != (self.sha256, self.max_id):
            raise damaged(self.path, "the tokens differ from their recorded SHA-256")


def check_shard(file: TokenFile, tokenizer_fingerprint: str) -> None:
    """Raise DamagedDataError if the size or the header is wrong. The ids are not read, which would take too long."""
    if not file.path.is_file():
        raise damaged(file.path, "the shard is missing")
    expected, actual = file.offset + file.tokens * file.dtype.itemsize, file.path.stat().st_size
    if actual != expected:
        raise damaged(file.path, f"the shard has {actual} bytes instead of {expected}")
    with open(file.path, "rb", opener=open_regular) as opened:
        header = opened.read(HEADER_BYTES)
    if not header.startswith(MAGIC):
        raise damaged(file.path, "the file is not a redline shard")
    if header != shard_header(file.dtype, file.tokens, tokenizer_fingerprint):
        raise damaged(file.path, "the shard's header disagrees with meta.json")


def damaged(path: Path, what: str) -> DamagedDataError:
    """Return the error for a damaged file of prepared data."""
    fix = "Prepare the data again, or copy it again."
    if path.is_relative_to(cache_dir()):
        fix = f"Delete the folder {path.parent}: the next run prepares the data again."
    return DamagedDataError(f"{what}.", where=str(path), fix=fix)


class ShardWriter:
    """Writes the ids of a split into `NAME-00000.tok`, `NAME-00001.tok`, …"""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        vocab_size: int,
        tokenizer_fingerprint: str,
        shard_tokens: int | Callable[[int], int],
        files: Iterable[TokenFile] = (),
    ) -> None:
        """`shard_tokens` is the largest size of a shard, or a function that returns it by the shard's number.

        `files` are the shards that an earlier process completed.
        """
        self._folder, self._split = folder, split
        self._vocab_size, self._fingerprint, self._limits = vocab_size, tokenizer_fingerprint, shard_tokens
        self._dtype = token_dtype(vocab_size)
        self._files = list(files)
        self._limit = 0
        self._open: BinaryIO | None = None
        self._path = folder
        self._digest = hashlib.sha256()
        self._tokens = self._max_id = 0

    def append(self, ids: npt.ArrayLike) -> None:
        """Write ids; begin a new shard whenever one is full."""
        checked = np.asarray(ids, dtype=np.int64)
        if checked.size and not 0 <= int(checked.min()) <= int(checked.max()) < self._vocab_size:
            raise ValueError(f"token ids {checked.min()}…{checked.max()} outside a vocabulary of {self._vocab_size}")
        rest = checked.astype(self._dtype)
        while rest.size:
            shard = self._open or self._start_shard()
            part, rest = np.split(rest, [self._limit - self._tokens])
            content = part.tobytes()
            shard.write(content)
            self._digest.update(content)
            self._tokens += part.size
            self._max_id = max(self._max_id, int(part.max()))
            if self._tokens == self._limit:
                self._finish_shard()

    @property
    def files(self) -> list[TokenFile]:
        """The complete shards."""
        return list(self._files)

    @property
    def pending(self) -> int:
        """The number of tokens in the shard that is not complete yet."""
        return self._tokens if self._open else 0

    def finish(self) -> list[TokenFile]:
        """Complete the last shard, and return all shards. They are on disk when this returns."""
        if self._open:
            self._finish_shard()
        return self._files

    def _start_shard(self) -> BinaryIO:
        self._path = self._folder / f"{self._split}-{len(self._files):05d}.tok"
        self._digest, self._tokens, self._max_id = hashlib.sha256(), 0, 0
        self._limit = self._limits if isinstance(self._limits, int) else self._limits(len(self._files))
        self._open = open(self._path, "wb")  # noqa: SIM115 - closed by _finish_shard or __exit__
        # The header needs the token count, which is known at the end. Until then the file has no magic number, so that
        # nothing takes it for a shard.
        self._open.write(bytes(HEADER_BYTES))
        return self._open

    def _finish_shard(self) -> None:
        assert self._open is not None
        self._open.seek(0)
        self._open.write(shard_header(self._dtype, self._tokens, self._fingerprint))
        self._open.flush()
        os.fsync(self._open.fileno())
        self._open.close()
        self._open = None
        self._files.append(
            TokenFile(self._path, self._dtype, HEADER_BYTES, self._tokens, self._digest.hexdigest(), self._max_id)
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open.close()


# ----------------------------------------------------------------------------------------------------
# Comparing token files with their recorded digests while a run trains on them.
#
# Opening a prepared folder compares sizes and headers only, because reading all tokens would delay the start of every
# run. Instead a thread reads each file once during the run, slowly enough not to slow down training.


# At most this share of the time of one core (and of a disk that only this thread uses), and this many bytes/s.
SHARE = 0.05
BYTES_PER_S = 100e6
_VERIFY_CHUNK_BYTES = 1 << 22
_NICE = 10
_POLL_S = 5.0  # how often the thread asks for shards that a stream has completed in the meantime


class BackgroundCheck:
    """Verifies each file that `files()` returns once, in a thread that runs between `__enter__` and `__exit__`.

    The thread itself never raises; `poll` does, in the caller's thread.
    """

    def __init__(
        self,
        files: Callable[[], Sequence[TokenFile]],
        *,
        share: float = SHARE,
        bytes_per_s: float = BYTES_PER_S,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._files, self._share, self._bytes_per_s = files, share, bytes_per_s
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        self._done: dict[TokenFile, bool] = {}  # whether the file could be read and is intact
        self._damage: DamagedDataError | None = None
        self._notes: list[str] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> BackgroundCheck:
        self._closed.clear()
        if self._files():
            self._thread = threading.Thread(target=self._work, name="redline-verify", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def poll(self, warn: Callable[[str], None]) -> None:
        """Raise DamagedDataError if a file is damaged; warn once about each file that could not be read."""
        while self._notes:
            warn(self._notes.pop(0))
        if self._damage is not None:
            raise self._damage

    def progress(self) -> dict[str, int]:
        """Return the number of files, and of those that agree with their digests, for the `stop` event."""
        files = self._files()
        return {"files": len(files), "files_verified": sum(self._done.get(file, False) for file in files)}

    def _work(self) -> None:
        with suppress(OSError):  # on Linux each thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._closed.is_set():
            pending = [file for file in self._files() if file not in self._done]
            for file in pending:
                self._verify(file)
                if self._closed.is_set() or self._damage is not None:
                    return
            if not pending:
                self._closed.wait(_POLL_S)

    def _verify(self, file: TokenFile) -> None:
        try:
            digest = self._digest(file)
        except OSError as error:  # a disk that does not answer does not prove damage; the mapped file may still be read
            self._done[file] = False
            self._notes.append(f"{file.path}: the digest could not be checked ({error.strerror or error})")
            return
        if digest is not None and digest != file.sha256:
            self._damage = damaged(file.path, "the tokens differ from their recorded SHA-256")
        self._done[file] = digest == file.sha256

    def _digest(self, file: TokenFile) -> str | None:
        """Return the SHA-256 of the tokens; None if the check was closed before the end of the file."""
        digest, chunk = hashlib.sha256(), memoryview(bytearray(_VERIFY_CHUNK_BYTES))
        with open(file.path, "rb", buffering=0, opener=open_regular) as opened:
            opened.seek(file.offset)
            while not self._closed.is_set():
                begin = time.perf_counter()
                size = opened.readinto(chunk)
                if not size:
                    return digest.hexdigest()
                digest.update(chunk[:size])
                spent = time.perf_counter() - begin
                self._pause(max(spent / self._share, size / self._bytes_per_s) - spent)
        return None
