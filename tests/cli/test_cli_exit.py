"""The process of a rank exits without finalising the interpreter while gloo's threads run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from several import free_port, rank_environment

# `finalised` is written by the interpreter's own teardown, which `os._exit` skips; `at exit` by atexit, which is kept.
PROGRAM = """
import atexit, os, sys

class Last:
    def __del__(self, write=os.write):
        write(2, b"finalised\\n")

sys.last_of_all = Last()
atexit.register(lambda: print("at exit"))
sys.argv = ["redline", *sys.argv[1:]]
from redline.cli.{module} import main
main()
"""


def run_rank(environment: dict[str, str], *words: str, module: str = "main") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(module=module), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def words(world: Any, run: Path, *more: str) -> list[str]:
    options = (*world.tiny, f"data.source={world.corpus}", "train.steps=2", *more)
    return ["train", "quickstart", *options, "--run", str(run)]


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_rank_exits_without_finalising_the_interpreter(world: Any, tmp_path: Path, mode: str) -> None:
    environment = {**rank_environment(0, 1, free_port()), "OMP_NUM_THREADS": "1"}
    done = run_rank(environment, *words(world, tmp_path / "run", f"parallel.mode={mode}"))
    assert done.returncode == 0, done.stderr
    assert "finalised" not in done.stderr
    assert done.stdout.endswith("at exit\n"), "buffered output is flushed, and exit handlers run"
    assert json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[-1])["type"] == "stop"


def test_other_processes_exit_normally(tmp_path: Path) -> None:
    done = run_rank({}, "--version")
    assert (done.returncode, "finalised" in done.stderr) == (0, True)
    assert done.stdout.endswith("at exit\n")


def test_a_refused_rank_keeps_its_exit_code(tmp_path: Path) -> None:
    environment = rank_environment(0, 1, free_port())
    done = run_rank(environment, "train", "quickstart", "train.stepz=2", "--run", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
