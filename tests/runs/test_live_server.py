"""The page's server: for this machine alone, or for who has the token; and nothing but what it has."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_logs import PLAN, sample, start, step, write_run
from werkzeug.test import Client

from redline.errors import UserError
from redline.runs.live import local_server as server_module
from redline.runs.live.local_server import is_loopback, is_own_name, ssh_line
from redline.runs.live.server import App, open_server
from redline.runs.live.watch import Watch

TOKEN = "a-token-of-some-length"
PAGE = Path(__file__).parents[2] / "src/redline/runs/live/page"


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    nasty = "</script><img src=x onerror=alert(1)> \u202e {{7*7}}"
    events = [start(), PLAN, *(step(n) for n in range(1, 20)), sample(19, nasty)]
    return Watch(tmp_path, [write_run(tmp_path / "<b>run<b>", events)])


@pytest.fixture
def own(watch: Watch) -> Client:
    return Client(App(watch))


def test_the_page_asks_for_nothing_elsewhere(own: Client) -> None:
    page = own.get("/").text
    asked = re.findall(r"""(?:src|href)="([^"#]+)""", page)
    assert asked
    for address in asked:
        assert own.get(address).status_code == 200, address
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|style=", page), "nothing inline: the policy would stop it"
    ours = [path for path in PAGE.iterdir() if path.suffix in (".js", ".css") and not path.name.startswith("uplot")]
    for path in ours:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|insertAdjacentHTML|document\.write", text)
        assert own.get(f"/{path.name}").status_code == 200, "what is there is served"
    assert "MIT" in (PAGE / "uplot.LICENSE").read_text()


def test_every_answer_carries_its_policy(own: Client) -> None:
    for path in ("/", "/main.js", "/api/state", "/nothing"):
        headers = own.get(path).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8770", 200),
        ("LOCALHOST.", 200),
        ("evil.example:8770", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("192.168.0.1:8770", 421),
        ("", 421),
        ("[", 421),
        ("127.0.0.1:8770:8771", 421),
        ("127.0.0.1:80@evil.example", 400),
        ("localhost:@evil.example:8770", 400),
        ("user@127.0.0.1", 400),
        ("[::1]:8770@evil.example", 400),
    ],
)
def test_other_names_are_not_answered(own: Client, host: str, status: int) -> None:
    assert own.get("/api/state", headers={"Host": host}).status_code == status


def test_only_get(own: Client) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert own.open("/api/state", method=method).status_code == 405
    assert own.head("/").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../events.jsonl",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/index.html",
        "//etc/passwd",
        "/index.html",
        "/uplot.LICENSE",
        "/main.js%00",
        "/page/main.js",
        "/C:\\",
    ],
)
def test_no_path_leads_anywhere(own: Client, path: str) -> None:
    assert own.get(path).status_code == 404


@pytest.mark.parametrize("run", ["../outside", "/etc", "nothing", "\udcff", "x" * 300, "."])
def test_a_run_that_is_not_watched_is_not_told_of(own: Client, run: str, tmp_path: Path) -> None:
    write_run(tmp_path / "outside", [start(), step(1)])
    told = own.get("/api/state", query_string={"run": run.encode("utf-8", "surrogateescape"), "at": "x"})
    assert [run["name"] for run in told.json["runs"]] == ["<b>run<b>"]


@pytest.mark.parametrize(
    "at", ["", "1", "1.2.3", "9.9.9.9", "-1.0.0.0", "0.0.0.99999999999999999999", "a.b.c.d", "²." * 4]
)
def test_an_odd_place_gets_everything(own: Client, at: str) -> None:
    told = own.get("/api/state", query_string={"run": "<b>run<b>", "at": at}).json["runs"][0]
    assert told["steps"]["from"] == 0
    assert told["steps"]["rows"] == 19


def test_texts_travel_as_data(own: Client) -> None:
    answer = own.get("/api/state")
    assert answer.headers["Content-Type"] == "application/json"
    told = answer.json["runs"][0]
    assert told["samples"][0]["text"].startswith("</script><img")
    assert "\u202e" not in answer.text, "marks that turn the reading direction do not"


def test_only_what_is_new_is_told_again(own: Client) -> None:
    told = own.get("/api/state").json["runs"][0]
    place = (told["generation"], told["steps"]["buckets"], told["evals"]["buckets"], told["number"])
    again = own.get("/api/state", query_string={"run": told["name"], "at": ".".join(map(str, place))}).json["runs"][0]
    assert (again["steps"]["from"], again["steps"]["rows"]) == (18, 1), "the last may have grown"
    assert again["samples"] == again["notes"] == []


def test_long_questions_are_refused(own: Client) -> None:
    assert own.get("/api/state?run=" + "x" * 9000).status_code == 414


def test_without_the_token_nothing_is_seen(watch: Watch) -> None:
    guarded = Client(App(watch, TOKEN, loopback=False))
    for path in ("/", "/api/state", "/main.js", "/nothing", "/?token=wrong", "/?token=", "/?token=%ff%fe"):
        answer = guarded.get(path)
        assert answer.status_code == 401, path
        assert "Set-Cookie" not in answer.headers
        assert TOKEN not in answer.text
    assert guarded.get(f"/api/state?token={TOKEN}").status_code == 401, "it is taken at the door, and nowhere else"


def test_the_token_becomes_a_cookie(watch: Watch) -> None:
    guarded = Client(App(watch, TOKEN, loopback=False, cookie="redline-1"))
    door = guarded.get(f"/?token={TOKEN}")
    assert (door.status_code, door.headers["Location"]) == (303, "/")
    cookie = door.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert guarded.get("/api/state").status_code == 200
    header = {"Authorization": f"Bearer {TOKEN}"}
    assert Client(App(watch, TOKEN, loopback=False)).get("/api/state", headers=header).status_code == 200
    wrong = {"Authorization": f"Bearer {TOKEN[:-1]}"}
    assert Client(App(watch, TOKEN, loopback=False)).get("/api/state", headers=wrong).status_code == 401


def test_who_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.9.9.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "box", "")))
    assert not any(map(is_own_name, ("localhost@evil", "127.0.0.1:80@evil", "[::1]@evil", "[::1]x", "localhost:port")))


def test_a_name_with_a_user_is_refused_on_every_address(watch: Watch) -> None:
    open_to_all = Client(App(watch, TOKEN, loopback=False))
    header = {"Authorization": f"Bearer {TOKEN}"}
    assert open_to_all.get("/api/state", headers={**header, "Host": "box:8770@evil.example"}).status_code == 400
    assert open_to_all.get("/api/state", headers={**header, "Host": "box:8770"}).status_code == 200


@pytest.fixture
def address(watch: Watch) -> Iterator[tuple[str, int]]:
    """A server that listens."""
    server, _ = open_server(watch, "127.0.0.1", 0, guarded=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield "127.0.0.1", server.port
    server.shutdown()
    thread.join()


def test_over_a_socket(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=10)
    for _ in range(2):  # the second on the same connection
        connection.request("GET", "/api/state", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200
        assert answer.headers["Server"].startswith("redline")
    import gzip

    plain = gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body
    assert json.loads(plain)["runs"]
    with socket.create_connection(address, timeout=10) as odd:
        odd.sendall(b"NONSENSE\r\n\r\n")
        assert b"400" in odd.recv(1000)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200, "and it goes on"


def _serving() -> int:
    """The threads that answer connections."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_half_open_connections_hold_few_threads(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server_module, "_REQUEST_S", 600.0)
    server, _ = open_server(watch, "127.0.0.1", 0, guarded=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    before = _serving()
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(30)]
    try:
        assert all(_all_of(one).startswith(b"HTTP/1.1 503") for one in held[4:])
        assert _serving() - before == 4
        for one in held[:4]:
            one.close()
        for _ in range(600):  # until the server has seen that they are closed
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request("GET", "/api/state")
            if (status := connection.getresponse().status) == 200:
                break
            time.sleep(0.05)
        assert status == 200
    finally:
        for one in held:
            one.close()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_that_trickles_in_has_one_deadline(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_REQUEST_S", 0.5)
    server, _ = open_server(watch, "127.0.0.1", 0, guarded=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
            slow.settimeout(0.05)  # a byte as often as this: each of them would begin a timeout of its own anew
            for _ in range(600):
                try:
                    slow.sendall(b"x")
                    if slow.recv(1000) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                pytest.fail("the connection is still open")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _all_of(connection: socket.socket) -> bytes:
    found = b""
    try:
        while part := connection.recv(4096):
            found += part
    except ConnectionError:  # closed while a byte of ours was unread
        pass
    return found


def test_a_taken_port_is_said_and_passed_over(watch: Watch, address: tuple[str, int]) -> None:
    with pytest.raises(UserError, match=r"in use.*--port"):
        open_server(watch, *address, guarded=False)
    with pytest.raises(UserError, match=r"cannot be served there"):
        open_server(watch, "203.0.113.7", 0, guarded=False)
    first, one = open_server(watch, "127.0.0.1", None, guarded=False)
    second, other = open_server(watch, "127.0.0.1", None, guarded=True)
    first.server_close()
    second.server_close()
    assert first.port != second.port
    assert "token" not in one
    assert re.search(r"/\?token=[\w-]{32}$", other)


@pytest.mark.parametrize(
    ("connection", "host", "line"),
    [
        ("10.0.0.9 5000 10.0.0.5 22", "127.0.0.1", r"ssh -N -L 8770:127\.0\.0\.1:8770 \S+@10\.0\.0\.5"),
        ("a 5000 fe80::1%eth0 2222", "127.0.0.1", r"ssh -N -L 8770:127\.0\.0\.1:8770 -p 2222 \S+@fe80::1"),
        ("odd", "127.0.0.1", r"ssh -N -L 8770:127\.0\.0\.1:8770 \S+@.+"),
        ("10.0.0.9 5000 10.0.0.5 22", "0.0.0.0", ""),
        ("", "127.0.0.1", ""),
    ],
)
def test_the_line_for_a_remote_box(monkeypatch: pytest.MonkeyPatch, connection: str, host: str, line: str) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert re.fullmatch(line, ssh_line(host, 8770))


def test_a_huge_log_is_answered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it is, and the rest while one looks."""
    monkeypatch.setattr("redline.runs.live.watch._READ_S", 0.0)
    run = write_run(tmp_path / "run", [start(), PLAN])
    with open(run / "events.jsonl", "ab") as file:
        for begin in range(1, 20_001, 1000):
            file.write(b"".join(json.dumps(step(n)).encode() + b"\n" for n in range(begin, begin + 1000)))
    page: Any = Client(App(Watch(tmp_path, [run])))
    told = page.get("/api/state").json["runs"][0]
    assert 0 < told["reading"] < 1
    asked = 1
    while told["reading"] < 1:
        told = page.get("/api/state").json["runs"][0]
        asked += 1
        assert asked < 200
    assert told["step"] == 20_000
    assert told["steps"]["rows"] <= 2000


def test_a_page_that_outlives_its_server_is_told_everything(watch: Watch, tmp_path: Path) -> None:
    told = Client(App(watch)).get("/api/state").json["runs"][0]
    place = (told["generation"], told["steps"]["buckets"], told["evals"]["buckets"], told["number"])
    other = Client(App(Watch(tmp_path, [Path(told["path"])])))
    again = other.get("/api/state", query_string={"run": told["name"], "at": ".".join(map(str, place))}).json["runs"][0]
    assert (again["steps"]["from"], again["steps"]["rows"]) == (0, 19)
    assert again["samples"] == told["samples"]
