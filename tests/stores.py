"""A store for tests: an object store in memory, behind gs://, whose requests can be made to fail."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

BUCKET = "bucket"


class ObjectStore(AbstractFileSystem):
    """Objects by path, with the consistency of S3: a write appears whole or not at all, a list is up to date.

    `fault(kind, path)` is called for each request and may raise. It returns how the request goes wrong without an
    error: "partial", "flip", "lost answer", or None.
    """

    protocol = ("gs", "gcs")
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[tuple[str, str]]] = []
    tells_md5: ClassVar[bool] = True
    largest: ClassVar[int] = 0  # bytes of one answer
    fault: ClassVar[Any] = staticmethod(lambda kind, path: None)

    def _request(self, kind: str, path: str) -> str | None:
        type(self).requests.append((kind, path))
        if not path.startswith(f"{BUCKET}/") and path != BUCKET:
            raise OSError("The specified bucket does not exist")
        wrong: str | None = type(self).fault(kind, path)
        return wrong

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        path = self._strip_protocol(path)
        self._request("list", path)
        found = {p: self._entry(p) for p in sorted(self.objects) if p == path or p.startswith(f"{path}/")}
        return found if detail else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self._request("info", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self._entry(path)

    def _entry(self, path: str) -> dict[str, Any]:
        content = self.objects[path]
        md5 = hashlib.md5(content).hexdigest()
        return {
            "name": path,
            "size": len(content),
            "type": "file",
            "etag": md5 if self.tells_md5 else f"opaque-{md5[:6]}",
        }

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        wrong = self._request("read", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        content = self.objects[path][start or 0 : end]
        type(self).largest = max(self.largest, len(content))
        return _spoilt(content, wrong)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        path = self._strip_protocol(path)
        wrong = self._request("write", path)
        self.objects[path] = _spoilt(bytes(value), wrong)
        if wrong == "lost answer":
            raise ConnectionResetError("connection reset by peer")

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        wrong = self._request("delete", path)
        self.objects.pop(path, None)
        if wrong == "lost answer":
            raise ConnectionResetError("connection reset by peer")


def _spoilt(content: bytes, how: str | None) -> bytes:
    if how == "partial":
        return content[: len(content) // 2]
    if how == "flip" and content:
        return bytes([content[0] ^ 1]) + content[1:]
    return content


@contextmanager
def object_store() -> Iterator[type[ObjectStore]]:
    """Put an empty store behind gs://."""
    before = {name: _registry[name] for name in ("gs", "gcs") if name in _registry}
    ObjectStore.objects, ObjectStore.requests, ObjectStore.tells_md5, ObjectStore.largest = {}, [], True, 0
    ObjectStore.fault = staticmethod(lambda kind, path: None)
    for name in ObjectStore.protocol:
        fsspec.register_implementation(name, ObjectStore, clobber=True)
    try:
        yield ObjectStore
    finally:
        for name in ObjectStore.protocol:
            _registry.pop(name, None)
        _registry.update(before)


class RandomFaults:
    """Makes a share of all requests go wrong, in every way that a network and a store have."""

    WRITE = ("reset", "500", "clock", "lost answer", "partial", "flip")
    READ = ("reset", "500", "clock", "partial", "flip")

    def __init__(self, seed: int, share: float) -> None:
        self.random, self.share, self.count = random.Random(seed), share, 0

    def __call__(self, kind: str, path: str) -> str | None:
        if self.random.random() >= self.share:
            return None
        self.count += 1
        wrong = self.random.choice(self.WRITE if kind in ("write", "delete") else self.READ)
        if wrong == "reset":
            raise ConnectionResetError("connection reset by peer")
        if wrong == "500":
            raise OSError("500 We encountered an internal error. Please try again.")
        if wrong == "clock":
            raise PermissionError("RequestTimeTooSkewed: the difference between the request time and ours is too large")
        return wrong if kind in ("write", "delete", "read") else None


class Gate:
    """A fault that makes every write wait until it is opened."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def __call__(self, kind: str, path: str) -> None:
        if kind == "write" and "/checkpoints/" in path:
            self.reached.set()
            self.open.wait(60)
