"""What the studies share: run redline in a child process, read its events, and reuse an earlier result file."""

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


def run_training(words: list[str], limit_s: float = LIMIT_S) -> TrainedRun:
    """Run `redline train WORDS` in a temporary folder. Raise ChildError with the reason if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        return train(words, Path(folder) / "run", limit_s=limit_s)


def read_existing(out: Path, empty: Any) -> Any:
    """Return the content of `out` from an earlier call, or `empty` if the file does not exist."""
    try:
        content = json.loads(out.read_text(encoding="utf-8")) if out.exists() else empty
    except (OSError, ValueError):
        content = None
    if type(content) is not type(empty):
        sys.exit(f"{out} is not a result of this study. Choose another OUT.json, or remove the file.")
    return content


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of a script; print a UserError as a message instead of a traceback."""
    try:
        main()
    except UserError as error:
        sys.exit(error.message())


def redline(*words: str) -> str:
    """Run `redline WORDS` and return its stdout. Exit with its status if it fails; its stderr has said why."""
    done = subprocess.run([sys.executable, "-m", "redline", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout)
        sys.exit(done.returncode)
    return done.stdout


def evaluations(run: TrainedRun) -> list[dict[str, Any]]:
    """Return step, tokens and loss of every evaluation of the run."""
    return [{key: event[key] for key in ("step", "tokens", "loss")} for event in run.of_type("eval")]
