"""A hub on the loopback interface: the part of the Hugging Face hub's HTTP API that redline uses, with faults.

A fault is a word in `faults` for the next request whose path contains it: a status to answer with, `reset` to close the
connection without an answer, or `lost` to do what is asked for and then close the connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_CANARYtokenThatMustNotLeak"


@dataclass
class Repository:
    private: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)  # newest last

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1] if self.commits else None
        return next((commit for commit in self.commits if commit[0].startswith(revision)), None)

    def commit(self, changes: dict[str, bytes]) -> str:
        files = {**(self.commits[-1][1] if self.commits else {}), **changes}
        digest = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits.append((digest, files))
        return digest


class FakeHub:
    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}  # (models or datasets, owner/name)
        self.objects: dict[str, bytes] = {}  # by SHA-256
        self.faults: list[tuple[str, int | str]] = []  # (part of the path, what happens), each for one request
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def count(self, method: str, part: str) -> int:
        return sum(verb == method and part in path for verb, path in self.requests)

    def take_fault(self, path: str) -> int | str | None:
        for place, (part, fault) in enumerate(self.faults):
            if part in path:
                del self.faults[place]
                return fault
        return None


@contextmanager
def serve() -> Iterator[FakeHub]:
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.hub.requests.append((self.command, path))
        fault = self.hub.take_fault(path)
        if fault == "reset":
            self.close_connection = True
            self.connection.close()
            return None
        if isinstance(fault, int):
            return self._reply(fault, {"error": f"injected, for {self.headers.get('authorization')}"})
        status, content, headers = self._answer(path.strip("/").split("/"), body)
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return None
        return self._reply(status, content, headers)

    do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _answer(self, parts: list[str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        hub, writes = self.hub, self.headers.get("authorization") == f"Bearer {TOKEN}"
        if parts[:2] == ["api", "whoami-v2"]:
            return 200, {"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}}, {}
        if parts[:2] == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}, {}
        if parts[0] == "upload":
            hub.objects[parts[1]] = body
            return (200 if hashlib.sha256(body).hexdigest() == parts[1] else 400), {}, {}
        if self.command != "GET" and self.command != "HEAD" and not writes:
            return 403, {"error": "no"}, {}
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            kind = f"{asked.get('type', 'model')}s"
            key = (kind, f"{owner}/{PurePosixPath(asked['name']).name}")
            if key in hub.repositories:
                return 409, {"url": f"{hub.url}/{key[1]}"}, {}
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            hub.repositories[key] = Repository(private)
            hub.repositories[key].commit({".gitattributes": b""})
            return 200, {"url": f"{hub.url}/{key[1]}", "id": key[1], "name": key[1]}, {}
        if len(parts) > 3 and parts[-3:] == ["lfs", "objects", "batch"]:
            return 200, self._batch(json.loads(body)), {"Content-Type": "application/vnd.git-lfs+json"}
        if parts[0] == "api":
            return self._api(parts, body)
        return self._file(parts)

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for entry in asked["objects"]:
            action = {"upload": {"href": f"{self.hub.url}/upload/{entry['oid']}"}}
            known = entry["oid"] in self.hub.objects
            objects.append(entry if known else {**entry, "actions": action})
        return {"transfer": "basic", "objects": objects}

    def _api(self, parts: list[str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        kind, name, rest = parts[1], "/".join(parts[2:4]), parts[4:]
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if rest[:1] == ["preupload"]:
            head = repository.at("main")
            files = [self._mode(entry, head[1] if head else {}) for entry in json.loads(body)["files"]]
            return 200, {"files": files}, {}
        if rest[:1] == ["commit"]:
            changes = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    changes[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    changes[value["path"]] = self.hub.objects[value["oid"]]
            digest = repository.commit(changes)
            url = f"{self.hub.url}/{name}/commit/{digest}"
            return 200, {"success": True, "commitOid": digest, "commitUrl": url, "hookOutput": ""}, {}
        found = repository.at(rest[1] if rest[:1] in (["revision"], ["tree"]) else "main")
        if found is None:
            return 404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
        if rest[:1] == ["tree"]:
            entries = [self._entry(path, data) for path, data in found[1].items()]
            return 200, entries, {}
        siblings = [{"rfilename": path} for path in found[1]]
        about = {"id": name, "modelId": name, "sha": found[0], "private": repository.private, "siblings": siblings}
        return 200, {**about, "tags": [], "downloads": 0, "likes": 0}, {}

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(data), "oid": _git_digest(data)}

    def _mode(self, entry: dict[str, Any], head: dict[str, bytes]) -> dict[str, Any]:
        path, own = entry["path"], head.get(entry["path"])
        large = path.endswith((".safetensors", ".gguf"))
        digest = None if own is None else hashlib.sha256(own).hexdigest() if large else _git_digest(own)
        mode = "lfs" if large else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, **({"oid": digest} if digest else {})}

    def _file(self, parts: list[str]) -> tuple[int, Any, dict[str, str]]:
        kind, parts = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
        repository = self.hub.repositories.get((kind, "/".join(parts[:2])))
        if repository is None or parts[2] != "resolve":
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        found = repository.at(parts[3])
        if found is None:
            return 404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
        data = found[1].get("/".join(parts[4:]))
        if data is None:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        headers = {"ETag": f'"{_git_digest(data)}"', "X-Repo-Commit": found[0], "Accept-Ranges": "bytes"}
        if (wanted := self.headers.get("range", "")).startswith("bytes=") and wanted[6:].endswith("-"):
            begin = int(wanted[6:-1])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            return 206, data[begin:], headers
        return 200, data, {**headers, "Content-Type": "application/octet-stream"}


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
