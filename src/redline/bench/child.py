"""A process of its own for each contender: its memory, its compiler and its failures are no one else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.monitor.events import Event, read_events

LIMIT_S = 3600


class ChildError(Exception):
    """It did not do what it was started for; the text says why."""


@dataclass(frozen=True)
class TrainedRun:
    begun: float  # by the clock that events carry
    events: list[Event]
    lock: dict[str, Any]

    def of_type(self, name: str) -> list[Event]:
        return [event for event in self.events if event["type"] == name]


def train(words: list[str], run: Path, environment: dict[str, str] | None = None) -> TrainedRun:
    """`redline train …` as it is typed."""
    command = [sys.executable, "-m", "redline", "train", *words, "--run", str(run)]
    begun = time.time()
    _run(command, "", environment)
    return TrainedRun(begun, list(read_events(run / "events.jsonl")), json.loads((run / "lock.json").read_text()))


def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """What `python -m module` answers to a request, in one line of JSON."""
    output = _run([sys.executable, "-m", module], json.dumps(request))
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildError(f"{module} gave no answer") from None
    if "error" in answer:
        raise ChildError(str(answer["error"]))
    return dict(answer)


def _run(command: list[str], given: str, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            input=given,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"not done within {LIMIT_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ChildError(said[-1].removeprefix("redline: ").strip()[:300])
    return done.stdout
