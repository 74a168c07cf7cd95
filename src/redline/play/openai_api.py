"""An API in the form of OpenAI's (`/v1/models`, `/v1/chat/completions`, `/v1/completions`), for editors and evaluation.

What a request asks for and redline does not do is refused by name, not ignored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from werkzeug.wrappers import Request, Response

from redline.data.chat import USER, Message
from redline.jobs.objective import Sampling
from redline.jobs.streaming import LENGTH, STOP, Ask, Finished, Section, Token, Transcript
from redline.play.app import (
    MOST_ALTERNATIVES,
    MOST_TOKENS,
    PlayApp,
    RefusedError,
    checked_messages,
    checked_number,
    checked_text,
    client_waits,
    event_stream,
    json_response,
    read_json,
    sse,
)
from redline.play.models import PlayModel
from redline.play.worker import Failed, Ticket, Waiting

_CHAT_TOKENS, _TEXT_TOKENS = 1024, 16  # unless max_tokens is given; OpenAI's default of a completion is 16
_MOST_STOPS = 4
_IGNORED = {"user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"}  # change no text
_READ = {"model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "max_tokens", "logprobs"}
_READ_CHAT = _READ | {"messages", "max_completion_tokens", "top_logprobs"}
_READ_TEXT = _READ | {"prompt"}
# Parameters with a value that means nothing is asked for.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def answer_api(app: PlayApp, request: Request) -> Response:
    if request.path == "/v1/models":
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "redline"} for name in app.models]
        return json_response({"object": "list", "data": rows})
    if request.path == "/v1/chat/completions":
        return _complete(app, request, chat=True)
    if request.path == "/v1/completions":
        return _complete(app, request, chat=False)
    name = request.path.removeprefix("/v1/models/")
    if name in app.models:
        return json_response({"id": name, "object": "model", "created": 0, "owned_by": "redline"})
    raise RefusedError(404, f"There is no {request.path} here.")


def api_error(refused: RefusedError) -> Response:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": refused.message, "type": kind, "param": None, "code": None}
    return json_response({"error": error}, refused.status)


@dataclass(frozen=True)
class _Asked:
    model: PlayModel
    ask: Ask
    how: Sampling
    stops: tuple[str, ...]
    chat: bool
    logprobs: int | None  # alternatives beside each token
    usage: bool  # a stream ends with the counts of tokens


def _complete(app: PlayApp, request: Request, *, chat: bool) -> Response:
    body = read_json(request)
    asked = _parse(app, body, chat)
    ticket = app.submit(lambda: asked.model.stream(asked.ask, asked.how))
    answer = _Answer(asked, ticket, lambda: client_waits(request))
    if body.get("stream"):
        return event_stream(answer.stream(), ticket)
    try:
        return answer.whole()
    finally:
        ticket.cancel()


def _parse(app: PlayApp, body: dict[str, Any], chat: bool) -> _Asked:
    _refuse_unknown(body, _READ_CHAT if chat else _READ_TEXT)
    name = body.get("model")
    model = app.models.get(name) if isinstance(name, str) else None
    if model is None:
        raise RefusedError(404, f"There is no model {name!r}; /v1/models lists them.")
    panel = model.chat_panel if chat else model.text_panel
    if panel is None:
        other = "/v1/completions" if chat else "/v1/chat/completions"
        does = "continues texts and answers no messages" if chat else "answers questions and continues no texts"
        raise RefusedError(400, f"{name} {does}: use {other}.")
    if chat:
        messages = checked_messages(body.get("messages"))
    else:
        prompt = body.get("prompt", "")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        messages = (Message(USER, checked_text(prompt, "prompt")),)
    logprobs = _alternatives(body, chat)
    # The length of some answers is fixed, so that a default must not refuse them; a length that is asked for may.
    most = body.get("max_completion_tokens")
    most = body.get("max_tokens") if most is None else most
    tokens = _CHAT_TOKENS if chat else _TEXT_TOKENS
    tokens = tokens if most is None else checked_number(most, "max_tokens", int, 1, MOST_TOKENS)
    how = Sampling(
        1,
        tokens,
        _number(body, "seed", int, 0, 2**63 - 1, secrets.randbelow(1 << 31)),
        _number(body, "temperature", float, 0, 10, 1.0),
        _number(body, "top_k", int, 1, 1 << 20, None),
        _number(body, "top_p", float, 0.01, 1, 1.0),
    )
    options = body.get("stream_options") or {}
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return _Asked(model, Ask(panel.name, messages, alternatives=logprobs), how, _stops(body), chat, logprobs, usage)


def _refuse_unknown(body: dict[str, Any], read: set[str]) -> None:
    for name, value in body.items():
        if name in read or name in _IGNORED or value is None:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise RefusedError(400, f"{name} is not supported.")


def _number(body: dict[str, Any], name: str, kind: type, least: float, most: float, default: Any) -> Any:
    value = body.get(name)
    return default if value is None else checked_number(value, name, kind, least, most)


def _alternatives(body: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        return _number(body, "logprobs", int, 0, MOST_ALTERNATIVES, None)
    wanted = body.get("logprobs")
    if wanted not in (None, False, True):
        raise RefusedError(400, "logprobs must be true or false.")
    return _number(body, "top_logprobs", int, 0, MOST_ALTERNATIVES, 0) if wanted else None


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    given = body.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise RefusedError(400, f"stop must be a text or a list of at most {_MOST_STOPS}.")
    return tuple(stop for stop in (checked_text(one, "stop") for one in stops) if stop)


class StopTexts:
    """Ends a text before the first of some texts, and holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def add(self, text: str) -> str:
        """Return the text that can be shown."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found, shown, self._held = True, self._held[: min(places)], ""
            return shown
        keep = max((self._beginning(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning(self, stop: str) -> int:
        """Return how many characters at the end of the held text begin `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


@dataclass(frozen=True)
class _Piece:
    """A part of the answer; the last one has a reason."""

    text: str
    token: Token | None = None
    reason: str | None = None


class _Answer:
    def __init__(self, asked: _Asked, ticket: Ticket, client_waits: Callable[[], bool]) -> None:
        self.asked, self.ticket, self._client_waits = asked, ticket, client_waits
        self.prompt_tokens = self.tokens = 0
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._about = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model.name,
        }

    def pieces(self) -> Iterator[_Piece | Failed | Waiting]:
        """Yield the answer's text in pieces, the last of which has the reason why it ended.

        Between two pieces there may be many events and seconds: the positions of a diffusion model are unmasked in any
        order. So each event looks whether the client still waits.
        """
        stops, transcript, counted, reason = StopTexts(self.asked.stops), Transcript(), 0, STOP
        for message in self.ticket.messages():
            if not self._client_waits():
                return
            if isinstance(message, (Waiting, Failed)):
                yield message
                if isinstance(message, Failed):
                    return
                continue
            if isinstance(message, Section):
                self.prompt_tokens = message.prompt_tokens
            elif isinstance(message, Token):
                counted, self.tokens = counted + 1, self.tokens + 1
            elif isinstance(message, Finished):
                reason, self.tokens, counted = message.reason, self.tokens + message.tokens - counted, 0
            if isinstance(message, (Token, Finished)):
                token = message if isinstance(message, Token) else None
                yield _Piece(stops.add(transcript.add(message)), token)
            if stops.found:
                self.ticket.cancel()
                reason = STOP
                break
        yield _Piece(stops.finish(), reason="length" if reason == LENGTH else "stop")

    def whole(self) -> Response:
        parts, tokens, reason = list[str](), list[Token](), None
        for piece in self.pieces():
            if isinstance(piece, Failed):
                raise RefusedError(400, piece.message)
            if isinstance(piece, _Piece):
                parts.append(piece.text)
                tokens += [piece.token] if piece.token else []
                reason = piece.reason
        text = "".join(parts)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": self._logprobs(tokens)}
        if self.asked.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return json_response({**self._about, "object": kind, "choices": [choice], "usage": self._usage()})

    def stream(self) -> Iterator[str]:
        if self.asked.chat:
            yield self._chunk(delta={"role": "assistant", "content": ""})
        for piece in self.pieces():
            if isinstance(piece, Waiting):
                yield ": waiting\n\n"  # a comment: writing it shows whether the reader is still there
            elif isinstance(piece, Failed):
                yield sse({"error": {"message": piece.message, "type": "server_error", "param": None, "code": None}})
                return
            else:
                tokens = [piece.token] if piece.token else []
                if piece.text or tokens:
                    yield self._chunk({"content": piece.text}, piece.text, tokens)
                if piece.reason:
                    yield self._chunk({}, "", [], piece.reason)
        if self.asked.usage:
            yield sse({**self._head(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _head(self) -> dict[str, Any]:
        return {**self._about, "object": "chat.completion.chunk" if self.asked.chat else "text_completion"}

    def _chunk(
        self, delta: dict[str, Any], text: str = "", tokens: list[Token] | None = None, reason: str | None = None
    ) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": self._logprobs(tokens or [])}
        choice |= {"delta": delta} if self.asked.chat else {"text": text}
        return sse({**self._head(), "choices": [choice]})

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        known = [(token, token.logprob) for token in tokens if token.logprob is not None]
        if self.asked.logprobs is None or not known:
            return None
        if self.asked.chat:
            content = [
                {**_entry(token.text, value), "top_logprobs": [_entry(*pair) for pair in token.likeliest]}
                for token, value in known
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token.text for token, _ in known],
            "token_logprobs": [value for _, value in known],
            "top_logprobs": [dict(token.likeliest) for token, _ in known],
            "text_offset": [],
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
