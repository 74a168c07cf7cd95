"""Sources behind a URL: which files they have, and copies of these files in the cache.

A file is copied when it is first read, in chunks of constant size, and stays in `CACHE/downloads` for the next reading.
In the names of prepared folders a URL counts with the name, size and version (ETag or time) of each file, so that the
same data have the same identity on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from redline.cache import cache_dir, explain_write_errors, read_text, temporary_sibling, write_atomically
from redline.errors import UsageError, UserError
from redline.remote import SOURCE_SCHEMES, RemoteFile, Store, StoreError, url_problem, with_retries

_TOKENS = (".tok", ".bin")


@lru_cache(maxsize=64)
def remote_files(url: str) -> tuple[RemoteFile, ...]:
    """List the files of a URL by name, without hidden and empty ones.

    If the store does not answer, the list of an earlier time counts: what it names may be prepared already.
    """
    if problem := url_problem(url, SOURCE_SCHEMES):
        raise UsageError(problem, where="data.source")
    record = _folder(url) / "files.json"
    try:
        found = with_retries(lambda: _list(url))
    except StoreError as error:
        if error.passing and (known := _recorded(record)):
            return known
        raise
    files = sorted((file for file in found if _is_visible(file)), key=lambda file: file.name)
    if not files:
        fix = "Check the address, and that the credentials may list it."
        raise UserError("there are no files.", where=url, fix=fix)
    if any(file.name == "train.bin" or file.name.endswith(_TOKENS) for file in files):
        fix = "Copy it to this machine, and name its path."
        raise UsageError("this address holds prepared tokens; only text is read from one.", where=url, fix=fix)
    with explain_write_errors(record):
        write_atomically(record, json.dumps([vars(file) for file in files]))
    return tuple(files)


def _list(url: str) -> list[RemoteFile]:
    store = Store.open(url)
    if not store.is_web:
        return list(store.files().values())
    # A web server has no listing, but many show the files of a folder as links. Sizes and versions come from HEAD.
    if not url.endswith("/"):
        return [_with_name(store.entry(), url)]
    return [_with_name(store.entry(name), name) for name in store.linked()]


def _with_name(file: RemoteFile, name: str) -> RemoteFile:
    path = unquote(urlsplit(name).path)
    short = path if "://" not in name else path.rpartition("/")[2]
    return RemoteFile(short.strip("/") or "index", file.path, file.size, file.version)


def _is_visible(file: RemoteFile) -> bool:
    parts = file.name.split("/")
    return file.size != 0 and not any(part.startswith(".") or part in ("", "..") for part in parts)


def _recorded(record: Path) -> tuple[RemoteFile, ...]:
    try:
        return tuple(RemoteFile(**entry) for entry in json.loads(read_text(record)))
    except (OSError, ValueError, TypeError):
        return ()


def _folder(url: str) -> Path:
    return cache_dir() / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:24]


def local_copy(url: str, file: RemoteFile) -> Path:
    """Return where the copy of a file is, or will be. Another version of the file has another place."""
    version = hashlib.sha256(json.dumps([file.name, file.size, file.version]).encode()).hexdigest()[:16]
    return _folder(url) / version / file.name.rpartition("/")[2]


def download(url: str, file: RemoteFile) -> None:
    """Copy a file to its place in the cache, unless it is there. Raise UserError if it changes meanwhile."""
    target = local_copy(url, file)
    if target.exists():
        return
    store = Store.open(url)
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = temporary_sibling(target)
        try:
            store.download(file, part)
            now = with_retries(lambda: store.entry_at(file.path))
            if (now.size, now.version) != (file.size, file.version):
                fix = "Do not change the files of a source while they are read."
                raise UserError("the file has changed while it was read.", where=file.path, fix=fix)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def identity(files: Sequence[RemoteFile], url: str) -> list[Any]:
    """Return what stands for the content of a URL in the name of its prepared folder."""
    return ["url", url, [[file.name, file.size, file.version] for file in files]]
