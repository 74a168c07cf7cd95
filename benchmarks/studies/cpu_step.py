"""The step of a recipe on this CPU: checkouts of redline and nanoGPT's loop, measured in turns to share the noise.

    python -m benchmarks.studies.cpu_step OUT.json CHECKOUT [CHECKOUT …] [--rounds N] [--steps N] [--peer] [-- WORDS]

Each round trains every checkout for a few steps in a process of its own, one after the other. A row has the median of
the step times of all rounds, the fastest, and the processor time per step, which other programs disturb least. `--peer`
adds nanoGPT's loop in bf16 autocast with the same batch, width and depth, eager and compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from redline.cache import write_atomically
from redline.hardware.probe import detect_machine
from redline.recipe.lock import git_state, versions

WORDS = ("quickstart", "model.size=2m", "train.precision=bf16")
QUIET = (
    *("train.hours=null", "train.epochs=null", "train.tokens=null", "monitor.log_every=1", "train.device=cpu"),
    *("eval.every=1000000", "eval.sequences=4", "eval.samples=0", "checkpoint.every=1000000", "checkpoint.best=false"),
)
PEER = (
    *("model.layers=4", "model.d_model=192", "model.heads=4", "model.d_ff=768", "data.tokenizer=train:4096"),
    *("data.source=embedded", "data.seq_len=256", "train.global_batch=8", "train.micro_batch=8", "train.device=cpu"),
    "train.precision=bf16",
)
SETTLING = 4  # steps at the start of each run that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--peer", action="store_true", help="measure nanoGPT's loop, too")
    own, _, words = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    recipe = words.split() or list(WORDS)
    rows: dict[str, dict[str, Any]] = {}
    for number in range(options.rounds):
        for checkout in options.checkouts:
            measured = measure_redline(checkout, recipe, options.steps)
            row = rows.setdefault(str(checkout), {"name": "", "times": [], "processor": [], "lock": {}})
            row["times"] += measured["times"]
            row["processor"].append(measured["processor_ms"])
            row |= {"lock": {"git": measured["git"]}, "tokens_per_step": measured["tokens_per_step"]}
            row["name"] = f"redline at {str(measured['git']['commit'])[:7]}"
        for name, compiled in (("nanoGPT, eager", False), ("nanoGPT, compiled", True)) if options.peer else ():
            row = rows.setdefault(name, {"name": name, "times": [], "processor": [], "tokens_per_step": 8 * 256})
            row["times"].append(peer_step(compiled=compiled))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    about = {
        "benchmark": "cpu-step",
        "recipe": recipe,
        "machine": detect_machine("cpu").facts(),
        "versions": versions(),
    }
    measured_rows = [figures(row) for row in rows.values()]
    write_atomically(options.out, json.dumps({**about, "git": git_state(), "rows": measured_rows}, indent=1) + "\n")
    for row in measured_rows:
        print(
            f"{row['name']:20s} {row['tokens_per_s']:9,.0f} tokens/s, median {row['step_ms']:.1f} ms", file=sys.stderr
        )


def figures(row: dict[str, Any]) -> dict[str, Any]:
    times, processor = row.pop("times"), row.pop("processor")
    median = statistics.median(times)
    return {
        **row,
        "steps": len(times),
        "step_ms": round(median, 2),
        "fastest_step_ms": round(min(times), 2),
        "processor_ms": round(statistics.median(processor), 1) if processor else None,
        "tokens_per_s": round(1e3 * row["tokens_per_step"] / median),
    }


def measure_redline(checkout: Path, words: list[str], steps: int) -> dict[str, Any]:
    """Train in a checkout; return the milliseconds of each step, and those of the processor per step.

    The latter is the difference between this run and one of a few steps, so that start-up does not count.
    """
    short, long = (train_steps(checkout, words, count) for count in (SETTLING, SETTLING + steps))
    processor = 1e3 * (long["seconds"] - short["seconds"]) / steps
    return {**long, "times": long["times"][SETTLING:], "processor_ms": processor}


def train_steps(checkout: Path, words: list[str], steps: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str((checkout / "src").resolve())}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "redline", "train", *words, *QUIET, f"train.steps={steps}", "--run", str(run)]
        before = _processor_seconds()
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        seconds = _processor_seconds() - before
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        git = json.loads((run / "lock.json").read_text(encoding="utf-8"))["git"]
    done = [event for event in events if event["type"] == "step"]
    per_step = done[-1]["tokens"] // done[-1]["step"]
    return {"times": [step["step_ms"] for step in done], "seconds": seconds, "git": git, "tokens_per_step": per_step}


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peer_step(*, compiled: bool) -> float:
    """Return the milliseconds of a step of nanoGPT's loop, compilation excluded."""
    words = [*PEER, f"train.compile={str(compiled).lower()}"]
    code = (
        "import json, sys; from benchmarks.studies.cpu_step import time_peer; print(time_peer(json.loads(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(words)], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def time_peer(words: list[str]) -> float:
    from benchmarks.peers.gpt2 import Gpt2Job
    from benchmarks.peers.nanogpt import Baseline, recipe_of
    from redline.data.corpus import load_text
    from redline.hardware.host import keep_freed_memory_mapped
    from redline.recipe.resolve import resolve

    keep_freed_memory_mapped()
    recipe = recipe_of(words)
    data = load_text(recipe)
    resolved = resolve(recipe, detect_machine("cpu"), data.facts)
    baseline = Baseline(resolved, Gpt2Job(resolved, data), None)
    baseline.warm_up()
    return baseline.step_ms(20)


if __name__ == "__main__":
    main()
