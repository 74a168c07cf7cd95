"""Running the trials in processes that may crash or hang without harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from redline.cache import cache_dir

Answers = dict[str, dict[str, Any]]
_WHOLE_LIMIT = 300.0  # the child ends by itself long before; this is for one that cannot even do that


def run_trials(names: list[str], command: list[str] | None = None) -> Answers:
    """The answer to each, by name. After a crash, the rest are tried in a new process. A name that its machine has
    nothing to try for gets no answer."""
    answers: Answers = {}
    waiting = list(names)
    while waiting:
        given, ending = _one_process(command or [sys.executable, "-P", "-m", "redline.hardware.trial"], waiting)
        answers |= given
        if ending == "done":
            break
        left = [name for name in waiting if name not in answers]
        if ending:  # the first without an answer is what it died of
            if not left:
                break
            answers[left[0]] = {"works": False, "detail": ending, "whole": ending}
            if left[0] == "torch":  # it cannot even be imported: the rest would die of the same
                break
            left = left[1:]
        waiting = left
    return answers


def _one_process(command: list[str], names: list[str]) -> tuple[Answers, str]:
    """What it answered, and how it ended: "done", why it died, or empty when it asks for a new process."""
    process = subprocess.Popen(
        [*command, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_WHOLE_LIMIT)
        late = "Timeout (" in err  # faulthandler's word
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        (out, err), late = process.communicate(), True
    answers = dict(answer for line in out.splitlines() if (answer := _parse(line)))
    if late:
        return answers, "did not answer in time"
    if process.returncode < 0:
        return answers, f"crashed ({signal.Signals(-process.returncode).name})"
    if process.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:]
        return answers, last[0].strip()[:160] if last else f"ended with {process.returncode}"
    stopped = any("CUDA error" in str(answer.get("whole")) for answer in answers.values())
    return answers, "" if stopped else "done"


def _parse(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        answer = json.loads(line)
        return str(answer.pop("trial")), answer
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # a library's own word


def _environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2])
    path = [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "compile"),  # as training has it
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of workers that could outlive the trial
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }
