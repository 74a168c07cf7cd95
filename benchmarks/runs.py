"""For the scripts beside it: a training in a process and a folder of its own, read and then gone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from redline.bench.child import LIMIT_S, TrainedRun, train


def trained(words: list[str], limit_s: float = LIMIT_S) -> TrainedRun:
    """`redline train WORDS`; ChildError says why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        return train(words, Path(folder) / "run", limit_s=limit_s)


def redline(*words: str) -> str:
    """What it wrote on stdout; where it failed it has said itself why."""
    done = subprocess.run([sys.executable, "-m", "redline", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout)
        sys.exit(done.returncode)
    return done.stdout


def looks(run: TrainedRun) -> list[dict[str, Any]]:
    """What its evaluations found."""
    return [{key: event[key] for key in ("step", "tokens", "loss")} for event in run.of_type("eval")]
