"""Files behind a URL: object stores and web servers through fsspec, with errors that say how to fix them.

Every access of redline to a URL goes through `Store`. It keeps no listing in memory, because another machine may have
written since. A URL must not hold a login or a signature: it is recorded in lock.json and in the event log, which
people share.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redline.errors import UserError, install_hint, redact
from redline.hub import SCHEME as HUB

MIRROR_SCHEMES = ("s3", "gs", "file")
SOURCE_SCHEMES = ("s3", "gs", "http", "https", "file")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Parameters of signed addresses (S3, Google, Azure) and of services that take a key in the address.
_SECRET_PARAMETERS = re.compile(r"[?&](x-amz-|x-goog-|awsaccesskeyid|signature|sig|token|key|api_?key|password)[^=&]*=")
CHUNK_BYTES = 16 << 20
PART_BYTES = 64 << 20  # of a multipart upload to S3; 10,000 parts are allowed, so a file may have 640 GB
_CLOCK_TOLERANCE_S = 600.0  # S3 refuses a request that was signed more than 15 minutes ago
_TRIES, _PAUSE_S, _RETRIES_S = 5, 0.5, 20.0  # of a read, for errors that may pass

T = TypeVar("T")


class StoreError(UserError):
    """A store refuses, or cannot be reached. `passing`: the same request may succeed later."""

    def __init__(self, what: str, *, where: str, fix: str, passing: bool = False, missing: bool = False) -> None:
        super().__init__(what, where=redact(where), fix=fix)
        self.passing, self.missing = passing, missing


# ----------------------------------------------------------------------------------------------------
# URLs.


def is_url(text: str) -> bool:
    """Return whether fsspec opens this. An address of the hub is not such a URL: hub.py opens it."""
    return _URL.match(text) is not None and not text.startswith(HUB)


def url_problem(url: str, schemes: tuple[str, ...]) -> str | None:
    """Return what is wrong with a URL of a recipe and how to fix it, or None. Nothing is accessed."""
    scheme = scheme_of(url)
    if scheme not in schemes:
        return f"{redact(url)!r} is not a URL of a known kind. Use {', '.join(f'{s}://' for s in schemes)}."
    parts = urlsplit(url)
    if "@" in parts.netloc or _SECRET_PARAMETERS.search(url.lower()):
        safe = redact(url.split("?")[0])
        return (
            f"{safe!r} was given with a login or a signature, which the run's files would record. Leave it out of the "
            "URL: credentials belong in the environment (AWS_PROFILE, …) or in the configuration of fsspec."
        )
    if scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        return f"{url!r} names no folder. Write file:///FOLDER, with three slashes."
    if scheme != "file" and not parts.netloc:
        return f"{url!r} names no {'host' if scheme in ('http', 'https') else 'bucket'}. Write {scheme}://NAME/PREFIX."
    return None


def scheme_of(url: str) -> str:
    match = _URL.match(url)
    return {"gcs": "gs"}.get(match[1].lower(), match[1].lower()) if match else ""


def join(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"


def parent_and_name(url: str) -> tuple[str, str]:
    """Return the URL of the folder above, and the last part of the URL."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


# ----------------------------------------------------------------------------------------------------
# A store.


@dataclass(frozen=True)
class RemoteFile:
    """A file below the root of a store. `version` changes with the content, as far as the store tells."""

    name: str  # relative to the root, with slashes; the root itself, if it is a file, has its own last part
    path: str  # as the file system names it
    size: int | None  # a web server may not say
    version: str


@dataclass
class Store:
    """The files below a URL."""

    url: str
    fs: Any = field(repr=False)
    root: str

    @classmethod
    def open(cls, url: str) -> Store:
        """Open the store of a URL. Raise UserError if its package is missing. Nothing is accessed yet."""
        scheme = scheme_of(url)
        try:
            import fsspec

            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if scheme == "s3":
                # The package's own patience is minutes. The callers here have their own, and report meanwhile.
                own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
                limits = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
                options["config_kwargs"] = {**limits, **own}
            # gcsfs logs a traceback before it raises the error that is reported here.
            logging.getLogger("gcsfs").addHandler(logging.NullHandler())
            fs, root = fsspec.core.url_to_fs(url, **({} if scheme == "file" else options))
        except ImportError:
            package = _PACKAGES.get(scheme, scheme)
            fix = f"Install it: {install_hint('remote')}."
            raise UserError(
                f"{scheme}:// needs the package {package}, which is not installed.", where=url, fix=fix
            ) from None
        except Exception as error:
            raise explain(url, error) from None
        return cls(url.rstrip("/"), fs, root.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return scheme_of(self.url) == "file"

    @property
    def is_web(self) -> bool:
        return scheme_of(self.url) in ("http", "https")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    # --- reading

    def files(self, folder: str = "") -> dict[str, RemoteFile]:
        """List the files below a folder by name, without folders and their markers; empty if there is none."""
        with self._explained(folder):
            try:
                found = self.fs.find(self.path(folder), detail=True)
            except FileNotFoundError:
                return {}
        entries = found.values() if isinstance(found, dict) else []
        files = [self._file(entry) for entry in entries if entry.get("type") != "directory"]
        return {file.name: file for file in files if file.name}

    def _file(self, entry: dict[str, Any]) -> RemoteFile:
        path = str(entry["name"])
        inside = path == self.root or path.startswith(self.root + "/")
        name = path[len(self.root) :].strip("/") if inside else path.rpartition("/")[2]
        # The name ends in a slash for the empty objects that consoles create as "folders".
        name = "" if path.endswith("/") else name or path.rpartition("/")[2]
        size = entry.get("size")
        keys = ("ETag", "etag", "generation", "md5Hash", "LastModified", "updated", "mtime")
        version = next((str(entry[key]) for key in keys if entry.get(key)), "")
        return RemoteFile(name, path, None if size is None else int(size), version.strip('"'))

    def entry(self, name: str = "") -> RemoteFile:
        """Return one file, or the root itself. Raise StoreError if it is missing."""
        return self.entry_at(self.path(name))

    def entry_at(self, path: str) -> RemoteFile:
        with _Explained(path if is_url(path) else f"{scheme_of(self.url)}://{path.lstrip('/')}"):
            return self._file({**self.fs.info(path), "name": path})

    def linked(self) -> list[str]:
        """Return the names of the files below the root of a web server, which shows them as links."""
        with self._explained(""):
            found = self.fs.find(self.root + "/")
        return [str(path).removeprefix(self.root + "/") for path in found]

    def _stat(self, name: str) -> dict[str, Any] | None:
        with self._explained(name):
            try:
                return dict(self.fs.info(self.path(name)))
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return with_retries(lambda: self._read_once(name))

    def _read_once(self, name: str) -> bytes:
        with self._explained(name):
            return bytes(self.fs.cat_file(self.path(name)))

    def download(self, file: RemoteFile, local: Path) -> None:
        """Write a file to the disk in chunks, and sync it. A read that fails for a passing reason is repeated."""
        with open(local, "wb") as out:
            if self.is_web or file.size is None:
                with_retries(lambda: self._stream(file, out))
            else:
                while out.tell() < file.size:
                    begin = out.tell()
                    chunk = with_retries(lambda: self._range(file, begin))  # noqa: B023 - called at once
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())

    def _stream(self, file: RemoteFile, out: Any) -> None:
        out.seek(0)
        out.truncate()
        with self._explained(file.name), self.fs.open(file.path, "rb", block_size=0) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                out.write(chunk)
        if file.size is not None and out.tell() != file.size:
            raise self._passing(file.name, f"{out.tell():,} of {file.size:,} bytes arrived")

    def _range(self, file: RemoteFile, begin: int) -> bytes:
        assert file.size is not None
        end = min(begin + CHUNK_BYTES, file.size)
        with self._explained(file.name):
            chunk = bytes(self.fs.cat_file(file.path, start=begin, end=end))
        if len(chunk) != end - begin:
            raise self._passing(file.name, f"{len(chunk):,} of {end - begin:,} bytes arrived")
        return chunk

    # --- writing

    def write(self, name: str, content: bytes) -> None:
        """Write a small file so that a reader finds the old content or the new, and read it back."""
        with self._explained(name):
            if self.is_local:
                self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
                self.fs.pipe_file(self.path(f"{name}.part"), content)
                self.fs.mv(self.path(f"{name}.part"), self.path(name))
            else:
                self.fs.pipe_file(self.path(name), content)
        if self._read_once(name) != content:
            raise self._passing(name, "the file did not arrive as it was sent")

    def upload(self, local: Path, name: str) -> str:
        """Copy a file, check that it arrived as it is here, and return its SHA-256.

        Stores tell a size and mostly an MD5. Where they tell no MD5 that can be compared, the copy is read back.
        """
        sent = _digests(local)
        with self._explained(name):
            if self.is_local:
                self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
            options = {"chunksize": PART_BYTES} if scheme_of(self.url) == "s3" else {}
            self.fs.put_file(str(local), self.path(name), **options)
        found = self._stat(name)
        if found is None or found.get("size") != sent.size:
            raise self._passing(name, "the file did not arrive whole")
        if not sent.md5s & _md5s(found) and self._remote_sha256(name, sent.size) != sent.sha256:
            raise self._passing(name, "the file arrived damaged")
        return sent.sha256

    def _remote_sha256(self, name: str, size: int) -> str:
        digest, file = hashlib.sha256(), RemoteFile(name, self.path(name), size, "")
        for begin in range(0, size, CHUNK_BYTES):
            digest.update(with_retries(lambda: self._range(file, begin)))  # noqa: B023 - called at once
        return digest.hexdigest()

    def delete(self, name: str) -> None:
        """Delete a file; it may be gone already."""
        with self._explained(name), suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def delete_folder(self, name: str) -> None:
        """Delete the files below a folder, which keeps no name in an object store without them."""
        for file in self.files(name):
            self.delete(file)
        if self.is_local:
            with self._explained(name), suppress(OSError):
                self.fs.rmdir(self.path(name))

    # --- errors

    def _passing(self, name: str, what: str) -> StoreError:
        return StoreError(f"{what}.", where=join(self.url, name), fix="It is tried again.", passing=True)

    def _explained(self, name: str) -> _Explained:
        return _Explained(join(self.url, name) if name else self.url)


class _Explained:
    """A context that turns every error of a store into a StoreError."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise explain(self.url, error) from None


def with_retries(read: Callable[[], T]) -> T:
    """Return what `read` returns; repeat it after errors that may pass, with longer and longer pauses.

    A package may have repeated the request for so long already (gcsfs: half a minute) that this does not do it, too.
    """
    end = time.monotonic() + _RETRIES_S
    for attempt in range(_TRIES - 1):
        try:
            return read()
        except StoreError as error:
            if not error.passing or time.monotonic() > end:
                raise
        time.sleep(_PAUSE_S * 2**attempt)
    return read()


# ----------------------------------------------------------------------------------------------------
# Digests: what a store tells of a file, and what that must be.


@dataclass(frozen=True)
class _Sent:
    size: int
    sha256: str
    md5s: frozenset[str]  # of the whole file, and as S3 computes it for an upload in parts


def _digests(path: Path) -> _Sent:
    whole, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    parts, part, filled = [], hashlib.md5(usedforsecurity=False), 0
    with open(path, "rb") as file:
        while chunk := file.read(min(1 << 20, PART_BYTES - filled)):
            for digest in (whole, sha256, part):
                digest.update(chunk)
            size, filled = size + len(chunk), filled + len(chunk)
            if filled == PART_BYTES:
                parts.append(part.digest())
                part, filled = hashlib.md5(usedforsecurity=False), 0
    parts += [part.digest()] if filled else []
    composite = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return _Sent(size, sha256.hexdigest(), frozenset({whole.hexdigest(), f"{composite}-{len(parts)}"}))


def _md5s(found: dict[str, Any]) -> set[str]:
    """Return the MD5s that a store tells of a file. An encrypted bucket tells other digests under the same name."""
    md5s = {str(found[key]).strip('"') for key in ("ETag", "etag") if found.get(key)}
    with suppress(ValueError, TypeError):
        if encoded := found.get("md5Hash"):  # Google's
            md5s.add(base64.b64decode(encoded).hex())
    return md5s


# ----------------------------------------------------------------------------------------------------
# Errors. Each package has its own kinds; they are told apart by their names, because none of them is installed always.


_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
}
_CREDENTIALS_FIX = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`.",
}
_REFUSED_CODES = (
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AllAccessDisabled",
    "AccountProblem",
)


def explain(url: str, error: Exception) -> StoreError:
    """Return what an error of a store means, in one sentence with the fix."""
    scheme = scheme_of(url)
    chain = list(_causes(error))
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    text = " ".join(str(one) for one in chain)
    credentials = _CREDENTIALS_FIX.get(scheme, "Check its permissions.")
    if "TimeTooSkewed" in text or "Signature not yet current" in text or "request time and the current time" in text:
        return _clock_error(url)
    if names & _NO_CREDENTIALS:
        return StoreError(f"no credentials for {scheme}:// were found.", where=url, fix=credentials)
    if "NoSuchBucket" in text or "bucket does not exist" in text.lower():
        name = urlsplit(url).netloc
        fix = "Check its name, or create it."
        return StoreError(f"the bucket {name} does not exist.", where=url, fix=fix)
    if isinstance(error, FileNotFoundError):
        return StoreError("there is no such file.", where=url, fix="Check the address.", missing=True)
    if any(code in text for code in _REFUSED_CODES):
        code = next(code for code in _REFUSED_CODES if code in text)
        return StoreError(f"the store refuses access ({code}).", where=url, fix=credentials)
    if isinstance(error, PermissionError) or re.search(r"\b(401|403)\b", text):
        if _clocks_differ(chain):  # the answer to a HEAD request has no text that names the reason
            return _clock_error(url)
        return StoreError("the store refuses access.", where=url, fix=credentials)
    first = (redact(str(error)).strip().splitlines() or [""])[0][:200].rstrip(".") or type(error).__name__
    fix = "Check the network and the address."
    return StoreError(f"the store cannot be used ({type(error).__name__}: {first}).", where=url, fix=fix, passing=True)


def _clock_error(url: str) -> StoreError:
    fix = "Set the clock of this machine (`timedatectl set-ntp true`)."
    return StoreError("the store refuses the clock of this machine.", where=url, fix=fix, passing=True)


def _clocks_differ(chain: list[BaseException]) -> bool:
    """Return whether the store's clock, as the date of its answer tells it, differs too much for a signature."""
    for error in chain:
        answer = getattr(error, "response", None)  # of botocore
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}) if isinstance(answer, dict) else {}
        with suppress(TypeError, ValueError):
            told = parsedate_to_datetime(str(headers.get("date"))).timestamp()
            return abs(told - time.time()) > _CLOCK_TOLERANCE_S
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
