"""Large inputs, and commands with their time and memory measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# A forked process inherits the peak memory of its parent, so a small process starts the command and measures it.
_MEASURE = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[2:], capture_output=True, text=True)
seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
result = [seconds, used.ru_maxrss / 1024, done.returncode, done.stdout, done.stderr]
open(sys.argv[1], "w", encoding="utf-8").write(json.dumps(result))
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
    """Return a function that runs `redline …` in the test's folder."""

    def run(*words: str) -> Done:
        command = [sys.executable, "-m", "redline", *words]
        subprocess.run([sys.executable, "-S", "-c", _MEASURE, ".done.json", *command], cwd=tmp_path, check=True)
        return Done(*json.loads((tmp_path / ".done.json").read_text(encoding="utf-8")))

    return run
