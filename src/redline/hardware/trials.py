"""Trials in a child process: work that may fail, crash, hang or compute nonsense, tried before it is relied on.

A driver or a kernel that does not fit the card can kill the process, or hang it inside a call that no Python exception
interrupts. So each trial runs in a child, under a time limit, and writes one line of JSON as soon as it has ended. The
parent (`run_trials`) survives whatever happens to the child, and goes on with the remaining trials in a new one.

This module imports no torch; the children do.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.cache import cache_dir

# trial name → {"works": True, "about": result}, or
# {"works": False, "detail": first line, "whole": whole error, "kind": type of the exception, if there was one}
Answers = dict[str, dict[str, Any]]

PROCESS_SECONDS = 300.0  # the child enforces the limits of its trials; this is for a child that cannot even do that
DEFAULT_SECONDS = 30
_CUDA_ERROR = "CUDA error"  # after one, every further CUDA call in the same process fails


# --- the parent


def run_trials(
    module: str,
    names: Sequence[str],
    *,
    request: str = "",
    vital: str | None = None,
    process_seconds: float | None = None,
    command: Sequence[str] | None = None,
) -> Answers:
    """Run the named trials with `python -m MODULE NAME …` and return the answer of each.

    `request` reaches the child on its standard input. If a trial kills its process, the remaining ones run in a new
    process. If the `vital` one does, none of the others can run either.
    """
    command = [*(command or (sys.executable, "-P", "-m", module))]
    answers: Answers = {}
    waiting = list(names)
    while waiting:
        given, failure, finished = _run_process(command, waiting, request, process_seconds or PROCESS_SECONDS)
        answers |= given
        if finished:
            break
        waiting = [name for name in waiting if name not in answers]
        if failure and waiting:
            # The first trial without an answer is the one that killed the process.
            killer = waiting.pop(0)
            answers[killer] = {"works": False, "detail": failure, "whole": failure}
            if killer == vital:
                break
    return answers


def _run_process(command: list[str], names: list[str], request: str, seconds: float) -> tuple[Answers, str, bool]:
    """Run one child. Return its answers, why it died (empty if it did not), and whether all trials were run."""
    process = subprocess.Popen(
        [*command, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_child_environment(),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(request, timeout=seconds)
        timed_out = "Timeout (" in err  # written by faulthandler
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        (out, err), timed_out = process.communicate(), True
    except BaseException:  # Ctrl-C, or a signal that ends the run: the child must not outlive it
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    answers = dict(answer for line in out.splitlines() if (answer := _parse_answer(line)))
    if timed_out:
        return answers, "timed out", False
    if process.returncode < 0:
        return answers, f"crashed ({signal.Signals(-process.returncode).name})", False
    if process.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:]
        return answers, last[0].strip()[:160] if last else f"exited with code {process.returncode}", False
    # After a CUDA error the child ends early, so that the remaining trials run in a new process.
    return answers, "", not any(_CUDA_ERROR in str(answer.get("whole")) for answer in answers.values())


def _parse_answer(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        answer = json.loads(line)
        return str(answer.pop("test")), answer
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # a line that some library printed


def _child_environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2])
    path = [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "compile"),  # the same folder as in training
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compile workers could outlive the trial
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }


# --- the child


def answer_trials(
    names: Sequence[str], trials: Mapping[str, Callable[[], Any]], seconds: Mapping[str, int] | None = None
) -> None:
    """Run the named trials and print an answer for each. `seconds` are the time limits that are not the default."""
    for name in names:
        # faulthandler ends the process even if a driver call hangs, which no Python exception could interrupt.
        faulthandler.dump_traceback_later((seconds or {}).get(name, DEFAULT_SECONDS), exit=True)
        answer = answer_of(trials[name])
        print(json.dumps({"test": name, **answer}), flush=True)
        if _CUDA_ERROR in str(answer.get("whole")):
            break
    faulthandler.cancel_dump_traceback_later()


def answer_of(trial: Callable[[], Any]) -> dict[str, Any]:
    """Run a trial in this process and return its answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"works": True, "about": trial()}
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        detail, kind = lines[0][:160] if lines else type(error).__name__, type(error).__name__
        return {"works": False, "detail": detail, "whole": str(error), "kind": kind}
