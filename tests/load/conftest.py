"""Large inputs, and commands whose time and memory are measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A process begins with the peak of the one that it is a fork of: so a small one stands between, and looks.
_LOOK = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[2:], capture_output=True, text=True)
seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
found = [seconds, used.ru_maxrss / 1024, done.returncode, done.stdout, done.stderr]
open(sys.argv[1], "w", encoding="utf-8").write(json.dumps(found))
"""


@dataclass(frozen=True)
class Done:
    seconds: float
    mib: float  # of its largest process, at the peak
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Done]:
    """Runs `redline …` in the test's folder."""

    def run(*words: str) -> Done:
        command = [sys.executable, "-m", "redline", *words]
        subprocess.run([sys.executable, "-S", "-c", _LOOK, ".done.json", *command], cwd=tmp_path, check=True)
        return Done(*json.loads((tmp_path / ".done.json").read_text(encoding="utf-8")))

    return run


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Figures that are shown whether or not the test passes."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return write
