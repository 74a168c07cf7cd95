"""Run a few real steps of a planned recipe in a subprocess (`redline.training.trial`) and return what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from redline.errors import UserError
from redline.recipe.forecast import ProbeResult
from redline.recipe.resolve import DataFacts, Resolved

LIMIT_S = 900


def run_trial(resolved: Resolved, facts: DataFacts) -> ProbeResult:
    """Return the measured speed and memory that `redline plan --probe` shows."""
    answer = ask_trial(resolved, facts)
    return ProbeResult(answer["tokens_per_s"], answer["memory_gib"], answer["step_ms"], answer["compile_s"])


def ask_trial(resolved: Resolved, facts: DataFacts, *, least_steps: int | None = None) -> dict[str, Any]:
    """Return the whole answer of the trial process. At least `least_steps` steps are timed, for up to ten seconds."""
    request: dict[str, Any] = {"recipe": resolved.recipe.model_dump(mode="json"), "facts": asdict(facts)}
    if least_steps is not None:
        request["least_steps"] = least_steps
    command = [sys.executable, "-m", "redline.training.trial"]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        fix = "Plan without --probe."
        raise UserError(f"the trial steps did not finish within {LIMIT_S} s.", where="--probe", fix=fix) from None
    answer = _answer(done.stdout)
    if answer is None:
        last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(
            f"the trial steps failed: {last_line}.", where="--probe", fix="Plan without --probe, or `redline doctor`."
        )
    if "error" in answer:
        raise UserError(str(answer["error"]), where="--probe")
    return answer


def _answer(output: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
