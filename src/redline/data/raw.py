"""Token files made elsewhere: bare little-endian uint16 ids, as nanoGPT writes them.

Such a file says nothing about itself, so it is read through once; what that found is remembered
in the cache by path, size and time of change.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from redline.cache import cache_dir, read_text, regular, write_atomically
from redline.data.shards import MAGIC, Scan, TokenFile, scan_tokens
from redline.errors import UserError

_DTYPE: np.dtype[np.unsignedinteger] = np.dtype("<u2")
# llm.c and its descendants put a header of 256 int32 in front, which begins with this number.
_LLM_C_MAGIC = (20240520).to_bytes(4, "little")
_ENOUGH_TO_JUDGE = 64
_LOOK = 4096  # bytes at the beginning
_OTHER_FILES = {b"\x93NUMPY": "numpy's .npy", b"PK\x03\x04": "a zip file"}


def open_raw(path: Path) -> TokenFile:
    """The ids of a raw file, after the checks that need no vocabulary."""
    size = path.stat().st_size
    where = str(path)
    if not size:
        raise UserError("the file is empty.", where=where, fix="Write the tokens again.")
    with open(path, "rb", opener=regular) as file:
        start = file.read(_LOOK)
    if start.startswith(MAGIC):
        raise UserError("this is one shard of a prepared folder.", where=where, fix="Give the folder instead.")
    if start.startswith(_LLM_C_MAGIC):
        raise UserError(
            "the file begins with a 1024-byte header.", where=where, fix="Cut it off: `tail -c +1025 OLD > NEW`."
        )
    if named := next((name for magic, name in _OTHER_FILES.items() if start.startswith(magic)), None):
        fix = "Write the bare ids: numpy's `.astype('<u2').tofile(…)`."
        raise UserError(f"this is {named}, not bare token ids.", where=where, fix=fix)
    if size >= 2 * _ENOUGH_TO_JUDGE and _is_text(start):
        raise UserError("this is text, not token ids.", where=where, fix="Rename it to .txt, and give that.")
    if size % _DTYPE.itemsize:
        raise UserError(f"{size} bytes are no whole number of uint16 tokens.", where=where, fix="Copy the file again.")
    scan = _remembered_scan(path)
    tokens = size // _DTYPE.itemsize
    if tokens >= _ENOUGH_TO_JUDGE and scan.max_odd == 0 and scan.max_id > 0:
        raise UserError(
            "every second token is 0, so the ids are uint32, not uint16.",
            where=where,
            fix="Write it again with numpy's `.astype('<u2')`.",
        )
    return TokenFile(path, _DTYPE, 0, tokens, scan.sha256, scan.max_id)


def _is_text(start: bytes) -> bool:
    """Ids have bytes everywhere; text has hardly any below the space, and is UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character in "\t\n\r\f" for character in text)


def _remembered_scan(path: Path) -> Scan:
    memory = cache_dir() / "fingerprints.json"
    stat = path.stat()
    key, identity = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
    known: Any = _read_memory(memory).get(key)
    try:
        if known["identity"] == identity:
            return Scan(**known["scan"])
    except (KeyError, TypeError):
        pass  # unknown, or written by another release: read the file again
    scan = scan_tokens(path, _DTYPE)
    # Two processes that do this at once may lose one entry; the price is one more reading of a file.
    # A cache that cannot be written is no reason to stop either.
    with contextlib.suppress(OSError):
        entries = _read_memory(memory) | {key: {"identity": identity, "scan": asdict(scan)}}
        write_atomically(memory, json.dumps(entries, indent=1, sort_keys=True))
    return scan


def _read_memory(memory: Path) -> dict[str, Any]:
    try:
        entries = json.loads(read_text(memory))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
