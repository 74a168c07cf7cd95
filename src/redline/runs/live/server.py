"""The server of the live page: a few fixed files and one JSON answer. It only reads."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files

from werkzeug.wrappers import Request, Response

from redline.runs.live.local_server import LocalApp, Server, open_local_server
from redline.runs.live.watch import Watch

_NAMES = (
    *("style.css", "main.js", "charts.js", "columns.js", "panels.js", "icon.svg"),
    *("uplot.min.js", "uplot.min.css"),
)
_PAGE = {"/": "index.html"} | {f"/{name}": name for name in _NAMES}


def page_files() -> dict[str, bytes]:
    """Return the files of the page by their address."""
    folder = files("redline.runs.live") / "page"
    return {url: (folder / name).read_bytes() for url, name in _PAGE.items()}


class App(LocalApp):
    verb = "watch"

    def __init__(
        self, watch: Watch, token: str | None = None, *, loopback: bool = True, cookie: str = "redline"
    ) -> None:
        super().__init__(page_files(), token, loopback=loopback, cookie=cookie)
        self._watch = watch

    def route(self, request: Request) -> Response | None:
        return self._state(request) if request.path == "/api/state" else None

    def _state(self, request: Request) -> Response:
        state = self._watch.answer(request.args.getlist("run"), request.args.getlist("at"))
        body = json.dumps(state, separators=(",", ":"), allow_nan=False, default=str).encode("utf-8", "replace")
        response = Response(body, content_type="application/json")
        if len(body) > 4096 and "gzip" in request.headers.get("Accept-Encoding", ""):
            response.data = gzip.compress(body, compresslevel=1)
            response.headers["Content-Encoding"] = "gzip"
        return response


def open_server(watch: Watch, host: str, port: int | None, guarded: bool) -> tuple[Server, str]:
    """Return a listening server of the live page, and the address to open."""

    def make_app(token: str | None, loopback: bool, cookie: str) -> App:
        return App(watch, token, loopback=loopback, cookie=cookie)

    return open_local_server(make_app, host, port, guarded)
