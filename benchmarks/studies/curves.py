"""Loss curves of one model trained in several ways on the same tokens, and the differences between them.

    python -m benchmarks.studies.curves OUT.json TOKENS_DIR NAME [key=value …]   trains one arm and adds it to OUT.json
    python -m benchmarks.studies.curves OUT.json                                   compares the arms in OUT.json

An arm is a run of `pretrain-350m`. The first arm is the reference. `reference-2` differs from it only in the attention
back-end and measures the noise of the kernels. An arm agrees if the mean difference between its last 50 losses and
the last 50 of the reference is at most 0.01, or twice that noise. Runs with evaluations are also compared by their last
validation loss.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.studies.runs import evaluations, run_training
from redline.bench.child import ChildError

LAST = 50


def train(source: str, overrides: list[str]) -> dict[str, Any]:
    options = ["monitor.log_every=1", "eval.samples=0", "checkpoint.best=false", f"data.source={source}"]
    try:
        run = run_training(["pretrain-350m", *options, *overrides])
    except ChildError as error:
        sys.exit(str(error))
    steps = run.of_type("step")
    return {
        "overrides": overrides,
        "losses": [round(event["loss"], 5) for event in steps],
        "evaluations": evaluations(run),
        "tokens_per_s": statistics.median(event["tokens_per_s"] for event in steps[len(steps) // 4 :]),
        "tokens": steps[-1]["tokens"],
        "skipped": sum(event.get("skipped", 0) for event in steps[-1:]),
        "lock": run.lock,
    }


def mean_difference(arm: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the mean difference of the last losses."""
    pairs = list(zip(arm["losses"], reference["losses"], strict=True))[-LAST:]
    return statistics.fmean(a - b for a, b in pairs)


def compare(arms: dict[str, Any]) -> None:
    name, reference = next(iter(arms.items()))
    repeated = arms.get(f"{name}-2")
    noise = abs(mean_difference(repeated, reference)) if repeated else 0.0
    band = max(0.01, 2 * noise)
    print(f"{name}: last {LAST} losses {statistics.fmean(reference['losses'][-LAST:]):.4f}; band ±{band:.4f}")
    for other, arm in arms.items():
        same_length = len(arm["losses"]) == len(reference["losses"])
        if other == name or not same_length:
            continue
        difference = mean_difference(arm, reference)
        line = f"{other}: {difference:+.4f} {'agrees' if abs(difference) <= band else 'DIFFERS'}"
        if arm["evaluations"] and reference["evaluations"]:
            line += f", last validation {arm['evaluations'][-1]['loss'] - reference['evaluations'][-1]['loss']:+.4f}"
        print(f"{line}, {arm['tokens_per_s'] / reference['tokens_per_s']:.2f}× the speed")


def read(out: Path) -> dict[str, Any]:
    try:
        arms = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    except ValueError:
        arms = None
    if not isinstance(arms, dict) or not all(isinstance(arm, dict) and "losses" in arm for arm in arms.values()):
        sys.exit(f"{out} is not a file of curves. Choose another OUT.json, or remove it.")
    return arms


def main() -> None:
    if len(sys.argv) not in (2, *range(4, 100)):
        sys.exit("usage: python -m benchmarks.studies.curves OUT.json [TOKENS_DIR NAME [key=value …]]")
    out = Path(sys.argv[1])
    arms = read(out)
    if len(sys.argv) > 3:
        source, name, *overrides = sys.argv[2:]
        arms[name] = train(source, overrides)
        out.write_text(json.dumps(arms, indent=1) + "\n", encoding="utf-8")
    if not arms:
        sys.exit(f"{out} does not exist. Add TOKENS_DIR and NAME to train the first arm.")
    compare(arms)


if __name__ == "__main__":
    main()
