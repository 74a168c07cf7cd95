"""For the scripts beside it: a training in a process and a folder of its own, read and then gone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.bench.child import LIMIT_S, TrainedRun, train
from redline.errors import UserError


def trained(words: list[str], limit_s: float = LIMIT_S) -> TrainedRun:
    """`redline train WORDS`; ChildError says why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        return train(words, Path(folder) / "run", limit_s=limit_s)


def kept(out: Path, empty: Any) -> Any:
    """What an earlier call has written there, if it is of this kind."""
    try:
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else empty
    except (OSError, ValueError):
        found = None
    if type(found) is not type(empty):
        sys.exit(f"{out} holds nothing to go on from. Choose another OUT.json, or remove it.")
    return found


def said(main: Callable[[], None]) -> None:
    """Runs a script's main: a mistake of who calls it is a sentence."""
    try:
        main()
    except UserError as error:
        sys.exit(error.message())


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
