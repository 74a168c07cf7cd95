"""redline play and redline chat as commands: the address is printed, page and API answer, Ctrl-C ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def test_a_run_and_its_checkpoint_are_served_until_ctrl_c(home: Path) -> None:
    command = [sys.executable, "-m", "redline", "play", "latest", "latest@3", "--port", "0", "--token"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=home, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    try:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            said += line
        found = re.search(r"page +(http://127\.0\.0\.1:\d+/)\?token=(\S+)", said)
        assert found
        assert "latest@3: " in said
        headers = {"Authorization": f"Bearer {found[2]}", "Content-Type": "application/json"}
        written = []
        for model in ("latest", "latest@3", "latest"):
            asked = {"model": model, "prompt": "The red", "max_tokens": 8, "seed": 1, "logprobs": 1}
            request = urllib.request.Request(f"{found[1]}v1/completions", json.dumps(asked).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                found_text = json.load(answer)["choices"][0]
                written.append((found_text["text"], found_text["logprobs"]["token_logprobs"]))
        assert written[0] == written[2] != written[1]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err
    finally:
        process.kill()
        process.communicate()


def test_mistakes_are_one_sentence(inside: Any, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = inside("play", "nothing", "--port", str(taken.getsockname()[1]), cwd=home)
    assert answer.code == 1
    assert "--port" in answer.message
    answer = inside("play", "nothing", cwd=home)
    assert answer.code != 0
    assert "no such run" in answer.message
    answer = inside("chat", "latest", cwd=home)
    assert answer.code != 0
    assert "redline sample latest" in answer.message
