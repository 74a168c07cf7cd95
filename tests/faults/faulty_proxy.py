"""A proxy between a program and an HTTP server that breaks a share of the requests, as networks and servers do."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = ("reset", "lost answer", "500", "503", "slow", "partial upload", "cut answer", "clock")
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{text}</Message></Error>'
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class FaultyProxy:
    """Listens on the loopback interface and forwards to `port`. `share` of the requests go wrong."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self.target, self.share, self.kinds = port, 0.0, KINDS
        self.faults: Counter[str] = Counter()
        self.requests = 0
        self._random, self._lock = random.Random(seed), threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # type: ignore[method-assign] # clients are killed
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def choose(self) -> str | None:
        with self._lock:
            self.requests += 1
            if self._random.random() >= self.share:
                return None
            kind = self._random.choice(self.kinds)
            self.faults[kind] += 1
            return kind

    def reseed(self, seed: int) -> None:
        self._random.seed(seed)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def log_message(self, *_: Any) -> None:
        return

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _reset(self) -> None:
        """Close the connection with a reset in place of an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, sent: bytes | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body if sent is None else sent)

    def _refuse(self, status: int, code: str, text: str, date: str | None = None) -> None:
        headers = [("Content-Type", "application/xml"), ("Date", date or formatdate(usegmt=True))]
        body = b"" if self.command == "HEAD" else _ERROR.format(code=code, text=text).encode()
        self._answer(status, headers, body)

    def _handle(self) -> None:
        body, fault = self._body(), self.proxy.choose()
        if fault == "reset":
            return self._reset()
        if fault == "500":
            return self._refuse(500, "InternalError", "We encountered an internal error. Please try again.")
        if fault == "503":
            return self._refuse(503, "SlowDown", "Please reduce your request rate.")
        if fault == "clock":
            text = "The difference between the request time and the current time is too large."
            return self._refuse(403, "RequestTimeTooSkewed", text, formatdate(time.time() + 3600, usegmt=True))
        if fault == "slow":
            time.sleep(0.5)
        if fault == "partial upload" and self.command == "PUT":
            body = body[: len(body) // 2]
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault == "lost answer":
            return self._reset()
        if fault == "cut answer" and self.command == "GET" and len(content) > 1:
            self._answer(answer.status, answer.getheaders(), content, content[: len(content) // 2])
            self.wfile.flush()
            return self._reset()
        self._answer(answer.status, answer.getheaders(), content)
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # one for each method of HTTP
            return self._handle
        raise AttributeError(name)
