"""The steps of the other jobs on this CPU: two checkouts of redline, measured in turns to share the noise.

    python -m benchmarks.studies.cpu_jobs OUT.json BEFORE AFTER --gsm8k FILE.jsonl --squad FILE.json

Each round trains each job for a few steps in a process of its own, once per checkout. A row has the median of the step
times of all rounds, without the first two of each process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.studies.cpu_step import train_steps
from redline.cache import write_atomically
from redline.hardware.probe import detect_machine
from redline.recipe.lock import git_state, versions

STEPS = {"problems-bd3lm": 24, "problems-hdp": 24, "qlora-smollm2": 7, "latentwire-smollm2": 8}
SETTLING = 2  # steps at the start of each process that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER")
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--squad", type=Path, required=True, help="a file in SQuAD's layout")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    data = {"qlora-smollm2": options.gsm8k, "latentwire-smollm2": options.squad}
    rows = []
    for job, steps in STEPS.items():
        words = [job, *([f"data.source={data[job].resolve()}"] if job in data else [])]
        rows.append(compare(job, words, steps, (options.before, options.after), options.rounds))
        print(f"{job}: {rows[-1]['gain']:.2f}×", file=sys.stderr)
    about = {"benchmark": "cpu-jobs", "machine": detect_machine("cpu").facts(), "versions": versions()}
    write_atomically(options.out, json.dumps({**about, "git": git_state(), "rows": rows}, indent=1) + "\n")


def compare(job: str, words: list[str], steps: int, checkouts: tuple[Path, Path], rounds: int) -> dict[str, Any]:
    """Return the step of a job before and after, and the ratio of their speeds."""
    measured: list[dict[str, Any]] = [{"times": []}, {"times": []}]
    for _ in range(rounds):
        for entry, checkout in zip(measured, checkouts, strict=True):
            trained = train_steps(checkout, words, steps)
            entry["times"] += trained["times"][SETTLING:]
            entry |= {key: trained[key] for key in ("git", "tokens_per_step")}
    for entry in measured:
        times = entry.pop("times")
        entry |= {"steps": len(times), "step_ms": round(statistics.median(times), 1)}
        entry["tokens_per_s"] = round(1e3 * entry["tokens_per_step"] / entry["step_ms"])
    before, after = measured
    return {"name": job, "before": before, "after": after, "gain": round(before["step_ms"] / after["step_ms"], 3)}


if __name__ == "__main__":
    main()
