"""The page's server: a few fixed files and one JSON answer, for this machine alone unless asked otherwise.

It only reads. Nothing of a request becomes a path: files and runs are looked up by name in what is known already.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.resources import files
from typing import Any

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

from redline.errors import UserError
from redline.monitor.live.watched import Watch

LOOPBACK = "127.0.0.1"
FIRST_PORT, _PORTS = 8770, 20
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PAGE = {"/": "index.html"} | {
    f"/{name}": name
    for name in (
        *("style.css", "main.js", "charts.js", "columns.js", "panels.js", "icon.svg"),
        *("uplot.min.js", "uplot.min.css"),
    )
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LONGEST_QUERY = 8192


class App:
    """WSGI. With a token, who does not show it sees nothing. On loopback only this machine's own names are answered:
    a page elsewhere could otherwise point a name of its own here and read along (DNS rebinding)."""

    def __init__(
        self, watch: Watch, token: str | None = None, *, loopback: bool = True, cookie: str = "redline"
    ) -> None:
        self._watch, self._token, self._loopback, self._cookie = watch, token, loopback, cookie
        folder = files("redline.monitor.live") / "page"
        self._files = {url: (folder / name).read_bytes() for url, name in _PAGE.items()}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        response = self._answer(request)
        response.headers.update(_HEADERS)
        return response(environ, start_response)

    def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return _sentence(405, "This only answers GET.", {"Allow": "GET, HEAD"})
        if len(request.query_string) > _LONGEST_QUERY:
            return _sentence(414, "Too long a question.")
        if self._loopback and not is_own_name(request.environ.get("HTTP_HOST", "")):
            return _sentence(421, "This answers to localhost and 127.0.0.1 alone.")
        if self._token is not None:
            given = request.args.get("token") if request.path == "/" else None
            if given is not None:
                return self._admit(given)
            if not self._is_known(request):
                return _sentence(401, "A token is needed: open the address that `redline watch` printed.")
        if request.path == "/api/state":
            return self._state(request)
        content = self._files.get(request.path)
        if content is None:
            return _sentence(404, "There is no such page.")
        kind = _KINDS[_PAGE[request.path].rpartition(".")[2]]
        return Response(content, content_type=f"{kind}; charset=utf-8")

    def _admit(self, given: str) -> Response:
        """From the address into a cookie, so that it does not stay in the browser's history."""
        if not self._is_token(given):
            return _sentence(401, "That is not the token: open the address that `redline watch` printed.")
        response = Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, given, httponly=True, samesite="Lax")
        return response

    def _is_known(self, request: Request) -> bool:
        scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
        shown = [request.cookies.get(self._cookie, ""), credential if scheme.lower() == "bearer" else ""]
        return any(self._is_token(text) for text in shown)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), (self._token or "").encode())

    def _state(self, request: Request) -> Response:
        told = self._watch.answer(request.args.getlist("run"), request.args.getlist("at"))
        body = json.dumps(told, separators=(",", ":"), allow_nan=False, default=str).encode("utf-8", "replace")
        response = Response(body, content_type="application/json")
        if len(body) > 4096 and "gzip" in request.headers.get("Accept-Encoding", ""):
            response.data = gzip.compress(body, compresslevel=1)
            response.headers["Content-Encoding"] = "gzip"
        return response


def _sentence(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(f"{text}\n", status=status, headers=headers, content_type="text/plain; charset=utf-8")


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine itself; the port may be a tunnel's."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


def is_loopback(host: str) -> bool:
    """Whether a socket bound to it can be reached from this machine only."""
    return is_own_name(f"[{host}]" if ":" in host else host)


class _Handler(WSGIRequestHandler):
    timeout = 30  # seconds that a connection may be silent: a slow one holds a thread

    def log(self, type: str, message: str, *args: Any) -> None:
        """The terminal is for the address, and a request may hold a token."""

    def version_string(self) -> str:
        return "redline"


def open_server(watch: Watch, host: str, port: int | None, guarded: bool) -> tuple[BaseWSGIServer, str]:
    """A server that listens, and the address to open. Without a port, the first free one of a few."""
    loopback = is_loopback(host)
    token = secrets.token_urlsafe(24) if guarded or not loopback else None
    listening = _listen(host, range(FIRST_PORT, FIRST_PORT + _PORTS) if port is None else [port])
    with listening:
        bound = listening.getsockname()[1]
        # cookies know no ports: two servers must not share one
        app = App(watch, token, loopback=loopback, cookie=f"redline-{bound}")
        server = make_server(host, bound, app, threaded=True, request_handler=_Handler, fd=listening.fileno())
    return server, f"http://{_shown(host)}:{bound}/" + (f"?token={token}" if token else "")


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failed = OSError("no port is left")
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=64)
        except (OSError, OverflowError) as error:
            failed = error if isinstance(error, OSError) else OSError("ports end at 65535")
    reason = failed.strerror or str(failed)
    fix = "Name another port with --port (0 takes any that is free), or another address of this machine with --host."
    raise UserError(f"The page cannot be served there ({reason}).", where=f"{host}:{port}", fix=fix)


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # all of them: this machine's name is one that may be reached
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
