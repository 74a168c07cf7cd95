"""Child processes of a benchmark: each contender gets its own memory, compiler state and failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.errors import UserError
from redline.recipe.forecast import ProbeResult
from redline.recipe.resolve import DataFacts, Resolved
from redline.runs.events import Event, History, read_events
from redline.vocabulary import StopReason

LIMIT_S = 3600
TRIAL_LIMIT_S = 900
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")  # as a traceback ends


class ChildError(Exception):
    """The child failed; the text says why."""


@dataclass(frozen=True)
class TrainedRun:
    begun: float  # wall-clock seconds, as in the events' `time`
    events: History
    lock: dict[str, Any]

    def of_type(self, name: str) -> list[Event]:
        return self.events.of_type(name)


class DivergedError(ChildError):
    """A run that stopped because its loss or gradient was not finite."""

    def __init__(self, run: TrainedRun) -> None:
        super().__init__("it diverged: its loss or gradient was not finite")
        self.run = run


def train(
    words: list[str], run: Path, environment: dict[str, str] | None = None, limit_s: float = LIMIT_S
) -> TrainedRun:
    """Run `redline train WORDS` and return its events and lock."""
    command = [sys.executable, "-m", "redline", "train", *words, "--run", str(run)]
    begun = time.time()
    try:
        _run(command, "", environment, limit_s)
    except ChildError:
        stops = [event.get("reason") for event in read_events(run / "events.jsonl").of_type("stop")]
        if StopReason.NONFINITE in stops:
            raise DivergedError(_read_run(run, begun)) from None
        raise
    return _read_run(run, begun)


def _read_run(run: Path, begun: float) -> TrainedRun:
    lock = json.loads((run / "lock.json").read_text())
    lock.pop("began_in", None)  # results are committed: no path of this machine in them
    return TrainedRun(begun, read_events(run / "events.jsonl"), lock)


def ask(module: str, request: dict[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Send `python -m MODULE` a request on stdin; return its answer, the last line of stdout, as JSON."""
    output = _run([sys.executable, "-m", module], json.dumps(request), limit_s=limit_s)
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildError(f"{module} printed no answer") from None
    if "error" in answer:
        raise ChildError(str(answer["error"]))
    return dict(answer)


def ask_trial(resolved: Resolved, facts: DataFacts, *, least_steps: int | None = None) -> dict[str, Any]:
    """Run a few real steps of a planned recipe (see `training/trial.py`) and return what they measured.

    At least `least_steps` steps are timed, for up to ten seconds.
    """
    request: dict[str, Any] = {"recipe": resolved.recipe.model_dump(mode="json"), "facts": asdict(facts)}
    if least_steps is not None:
        request["least_steps"] = least_steps
    return ask("redline.training.trial", request, TRIAL_LIMIT_S)


def run_trial(resolved: Resolved, facts: DataFacts) -> ProbeResult:
    """Return the measured speed and memory that `redline plan --probe` shows."""
    try:
        answer = ask_trial(resolved, facts)
    except ChildError as error:
        fix = "Plan without --probe, or check the machine with `redline doctor`."
        raise UserError(f"the trial steps failed: {error}", where="--probe", fix=fix) from None
    return ProbeResult(answer["tokens_per_s"], answer["memory_gib"], answer["step_ms"], answer["compile_s"])


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
        raise ChildError(f"it did not finish within {limit_s:.0f} s") from None
    if done.returncode:
        raise ChildError(_reason(done.stderr) or f"exit status {done.returncode}")
    return done.stdout


def _reason(stderr: str) -> str:
    """Return the line that names the exception (advice may follow it), or else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or [""]
    named = [line for line in lines if _EXCEPTION.match(line)]
    last = lines[-1] if lines[-1].startswith("redline: ") or not named else named[-1]
    return last.removeprefix("redline: ")[:300]
