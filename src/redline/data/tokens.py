"""Opening tokens: a prepared folder, or token files made elsewhere, as memory-mapped splits.

A prepared folder holds `meta.json`, `tokenizer.json` (none for bytes) and shards `train-00000.tok`,
`val-00000.tok`, … An end-of-text token precedes each document.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from redline.cache import cache_dir, check_regular, open_regular, read_bytes, read_text, write_atomically
from redline.data.sources import SCHEMA, omission_messages
from redline.data.splits import tail_tokens
from redline.data.tokenizer import Tokenizer, load_tokenizer, named_vocabulary, trained_size
from redline.errors import UserError

# ----------------------------------------------------------------------------------------------------
# Token files made elsewhere: bare little-endian uint16 ids, as nanoGPT writes them.
#
# Such a file does not describe itself, so it is read once to its end. The result is kept in the cache by path, size and
# modification time.


_DTYPE: np.dtype[np.unsignedinteger] = np.dtype("<u2")
# Token files of llm.c and its descendants begin with a header of 256 int32, and that with this number.
_LLM_C_MAGIC = (20240520).to_bytes(4, "little")
_MIN_TOKENS_TO_JUDGE = 64  # of a shorter file, too few bytes tell text from ids
_PEEK_BYTES = 4096
_OTHER_FILES = {b"\x93NUMPY": "numpy's .npy", b"PK\x03\x04": "a zip file"}


def open_raw(path: Path) -> TokenFile:
    """Open a raw token file, after the checks that need no vocabulary."""
    size = path.stat().st_size
    where = str(path)
    if not size:
        raise UserError("the file is empty.", where=where, fix="Write the tokens again.")
    with open(path, "rb", opener=open_regular) as file:
        start = file.read(_PEEK_BYTES)
    if start.startswith(MAGIC):
        raise UserError("the file is one shard of a prepared folder.", where=where, fix="Give the folder instead.")
    if start.startswith(_LLM_C_MAGIC):
        raise UserError(
            "the file begins with a 1024-byte header.", where=where, fix="Cut it off: `tail -c +1025 OLD > NEW`."
        )
    if named := next((name for magic, name in _OTHER_FILES.items() if start.startswith(magic)), None):
        fix = "Write the bare ids: numpy's `.astype('<u2').tofile(…)`."
        raise UserError(f"the file is {named}, not bare token ids.", where=where, fix=fix)
    if size >= 2 * _MIN_TOKENS_TO_JUDGE and _is_text(start):
        raise UserError("the file is text, not token ids.", where=where, fix="Rename it so that it ends with .txt.")
    if size % _DTYPE.itemsize:
        what = f"the file has {size} bytes, which is not a whole number of uint16 tokens."
        raise UserError(what, where=where, fix="Copy the file again.")
    scan = _cached_scan(path)
    tokens = size // _DTYPE.itemsize
    if tokens >= _MIN_TOKENS_TO_JUDGE and scan.max_odd == 0 and scan.max_id > 0:
        raise UserError(
            "every second token is 0, so the ids are uint32, not uint16.",
            where=where,
            fix="Write it again with numpy's `.astype('<u2')`.",
        )
    return TokenFile(path, _DTYPE, 0, tokens, scan.sha256, scan.max_id)


def _is_text(start: bytes) -> bool:
    """Return whether the bytes look like text: valid UTF-8 with no control characters except white space."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character in "\t\n\r\f" for character in text)


def _cached_scan(path: Path) -> Scan:
    """Scan the file, or return the result of an earlier scan if the file has not changed since."""
    results = cache_dir() / "fingerprints.json"
    stat = path.stat()
    key, identity = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
    known: Any = _read_results(results).get(key)
    try:
        if known["identity"] == identity:
            return Scan(**known["scan"])
    except (KeyError, TypeError):
        pass  # no result, or one written by another release: scan the file
    scan = scan_tokens(path, _DTYPE)
    # Two processes that write at once may lose one result; the file is then scanned once more. A cache that cannot be
    # written is no reason to stop either.
    with contextlib.suppress(OSError):
        entries = _read_results(results) | {key: {"identity": identity, "scan": asdict(scan)}}
        write_atomically(results, json.dumps(entries, indent=1, sort_keys=True))
    return scan


def _read_results(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


# ----------------------------------------------------------------------------------------------------
# Opened tokens.


class TokenSplit:
    """The tokens of one split. Its shards, called pieces here, are read as if they were one array."""

    def __init__(
        self,
        pieces: Sequence[npt.NDArray[np.unsignedinteger]],
        *,
        vocab_size: int,
        eot: int,
        utf8_bytes: int | None,
        fingerprint: str,
    ) -> None:
        self.pieces = tuple(pieces)
        self.piece_starts = np.cumsum([0, *(len(piece) for piece in self.pieces)])
        self.vocab_size, self.eot, self.fingerprint = vocab_size, eot, fingerprint
        self.bytes = utf8_bytes  # of the text that the tokens stand for, for bits per byte; None if unknown

    def __len__(self) -> int:
        return int(self.piece_starts[-1])

    def read(self, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        """Return `count` tokens from `start` on, in the type in which they are stored."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start}…{start + count} of {len(self)}")
        out = np.empty(count, dtype=np.result_type(*self.pieces))
        done = 0
        while done < count:
            piece = int(np.searchsorted(self.piece_starts, start + done, side="right")) - 1
            offset = start + done - int(self.piece_starts[piece])
            part = self.pieces[piece][offset : offset + count - done]
            out[done : done + len(part)] = part
            done += len(part)
        self._check_ids(out, np.array([start]))
        return out

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Return [n, length]: `length` tokens from each start on.

        Windows inside a shard are gathered at once; only those that cross from one shard into the next are read alone.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"windows of {length} from {starts.min()}…{starts.max()} in {len(self)} tokens")
        out = np.empty((len(starts), length), dtype=np.int64)
        first = np.searchsorted(self.piece_starts, starts, side="right") - 1
        last = np.searchsorted(self.piece_starts, starts + length - 1, side="right") - 1
        for piece in np.unique(first[first == last]):
            rows = np.flatnonzero((first == piece) & (last == piece))
            views = np.lib.stride_tricks.sliding_window_view(self.pieces[piece], length)
            out[rows] = views[starts[rows] - self.piece_starts[piece]]
        for row in np.flatnonzero(first != last):
            out[row] = self.read(int(starts[row]), length)
        self._check_ids(out, starts)
        return out

    @property
    def files(self) -> tuple[TokenFile, ...]:
        """Return the shards that were opened later than the split, which only a stream has."""
        return ()

    def _check_ids(self, ids: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> None:
        """Raise DamagedDataError for an id outside the vocabulary: an embedding has no row for it."""
        if not ids.size or int(ids.max()) < self.vocab_size:
            return
        rows = np.atleast_2d(ids)
        row, column = np.argwhere(rows >= self.vocab_size)[0]
        position = int(starts[row]) + int(column)
        piece = self.pieces[int(np.searchsorted(self.piece_starts, position, side="right")) - 1]
        what = f"token {position:,} is {int(rows[row, column])}, outside the vocabulary of {self.vocab_size} ids"
        raise damaged(Path(getattr(piece, "filename", None) or "the tokens"), what)


@dataclass(frozen=True)
class TokenData:
    """The tokens of a source, opened and checked."""

    source: Path
    train: TokenSplit
    val: TokenSplit | None
    tokenizer_name: str
    tokenizer_fingerprint: str
    vocab_size: int
    eot: int
    fingerprint: str
    files: tuple[TokenFile, ...]
    omissions: tuple[str, ...] = ()  # which rows and files were left out when they were prepared, in sentences

    def stored(self) -> tuple[TokenFile, ...]:
        """Return every file that tokens are read from, including shards that were opened later."""
        return (*self.files, *self.train.files)

    def verify(self) -> None:
        """Read every token once and compare with the recorded digests."""
        for file in self.files:
            file.verify()

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that the tokens were made with; raise UserError if its files are missing."""
        own = self.source / "tokenizer.json"
        tokenizer = load_tokenizer(str(own) if own.is_file() else self.tokenizer_name)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise damaged(own, "the tokenizer is not the one that the tokens were made with")
        return tokenizer


def open_tokens(source: Path, tokenizer: str | None = None) -> TokenData:
    """Open a prepared folder, a folder with `train.bin` (and `val.bin`), or one `.bin` file.

    `tokenizer` is the spec or the fingerprint of the tokenizer that the tokens must have been made with. Raw files do
    not name theirs, so they need a spec; a prepared folder does, so it may be None.
    """
    try:
        return _open_tokens(source, tokenizer)
    except OSError as error:
        fix = "Give a prepared folder or a .bin file of tokens."
        raise UserError(f"the tokens cannot be read ({error.strerror}).", where=str(source), fix=fix) from None


def _open_tokens(source: Path, tokenizer: str | None) -> TokenData:
    if not source.exists():
        raise UserError(
            "no such file or folder.", where=str(source), fix="Give a prepared folder or a .bin file of tokens."
        )
    if source.suffix == ".bin" and source.is_file():
        val = source.with_name("val.bin") if source.name == "train.bin" else None
        return _open_raw_files(source, val, source, tokenizer)
    if (source / "train.bin").is_file():
        return _open_raw_files(source / "train.bin", source / "val.bin", source, tokenizer)
    return _open_prepared(source, tokenizer)


def data_fingerprint(tokenizer_fingerprint: str, vocab_size: int, eot: int, splits: dict[str, Any]) -> str:
    """Return the fingerprint of prepared tokens: equal for the same tokens in the same shards, in any folder."""
    return digest_of([tokenizer_fingerprint, vocab_size, eot, splits])


def digest_of(content: object) -> str:
    """Return 16 hexadecimal digits that stand for a value that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


DEFINITION = "tokenizer.json"
_KEYS_WITHOUT_DIGEST = frozenset(
    ("schema", "dtype", "tokenizer", "vocab_size", "eot", "splits", "counts", "fingerprint")
)


def with_digest(meta: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of meta.json with the SHA-256 of tokenizer.json and a digest of the content itself."""
    body = {key: value for key, value in meta.items() if key != "digest"}
    definition = folder / DEFINITION
    if definition.is_file() and "tokenizer" in body:  # the bytes tokenizer has no definition
        digest = hashlib.sha256(read_bytes(definition)).hexdigest()
        body["tokenizer"] = {**body["tokenizer"], "sha256": digest}
    body = json.loads(json.dumps(body))
    return {**body, "digest": digest_of(body)}


def has_valid_digest(meta: dict[str, Any]) -> bool:
    """Return whether the content of meta.json agrees with its digest.

    Older releases wrote no digest; their files are valid if they have no key that those releases did not write.
    """
    if "digest" not in meta:
        return _KEYS_WITHOUT_DIGEST.issuperset(meta)
    return bool(meta["digest"] == digest_of({key: value for key, value in meta.items() if key != "digest"}))


def check_definition(folder: Path, meta: dict[str, Any]) -> None:
    """Raise DamagedDataError if tokenizer.json does not have the SHA-256 that meta.json records for it."""
    recorded, path = meta["tokenizer"].get("sha256"), folder / DEFINITION
    if recorded is None:
        return
    try:
        same = hashlib.sha256(read_bytes(path)).hexdigest() == recorded
    except OSError as error:
        raise damaged(path, f"the tokenizer cannot be read ({error.strerror})") from None
    if not same:
        raise damaged(path, "tokenizer.json is not the one that was written with the tokens")


def _open_prepared(folder: Path, tokenizer: str | None) -> TokenData:
    path = folder / "meta.json"
    try:
        meta = json.loads(read_text(path))
        made_with, vocab_size, eot = meta["tokenizer"], int(meta["vocab_size"]), int(meta["eot"])
        name, tokenizer_fingerprint = str(made_with["name"]), str(made_with["fingerprint"])
        files = {split: shard_files(folder, vocab_size, entry) for split, entry in meta["splits"].items()}
        intact = meta["fingerprint"] == data_fingerprint(tokenizer_fingerprint, vocab_size, eot, meta["splits"])
        intact = intact and meta["schema"] == SCHEMA and meta["dtype"] == token_dtype(vocab_size).name
        intact = intact and has_valid_digest(meta)
    except FileNotFoundError:
        raise damaged(path, "the folder has no meta.json, so it is not a prepared folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact or not files.get("train"):
        raise damaged(path, "meta.json is damaged")
    check_definition(folder, meta)
    _check_tokenizer(folder, name, tokenizer_fingerprint, tokenizer)
    for file in (file for split in files.values() for file in split):
        check_shard(file, tokenizer_fingerprint)
        file.check_vocabulary(name, vocab_size)

    def split(name: str) -> TokenSplit | None:
        if not files.get(name):
            return None
        entry = meta["splits"][name]
        return TokenSplit(
            [file.map() for file in files[name]],
            vocab_size=vocab_size,
            eot=eot,
            utf8_bytes=entry["bytes"],
            fingerprint=digest_of(entry),
        )

    train = split("train")
    assert train is not None
    return TokenData(
        source=folder,
        train=train,
        val=split("val"),
        tokenizer_name=name,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=vocab_size,
        eot=eot,
        fingerprint=meta["fingerprint"],
        files=tuple(file for some in files.values() for file in some),
        omissions=omission_messages(meta.get("counts")),
    )


def shard_files(folder: Path, vocab_size: int, entry: dict[str, Any]) -> list[TokenFile]:
    """Return the shards that a split of meta.json lists; raise ValueError for an entry that cannot be valid."""
    files = []
    for shard in entry["shards"]:
        if Path(shard["file"]).name != shard["file"] or int(shard["tokens"]) < 1:
            raise ValueError("a shard must lie next to meta.json and hold at least one token")
        files.append(
            TokenFile(
                path=folder / shard["file"],
                dtype=token_dtype(vocab_size),
                offset=HEADER_BYTES,
                tokens=int(shard["tokens"]),
                sha256=shard["sha256"],
                max_id=int(shard["max_id"]),
            )
        )
    return files


def _check_tokenizer(folder: Path, name: str, fingerprint: str, requested: str | None) -> None:
    if requested is None:
        return
    if re.fullmatch(r"[0-9a-f]{16}", requested):
        same = requested == fingerprint
    elif trained_size(requested) is not None:  # on which text it was trained is not known here, so the sizes decide
        same = name.startswith("train:") and trained_size(requested) == trained_size(name)
    else:
        known = named_vocabulary(requested)
        same = fingerprint == (known[2] if known else load_tokenizer(requested).fingerprint)
    if not same:
        by_name = named_vocabulary(name) or name.startswith("train:")
        own = name if by_name else folder / "tokenizer.json"  # the path in `name` may be one of another machine
        raise OtherTokenizerError(
            f"wrong tokenizer: the tokens were made with {name} ({fingerprint}), not {requested}.",
            where=str(folder),
            fix=f"Set data.tokenizer={own}, or prepare the text again with {requested}.",
        )


def _open_raw_files(train: Path, val: Path | None, source: Path, spec: str | None) -> TokenData:
    name, vocab_size, eot, tokenizer_fingerprint = _raw_vocabulary(train, spec)
    files = [open_raw(train)]
    if val is not None and val.is_file():
        files.append(open_raw(val))
    for file in files:
        file.check_vocabulary(name, vocab_size)
    pieces = [file.map() for file in files]
    if len(files) == 1:
        val_start = files[0].tokens - tail_tokens(files[0].tokens)
        pieces = [pieces[0][:val_start], pieces[0][val_start:]]
    digests = [file.sha256 for file in files]
    splits = [
        TokenSplit(
            [piece],
            vocab_size=vocab_size,
            eot=eot,
            utf8_bytes=None,
            fingerprint=digest_of([digests, split, len(piece)]),
        )
        for split, piece in zip(("train", "val"), pieces, strict=True)
    ]
    return TokenData(
        source=source,
        train=splits[0],
        val=splits[1] if len(splits[1]) else None,
        tokenizer_name=name,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=vocab_size,
        eot=eot,
        fingerprint=digest_of([tokenizer_fingerprint, *(split.fingerprint for split in splits)]),
        files=tuple(files),
    )


def _raw_vocabulary(path: Path, spec: str | None) -> tuple[str, int, int, str]:
    if spec is None or trained_size(spec) is not None:
        raise UserError(
            "a raw token file does not name its tokenizer.",
            where=str(path),
            fix="Name the one it was made with: data.tokenizer=gpt2, bytes, or the path of a tokenizer.json.",
        )
    if known := named_vocabulary(spec):
        return (spec, *known)
    tokenizer = load_tokenizer(spec)
    return spec, tokenizer.vocab_size, tokenizer.eot, tokenizer.fingerprint


# ----------------------------------------------------------------------------------------------------
# Documents in a split: their keys, which show the documents that two splits share, and the text of the first one.


MAX_TOKENS_FOR_KEYS = 50_000_000  # a larger split is not read for its keys; this one takes about 200 MB of memory
KEY_TOKENS = 64  # a key stands for the first tokens only, because the end of a document may be in the other split


def document_keys(split: TokenSplit) -> list[bytes] | None:
    """Return one key per document, made of its first tokens; None for a split that is too large to read."""
    if len(split) > MAX_TOKENS_FOR_KEYS:
        return None
    return list(dict.fromkeys(hashlib.blake2b(ids.tobytes(), digest_size=16).digest() for ids in _beginnings(split)))


def _beginnings(split: TokenSplit) -> Iterator[npt.NDArray[np.int64]]:
    starts = np.flatnonzero(np.concatenate([np.asarray(piece) == split.eot for piece in split.pieces]))
    ends = np.append(starts[1:], len(split))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        length = min(KEY_TOKENS, end - start - 1)
        if length > 0:
            yield split.read(start + 1, length).astype(np.int64)


def first_tokens(split: TokenSplit, count: int) -> list[int]:
    """Return the first `count` tokens of the split's first document, without the end-of-text token before it."""
    tokens = split.read(0, min(len(split), count + 1)).tolist()
    body = tokens[1:] if tokens and tokens[0] == split.eot else tokens[:count]
    return body[: body.index(split.eot)] if split.eot in body else body


# ----------------------------------------------------------------------------------------------------
# The shard format: a 64-byte header, then little-endian token ids of two or four bytes.


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
