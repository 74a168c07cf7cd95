"""What the local pages of redline share: a server that is reachable only from this machine by default, or with a token.

No part of a request becomes a path: files are looked up by name among those already known.
"""

from __future__ import annotations

import getpass
import hmac
import io
import ipaddress
import os
import re
import secrets
import shlex
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.wrappers import Request, Response

from redline.errors import UserError

LOOPBACK = "127.0.0.1"
FIRST_PORT, _PORTS = 8770, 20
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LONGEST_QUERY = 8192
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^\s:@/\[\]]+))(?::\d{0,5})?")
MAX_CONNECTIONS = 64  # at a time; a browser opens up to six, and each holds a thread
_REQUEST_S = 10.0  # for a whole request to arrive
_ANSWER_S = 30.0  # for the browser to receive the answer
_FINISH_S = 1.0  # for the last answers, after Ctrl-C
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class LocalApp(ABC):
    """A WSGI application of fixed files and a few addresses of its own. With a token, requests without it are refused.

    On loopback only requests to this machine's own names are answered. Otherwise a web page could point a name of its
    own to 127.0.0.1 and read the runs through the user's browser (DNS rebinding).
    """

    verb: ClassVar[str]  # of `redline`, for messages
    methods: ClassVar[tuple[str, ...]] = ("GET", "HEAD")

    def __init__(
        self, files: Mapping[str, bytes], token: str | None = None, *, loopback: bool = True, cookie: str = "redline"
    ) -> None:
        """Serve `files`, by their address. The ending of an address is the kind of the file; "/" is a page."""
        self._files, self._token, self._loopback, self._cookie = dict(files), token, loopback, cookie

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        response = self._guard(request) or self.route(request) or self._file(request)
        response.headers.update(_HEADERS)
        return response(environ, start_response)

    @abstractmethod
    def route(self, request: Request) -> Response | None:
        """Answer a request to an address of this application; None for the fixed files."""

    def _guard(self, request: Request) -> Response | None:
        if request.method not in self.methods:
            allowed = " and ".join(method for method in self.methods if method != "HEAD")
            verb = "is" if allowed == "GET" else "are"
            return text_response(405, f"Only {allowed} {verb} supported.", {"Allow": ", ".join(self.methods)})
        if len(request.query_string) > _LONGEST_QUERY:
            return text_response(414, "The query is too long.")
        host = request.environ.get("HTTP_HOST", "")
        if "@" in host:
            return text_response(400, "The Host header must hold a host and a port, without a user.")
        if self._loopback and not is_own_name(host):
            return text_response(421, "Only requests to localhost and 127.0.0.1 are answered.")
        if self._token is not None:
            given = request.args.get("token") if request.path == "/" else None
            if given is not None:
                return self._admit(given)
            if not self._is_authorized(request):
                message = f"The token is missing: open the address that `redline {self.verb}` printed."
                return text_response(401, message)
        return None

    def _file(self, request: Request) -> Response:
        content = self._files.get(request.path)
        if content is None:
            return text_response(404, "Page not found.")
        if request.method not in ("GET", "HEAD"):
            return text_response(405, "Only GET is supported.", {"Allow": "GET, HEAD"})
        kind = _KINDS["html" if request.path == "/" else request.path.rpartition(".")[2]]
        return Response(content, content_type=f"{kind}; charset=utf-8")

    def _admit(self, given: str) -> Response:
        """Move the token from the address to a cookie, so that it does not stay in the browser's history."""
        if not self._is_token(given):
            return text_response(401, f"The token is wrong: open the address that `redline {self.verb}` printed.")
        response = Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, given, httponly=True, samesite="Lax")
        return response

    def _is_authorized(self, request: Request) -> bool:
        scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
        credentials = [request.cookies.get(self._cookie, ""), credential if scheme.lower() == "bearer" else ""]
        return any(self._is_token(text) for text in credentials)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), (self._token or "").encode())


def text_response(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(f"{text}\n", status=status, headers=headers, content_type="text/plain; charset=utf-8")


def is_own_name(host: str) -> bool:
    """Return whether a Host header names this machine itself; the port may be a tunnel's."""
    if not (found := _HOST.fullmatch(host)):
        return False
    name = found["address"] or found["name"]
    if name.lower().rstrip(".") == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


def is_loopback(host: str) -> bool:
    """Return whether a socket bound to this address can be reached only from this machine."""
    return is_own_name(f"[{host}]" if ":" in host else host)


class _Deadline(io.RawIOBase):
    """Read from a socket until a point in time. With a timeout per read, a client that sends a byte now and then could
    hold a thread forever."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._end = connection, 0.0

    def readable(self) -> bool:
        return True

    def within(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Deadline(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.within(_REQUEST_S)
        super().handle_one_request()

    def run_wsgi(self) -> None:
        self.connection.settimeout(_ANSWER_S)  # applies to each write, and the answer is one write
        super().run_wsgi()

    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing: the terminal shows the address of the page, and a request may hold the token."""

    def version_string(self) -> str:
        return "redline"


class Server(ThreadedWSGIServer):
    """A thread per connection, at most MAX_CONNECTIONS at a time; further connections are answered with 503."""

    def __init__(self, *how: Any, **options: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*how, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started, so it will not release its place
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_answers(self, seconds: float) -> None:
        """Wait until no connection is being answered, but no longer than this."""
        end = time.monotonic() + seconds
        for _ in range(MAX_CONNECTIONS):
            if not self._free.acquire(timeout=max(0.0, end - time.monotonic())):
                return


MakeApp = Callable[[str | None, bool, str], "LocalApp"]  # token, loopback, name of the cookie


def open_local_server(make_app: MakeApp, host: str, port: int | None, guarded: bool) -> tuple[Server, str]:
    """Return a listening server and the address to open. Without a port, the first free one from FIRST_PORT on."""
    loopback = is_loopback(host)
    token = secrets.token_urlsafe(24) if guarded or not loopback else None
    listening = _listen(host, range(FIRST_PORT, FIRST_PORT + _PORTS) if port is None else [port])
    with listening:
        bound = listening.getsockname()[1]
        # Browsers share cookies between ports, so each server needs a cookie name of its own.
        server = Server(host, bound, make_app(token, loopback, f"redline-{bound}"), _Handler, fd=listening.fileno())
    return server, f"http://{_public_name(host)}:{bound}/" + (f"?token={token}" if token else "")


def check_address(host: str, port: int | None) -> None:
    """Raise the UserError of `open_local_server` for an address that is taken, before something long is done."""
    if port:
        _listen(host, [port]).close()


def serve_until_interrupted(server: Server) -> None:
    """Answer requests until Ctrl-C, and close the socket. Call it on the main thread.

    A KeyboardInterrupt could arrive anywhere, for instance just after a thread was started for a connection:
    socketserver would close the connection under that thread, whose traceback could then deadlock with the interpreter
    that is shutting down. So Ctrl-C only asks the loop to end. A second one raises KeyboardInterrupt, as usual.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for the loop, which runs here

    previous = signal.signal(signal.SIGINT, stop)
    try:
        server.serve_forever()
        server.finish_answers(_FINISH_S)
    finally:
        signal.signal(signal.SIGINT, previous)


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failed = OSError("no port is free")
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=64)
        except (OSError, OverflowError) as error:
            failed = error if isinstance(error, OSError) else OSError("the highest port is 65535")
    reason = os.strerror(failed.errno) if failed.errno else str(failed)  # its own text repeats the address
    fix = "Set another port with --port (0 takes any free one), or another address of this machine with --host."
    raise UserError(f"The page cannot be served there ({reason}).", where=f"{host}:{port}", fix=fix)


def _public_name(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104 — all addresses: the name of this machine can usually be reached
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


# ----------------------------------------------------------------------------------------------------
# The ssh command that forwards the page to the user's own machine.


def ssh_line(host: str, port: int) -> str:
    """Return `ssh -N -L …` in an ssh session; empty elsewhere, and if the page can be reached over the network."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if not connection or not is_loopback(host):
        return ""
    server, at = connection[2:4] if len(connection) == 4 else ("", "22")
    try:
        here = str(ipaddress.ip_address(server.partition("%")[0]))
    except ValueError:
        here = socket.gethostname()
    target = f"[{host}]" if ":" in host else host
    words = ["ssh", "-N", "-L", f"{port}:{target}:{port}", *([] if at == "22" else ["-p", at]), f"{_user()}@{here}"]
    return shlex.join(words)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return "USER"
