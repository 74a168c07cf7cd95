"""redline watch: the address is printed, the page answers, Ctrl-C ends it; and the snapshot."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return json.load(answer)


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str, str]]]:
    """`redline watch …` in the background: the process, what it printed, and its address."""
    started = []

    def run(*words: str, cwd: Path, **environment: str) -> tuple[subprocess.Popen[str], str, str]:
        command = [sys.executable, "-m", "redline", "watch", *words]
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            said += line
        address = re.search(r"http://\S+", said)
        assert address
        return process, said, address[0]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_page_is_served_from_before_the_run_until_ctrl_c(serve: Any, home: Path, tmp_path: Path) -> None:
    """The page is opened before the run starts, and shows the events that follow."""
    process, said, address = serve("--port", "0", cwd=tmp_path, SSH_CONNECTION="10.0.0.9 5000 10.0.0.5 22")
    port = address.rstrip("/").rpartition(":")[2]
    assert address == f"http://127.0.0.1:{port}/"
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in said
    assert get(f"{address}api/state")["runs"] == []
    shutil.copytree((home / "runs/latest").resolve(), tmp_path / "runs/later")
    end = time.monotonic() + 20
    while not (told := get(f"{address}api/state"))["runs"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    (run,) = told["runs"]
    assert (run["name"], run["status"], run["recipe"]) == ("later", "finished", "toy")
    assert run["steps"]["rows"] > 0
    log = tmp_path / "runs/later/events.jsonl"
    with open(log, "a") as file:
        file.write('{"type":"step","time":5,"step":999999,"loss":1.25}\n')
    assert get(f"{address}api/state")["runs"][0]["loss"] == 1.25
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "")
    with pytest.raises(urllib.error.URLError):
        get(f"{address}api/state")


INTERRUPTED = """
import os, signal, sys
from redline.runs.live import server

accept = server.Server.process_request

def interrupted(self, request, client_address):
    os.kill(os.getpid(), signal.SIGINT)
    accept(self, request, client_address)

server.Server.process_request = interrupted
sys.argv = ["redline", "watch", "--port", "0"]
from redline.cli.main import main
main()
"""


def test_ctrl_c_during_a_request_answers_it_and_ends_the_page(tmp_path: Path) -> None:
    """The interrupt arrives while the server accepts a connection, where an exception would leave a thread behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while "Ctrl-C" not in said:
        said += process.stdout.readline()
    assert get(re.search(r"http://\S+", said)[0] + "api/state")["runs"] == []  # type: ignore[index]
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")


def test_another_address_asks_for_the_token(serve: Any, home: Path) -> None:
    _, said, address = serve("latest", "--host", "0.0.0.0", "--port", "0", cwd=home, SSH_CONNECTION="1 2 3 4")
    door = re.sub(r"//[^:]+:", "//127.0.0.1:", address)
    assert "ssh" not in said
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(door.partition("?")[0] + "api/state")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    assert b"redline" in opener.open(door, timeout=20).read()
    assert json.load(opener.open(door.partition("?")[0] + "api/state", timeout=20))["runs"]


def test_a_snapshot(inside: Any, home: Path) -> None:
    answer = inside("watch", "--once", cwd=home)
    assert answer.code == 0
    assert re.search(r"^runs/\S+  finished · toy · ", answer.out)
    for label in (
        "progress   Finished: ",
        "speed      ",
        "health     Finished",
        "cost       ",
        "last step  loss ",
    ):
        assert f"\n  {label}" in answer.out
    listed = json.loads(inside("runs", "--json", cwd=home).out)[0]
    (taken,) = json.loads(inside("watch", "latest", "--once", "--json", cwd=home).out)
    assert {key: taken[key] for key in ("status", "step", "loss", "val_loss", "tokens")} == {
        key: listed[key] for key in ("status", "step", "loss", "val_loss", "tokens")
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing",), "nothing"),
        (("--once",), "redline train"),
        (("--json",), "--once"),
    ],
)
def test_mistakes(inside: Any, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    answer = inside("watch", *words, cwd=tmp_path)
    assert answer.code == 2
    assert says in answer.err
