"""A process of its own for each contender: its memory, its compiler and its failures are no one else's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.runs.events import Event, read_events

LIMIT_S = 3600
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")  # as a traceback ends


class ChildError(Exception):
    """It did not do what it was started for; the text says why."""


@dataclass(frozen=True)
class TrainedRun:
    begun: float  # by the clock that events carry
    events: list[Event]
    lock: dict[str, Any]

    def of_type(self, name: str) -> list[Event]:
        return [event for event in self.events if event["type"] == name]


class DivergedError(ChildError):
    """A run that ended because there was nothing left to learn with."""

    def __init__(self, run: TrainedRun) -> None:
        super().__init__("it diverged: its loss or its gradient was no longer finite")
        self.run = run


def train(
    words: list[str], run: Path, environment: dict[str, str] | None = None, limit_s: float = LIMIT_S
) -> TrainedRun:
    """`redline train …` as it is typed."""
    command = [sys.executable, "-m", "redline", "train", *words, "--run", str(run)]
    begun = time.time()
    try:
        _run(command, "", environment, limit_s)
    except ChildError:
        stops = [event.get("reason") for event in read_events(run / "events.jsonl") if event["type"] == "stop"]
        if "nonfinite" in stops:
            raise DivergedError(_left_by(run, begun)) from None
        raise
    return _left_by(run, begun)


def _left_by(run: Path, begun: float) -> TrainedRun:
    lock = json.loads((run / "lock.json").read_text())
    lock.pop("began_in", None)  # a folder of this machine says nothing in a result
    return TrainedRun(begun, list(read_events(run / "events.jsonl")), lock)


def ask(module: str, request: dict[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What `python -m module` answers to a request, in one line of JSON."""
    output = _run([sys.executable, "-m", module], json.dumps(request), limit_s=limit_s)
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildError(f"{module} gave no answer") from None
    if "error" in answer:
        raise ChildError(str(answer["error"]))
    return dict(answer)


def _run(command: list[str], given: str, environment: dict[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
    try:
        done = subprocess.run(
            command,
            input=given,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"not done within {limit_s:.0f} s") from None
    if done.returncode:
        raise ChildError(_reason(done.stderr) or f"exit status {done.returncode}")
    return done.stdout


def _reason(said: str) -> str:
    """What it died of: the line that names an exception, after which there may be advice, or else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [""]
    named = [line for line in lines if _EXCEPTION.match(line)]
    last = lines[-1] if lines[-1].startswith("redline: ") or not named else named[-1]
    return last.removeprefix("redline: ")[:300]
