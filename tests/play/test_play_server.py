"""The page's server: guarded as that of `redline watch`; bounded requests, one at a time, which can be cancelled."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client

from playing import served
from redline.errors import UserError
from redline.jobs.streaming import Event, Section
from redline.play import worker as worker_module
from redline.play.app import MOST_BYTES, PlayApp, open_play_server
from redline.play.models import PlayModel, open_play_model
from redline.play.worker import Failed, QueueFullError, Waiting, Worker

TOKEN = "a-token-of-some-length"
PAGE = Path(__file__).parents[2] / "src/redline/play/page"
POSTS = ("/api/stream", "/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def own(models: dict[str, PlayModel]) -> Client:
    return Client(PlayApp(list(models.values())))


def body(model: str = "text", panel: str = "complete", text: str = "abc", **more: Any) -> dict[str, Any]:
    sampling = {"tokens": 4, "seed": 1}
    return {
        "model": model,
        "panel": panel,
        "messages": [{"role": "user", "content": text}],
        "sampling": sampling,
        **more,
    }


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_the_page_asks_for_nothing_elsewhere(own: Client) -> None:
    page = own.get("/").text
    asked = re.findall(r"""(?:src|href)="([^"#]+)""", page)
    assert asked
    for address in asked:
        assert own.get(address).status_code == 200, address
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|style=", page), "nothing inline: the policy would stop it"
    for path in (path for path in PAGE.iterdir() if path.suffix in (".js", ".css")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(", text)
        assert own.get(f"/{path.name}").status_code == 200, "what is there is served"


@pytest.mark.parametrize("path", ["/", "/play.js", "/api/models", "/v1/models", "/nothing", *POSTS])
def test_every_answer_carries_its_policy(own: Client, path: str) -> None:
    headers = own.get(path).headers
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("path", ["/", "/api/models", "/v1/models", *POSTS])
@pytest.mark.parametrize("host", ["evil.example:8770", "127.0.0.1.evil.example", "192.168.0.1:8770", ""])
def test_other_names_are_not_answered(own: Client, path: str, host: str) -> None:
    method = "POST" if path in POSTS else "GET"
    assert own.open(path, method=method, json=body(), headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("path", ["/", "/api/models", "/v1/models", "/nothing", *POSTS])
def test_without_the_token_nothing_is_seen(models: dict[str, PlayModel], path: str) -> None:
    guarded = Client(PlayApp(list(models.values()), TOKEN, loopback=False))
    method = "POST" if path in POSTS else "GET"
    assert guarded.open(path, method=method, json=body()).status_code == 401
    wrong = {"Authorization": f"Bearer {TOKEN[:-1]}"}
    assert guarded.open(path, method=method, json=body(), headers=wrong).status_code == 401
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.open(path, method=method, json=body(), headers=right).status_code != 401


@pytest.mark.parametrize("path", POSTS)
def test_requests_of_other_pages_and_of_other_kinds_are_refused(own: Client, path: str) -> None:
    assert own.post(path, json=body(), headers={"Origin": "http://evil.example"}).status_code == 403
    assert own.post(path, json=body(), headers={"Origin": "null"}).status_code == 403
    assert own.post(path, data=json.dumps(body()), content_type="text/plain").status_code == 415
    assert own.post(path, data=b"{", content_type="application/json").status_code == 400
    assert own.post(path, data=b"[" * 100_000, content_type="application/json").status_code == 400
    assert own.post(path, json=[1]).status_code == 400
    assert own.get(path).status_code == 405
    assert own.put(path, json=body()).status_code == 405
    assert own.post("/", json=body()).status_code == 405


@pytest.mark.parametrize("path", POSTS)
def test_an_oversized_request_is_refused_unread(own: Client, path: str) -> None:
    class Endless:
        def read(self, size: int = -1) -> bytes:
            raise AssertionError("it is not read")

    headers = {"CONTENT_LENGTH": str(MOST_BYTES + 1), "CONTENT_TYPE": "application/json", "wsgi.input": Endless()}
    assert own.open(path, method="POST", environ_overrides=headers).status_code == 413
    chunked = {"CONTENT_LENGTH": "", "CONTENT_TYPE": "application/json", "HTTP_TRANSFER_ENCODING": "chunked"}
    assert own.open(path, method="POST", environ_overrides=chunked).status_code == 411


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": {"tokens": 10**9}},
        {"sampling": {"tokens": 1.5}},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"temperature": -1}},
        {"sampling": {"seed": True}},
        {"sampling": []},
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "root", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}] * 300},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"fields": "x"},
        {"other": 1},
        {"model": []},
        {"model": None},
        {"panel": {}},
        {"choices": {"sampler": []}, "model": "blocks", "panel": "denoise"},
    ],
)
def test_a_request_out_of_bounds_is_refused(own: Client, change: dict[str, Any]) -> None:
    answer = own.post("/api/stream", json={**body(), **change})
    assert answer.status_code == 400
    assert len(answer.text) < 200


def test_unknown_models_panels_and_choices_are_refused(own: Client) -> None:
    assert own.post("/api/stream", json=body("nothing")).status_code == 404
    assert own.post("/api/stream", json=body(panel="chat")).status_code == 404
    assert own.post("/api/stream", json=body("blocks", "denoise", choices={"sampler": "x"})).status_code == 400


@pytest.mark.parametrize(
    ("model", "panel", "kind"),
    [
        ("text", "complete", "token"),
        ("chat", "chat", "token"),
        ("blocks", "denoise", "unmasked"),
        ("plans", "answer", "unmasked"),
        ("latents", "latents", "heat_map"),
    ],
)
def test_every_job_streams(own: Client, model: str, panel: str, kind: str) -> None:
    answer = own.post("/api/stream", json=body(model, panel))
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    found = [event["kind"] for event in events(answer)]
    assert kind in found
    assert found[0] == "waiting"
    assert found[-1] == "done"


def test_texts_travel_as_data(own: Client) -> None:
    """Whatever a model writes is JSON in an event, which no browser takes for a page."""
    nasty = "</script><img src=x onerror=alert(1)>\n\ndata: {}\n\n\ud800"
    answer = own.post("/api/stream", json=body(text=nasty))
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert events(answer)[-1] == {"kind": "done"}


def test_a_models_failure_ends_one_request(own: Client) -> None:
    found = events(own.post("/api/stream", json=body("chat", "chat", "stone " * 400)))
    (failed,) = [event for event in found if event["kind"] == "failed"]
    assert "reads 256" in failed["message"]
    assert events(own.post("/api/stream", json=body()))[-1] == {"kind": "done"}


# --- the queue


class Slow:
    """Work that goes on until it is let go, and notes what happened to it."""

    def __init__(self) -> None:
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> Iterator[Event]:
        try:
            self.begun.set()
            while not self.go.wait(0.01):
                yield Section("still")
        finally:
            self.closed.set()


def test_requests_are_computed_one_at_a_time_in_their_order() -> None:
    worker, works = Worker(), [Slow() for _ in range(3)]
    tickets = [worker.submit(work) for work in works]
    assert works[0].begun.wait(20)
    assert [next(ticket.messages()) for ticket in tickets] == [Waiting(0), Waiting(1), Waiting(2)]
    assert not works[1].begun.is_set()
    tickets[1].cancel()  # while it waits: it never begins
    assert next(tickets[2].messages()) == Waiting(1)
    works[0].go.set()
    assert works[2].begun.wait(20)
    assert not works[1].begun.is_set()
    works[2].go.set()
    assert works[2].closed.wait(20)


def test_a_cancelled_request_stops_computing() -> None:
    worker, work, after = Worker(), Slow(), Slow()
    ticket = worker.submit(work)
    assert work.begun.wait(20)
    after.go.set()
    following = worker.submit(after)
    ticket.cancel()
    assert work.closed.wait(20)
    assert [message for message in following.messages() if not isinstance(message, Waiting)] == []
    assert after.closed.wait(20)


def test_a_full_queue_refuses(monkeypatch: pytest.MonkeyPatch, models: dict[str, PlayModel]) -> None:
    monkeypatch.setattr(worker_module, "MOST_WAITING", 1)
    worker, work = Worker(), Slow()
    held = worker.submit(work)
    assert work.begun.wait(20)
    waiting = worker.submit(Slow())
    with pytest.raises(QueueFullError):
        worker.submit(Slow())
    app = Client(PlayApp(list(models.values()), worker=worker))
    for path, what in [("/api/stream", body()), ("/v1/completions", {"model": "text", "prompt": "x"})]:
        assert app.post(path, json=what).status_code == 503
    waiting.cancel()
    held.cancel()


def test_a_bug_in_a_model_is_one_sentence(capsys: Any) -> None:
    def broken() -> Iterator[Event]:
        yield Section("x")
        raise RuntimeError("secret-looking detail")

    found = list(Worker().submit(broken).messages())
    (failed,) = [message for message in found if isinstance(message, Failed)]
    assert "RuntimeError" in failed.message
    assert "detail" not in failed.message
    assert "Traceback" in capsys.readouterr().err


# --- over a socket


@pytest.fixture
def address(models: dict[str, PlayModel]) -> Iterator[str]:
    yield from served(open_play_server(list(models.values()), "127.0.0.1", 0, guarded=False))


@pytest.mark.parametrize("path", ["/api/stream", "/v1/completions"])
def test_closing_the_connection_cancels(
    address: str, models: dict[str, PlayModel], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """An answer that is sent whole writes nothing before its end, so it has to look at the connection."""
    work = Slow()
    monkeypatch.setattr(type(models["text"]), "stream", lambda self, ask, how: work())
    host = address.removeprefix("http://").strip("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    asked = body() if path == "/api/stream" else {"model": "text", "prompt": "x"}
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    if path == "/api/stream":
        answer = connection.getresponse()
        assert b"waiting" in answer.read1(1000)
        answer.close()
    assert work.begun.wait(20)
    connection.close()
    assert work.closed.wait(20)


def test_a_taken_port_is_one_sentence(address: str, models: dict[str, PlayModel]) -> None:
    port = int(address.rstrip("/").rpartition(":")[2])
    with pytest.raises(UserError, match=r"\(Address already in use\).*--port"):
        open_play_server(list(models.values()), "127.0.0.1", port, guarded=False)


def test_a_run_without_a_tokenizer_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, PlayModel]
) -> None:
    opened: Any = models["text"].opened
    monkeypatch.setattr(type(opened.objective), "tokenizer", None)
    monkeypatch.setattr("redline.play.models.open_model", lambda *_, **__: opened)
    with pytest.raises(UserError, match=r"tokenizer's files are missing.*REDLINE_GPT2"):
        open_play_model("runs/text", "text", log=lambda text: None)
