"""The page of `redline play` and its addresses: the models, and a stream of events for each request.

The page draws events by their kind and knows no job. An event is one line of JSON in a server-sent event. A closed
connection cancels its request.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from werkzeug.wrappers import Request, Response

from redline.data.chat import ASSISTANT, SYSTEM, USER, Message
from redline.errors import redact
from redline.jobs.objective import Sampling
from redline.jobs.streaming import Ask
from redline.play.models import PlayModel
from redline.play.worker import Failed, QueueFullError, Ticket, Waiting, Worker
from redline.play.worker import Message as WorkerMessage
from redline.runs.live.local_server import LocalApp, Server, open_local_server, text_response
from redline.runs.live.server import page_files

MOST_BYTES = 1 << 20  # of a request
MOST_TOKENS, MOST_MESSAGES, MOST_ALTERNATIVES = 8192, 256, 20
_NAMES = ("play.css", "play.js", "sections.js", "stream.js")
_SHARED = ("/style.css", "/icon.svg")  # with the page of `redline watch`
_ALTERNATIVES = 5  # tokens that the page shows beside each token
_NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "tokens": (int, 1, MOST_TOKENS),
    "temperature": (float, 0, 10),
    "top_k": (int, 1, 1 << 20),
    "top_p": (float, 0.01, 1),
    "seed": (int, 0, 2**63 - 1),
}


class RefusedError(Exception):
    """A request that is not answered: a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class PlayApp(LocalApp):
    verb = "play"
    methods = ("GET", "HEAD", "POST")

    def __init__(
        self,
        models: Sequence[PlayModel],
        token: str | None = None,
        *,
        loopback: bool = True,
        cookie: str = "redline",
        worker: Worker | None = None,
    ) -> None:
        folder = files("redline.play") / "page"
        shared = page_files()
        own = {f"/{name}": (folder / name).read_bytes() for name in _NAMES}
        page = {"/": (folder / "index.html").read_bytes()} | {name: shared[name] for name in _SHARED}
        super().__init__(page | own, token, loopback=loopback, cookie=cookie)
        self.models = {model.name: model for model in models}
        self.worker = worker or Worker()

    def route(self, request: Request) -> Response | None:
        from redline.play.openai_api import answer_api, api_error  # it imports this module

        is_api = request.path.startswith("/v1/")
        try:
            if is_api:
                return answer_api(self, request)
            if request.path == "/api/models":
                return json_response({"models": [model.as_dict() for model in self.models.values()]})
            if request.path == "/api/stream":
                model, ask, how = _parse_ask(read_json(request), self.models)
                ticket = self.submit(lambda: model.stream(ask, how))
                return event_stream(_page_events(ticket), ticket)
        except RefusedError as refused:
            if is_api:
                return api_error(refused)
            return text_response(refused.status, refused.message)
        return None

    def submit(self, work: Callable[[], Iterator[Any]]) -> Ticket:
        try:
            return self.worker.submit(work)
        except QueueFullError:
            raise RefusedError(503, "Too many requests wait already. Try again later.") from None


def open_play_server(models: Sequence[PlayModel], host: str, port: int | None, guarded: bool) -> tuple[Server, str]:
    """Return a listening server of the page, and the address to open."""

    def make_app(token: str | None, loopback: bool, cookie: str) -> PlayApp:
        return PlayApp(models, token, loopback=loopback, cookie=cookie)

    return open_local_server(make_app, host, port, guarded)


# ----------------------------------------------------------------------------------------------------
# Requests.


def read_json(request: Request) -> dict[str, Any]:
    """Return the JSON object of a POST request; refuse any other, and those of other web pages."""
    if request.method != "POST":
        raise RefusedError(405, "Only POST is supported here.")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.environ.get("HTTP_HOST", ""):
        raise RefusedError(403, "Requests of other web pages are not answered.")
    # A web page elsewhere can send a form without asking the browser first, but no JSON.
    if request.mimetype != "application/json":
        raise RefusedError(415, "The request must be JSON (Content-Type: application/json).")
    length = request.content_length
    if length is None:
        raise RefusedError(411, "The request must state its length (Content-Length).")
    if length > MOST_BYTES:
        raise RefusedError(413, f"The request has {length:,} bytes; at most {MOST_BYTES:,} are read.")
    try:
        found = json.loads(request.get_data())
    except (ValueError, RecursionError):
        raise RefusedError(400, "The request is not valid JSON.") from None
    if not isinstance(found, dict):
        raise RefusedError(400, "The request must be a JSON object.")
    return found


def checked_text(value: Any, name: str) -> str:
    """Return a text that a tokenizer accepts; lone surrogates are replaced."""
    if not isinstance(value, str):
        raise RefusedError(400, f"{name} must be a text.")
    return value.encode("utf-8", "replace").decode("utf-8")


def checked_number(value: Any, name: str, kind: type, least: float, most: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise RefusedError(400, f"{name} must be {'a number' if kind is float else 'a whole number'}.")
    if not least <= value <= most:
        raise RefusedError(400, f"{name} is {value}; it must be from {least:g} to {most:g}.")
    return kind(value)


def checked_messages(value: Any, name: str = "messages") -> tuple[Message, ...]:
    """Return the turns of a conversation, the last of which is the user's."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise RefusedError(400, f"{name} must be a list of objects with role and content.")
    if len(value) > MOST_MESSAGES:
        raise RefusedError(400, f"{name} has {len(value)} turns; at most {MOST_MESSAGES} are read.")
    turns = tuple(Message(_role(turn.get("role")), _content(turn.get("content"))) for turn in value)
    if turns[-1].role != USER:
        raise RefusedError(400, f"the last of {name} must be the user's.")
    return turns


def _role(value: Any) -> str:
    role = {"developer": SYSTEM}.get(value, value) if isinstance(value, str) else None
    if role not in (SYSTEM, USER, ASSISTANT):
        raise RefusedError(400, "role must be system, user or assistant.")
    return role


def _content(value: Any) -> str:
    """Return the text of a turn, which some clients send in parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        return "".join(checked_text(part, "content") for part in parts)
    return checked_text(value, "content")


def _parse_ask(body: dict[str, Any], models: Mapping[str, PlayModel]) -> tuple[PlayModel, Ask, Sampling]:
    if unknown := set(body) - {"model", "panel", "messages", "sampling", "choices", "fields"}:
        raise RefusedError(400, f"{min(unknown)} is not part of a request.")
    model = models.get(checked_text(body.get("model"), "model"))
    if model is None:
        raise RefusedError(404, "There is no such model.")
    panel = model.panel(checked_text(body.get("panel"), "panel"))
    if panel is None:
        raise RefusedError(404, "The model has no such panel.")
    choices, fields = body.get("choices", {}), body.get("fields", {})
    given = body.get("sampling", {})
    if not all(isinstance(part, dict) for part in (choices, fields, given)):
        raise RefusedError(400, "sampling, choices and fields must be objects.")
    for choice in panel.choices:
        if choices.get(choice.name, choice.values[0]) not in choice.values:
            raise RefusedError(400, f"{choice.name} must be one of {', '.join(choice.values)}.")
    known = {name for name, _ in panel.fields}
    sampling = {
        name: checked_number(given[name], name, *bounds)
        for name, bounds in _NUMBERS.items()
        if given.get(name) is not None and name in panel.controls
    }
    ask = Ask(
        panel.name,
        checked_messages(body.get("messages")),
        {choice.name: choices[choice.name] for choice in panel.choices if choice.name in choices},
        {name: checked_text(text, name) for name, text in fields.items() if name in known},
        _ALTERNATIVES,
    )
    return model, ask, Sampling(**sampling)


# ----------------------------------------------------------------------------------------------------
# Answers.


def json_response(value: Any, status: int = 200) -> Response:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    return Response(body, status=status, content_type="application/json")


def event_stream(lines: Iterator[str], ticket: Ticket) -> Response:
    """Answer with server-sent events; a connection that closes cancels the request."""

    def chunks() -> Iterator[bytes]:
        try:
            for line in lines:
                yield line.encode("utf-8", "replace")
        finally:
            ticket.cancel()

    response = Response(chunks(), content_type="text/event-stream; charset=utf-8")
    response.call_on_close(ticket.cancel)  # also if the connection closes before the first chunk
    return response


def client_waits(request: Request) -> bool:
    """Return whether the client still holds the connection. An answer in one piece cannot notice it by writing."""
    connection = request.environ.get("werkzeug.socket")
    if connection is None:
        return True
    ready = select.poll()
    ready.register(connection, select.POLLIN)
    try:
        return not ready.poll(0) or connection.recv(1, socket.MSG_PEEK) != b""
    except OSError:
        return False


def sse(value: Any) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'), allow_nan=False)}\n\n"


def _page_events(ticket: Ticket) -> Iterator[str]:
    for message in ticket.messages():
        yield sse(_page_event(message))
    yield sse({"kind": "done"})


def _page_event(message: WorkerMessage) -> dict[str, Any]:
    if isinstance(message, Waiting):
        return {"kind": "waiting", "ahead": message.ahead}
    if isinstance(message, Failed):
        return {"kind": "failed", "message": redact(message.message)}
    return message.as_dict()
