"""Loss curves of one model trained in several ways on the same tokens, and how far they lie apart.

    python -m benchmarks.studies.curves OUT.json TOKENS_DIR NAME [key=value …]   trains one arm, adds it to OUT.json
    python -m benchmarks.studies.curves OUT.json                                   compares what is there

An arm is a run of `pretrain-350m`. The first is the reference; `reference-2`, which differs from it in the attention
back-end alone, gives the kernels' own noise. An arm agrees when the mean difference of its last 50 losses from the
reference's is at most 0.01, or twice that noise. Runs with evaluations are compared by their last one too.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.studies.runs import looks, trained
from redline.bench.child import ChildError

LAST = 50


def train(source: str, overrides: list[str]) -> dict[str, Any]:
    options = ["monitor.log_every=1", "eval.samples=0", "checkpoint.best=false", f"data.source={source}"]
    try:
        run = trained(["pretrain-350m", *options, *overrides])
    except ChildError as error:
        sys.exit(str(error))
    steps = run.of_type("step")
    return {
        "overrides": overrides,
        "losses": [round(event["loss"], 5) for event in steps],
        "evaluations": looks(run),
        "tokens_per_s": statistics.median(event["tokens_per_s"] for event in steps[len(steps) // 4 :]),
        "tokens": steps[-1]["tokens"],
        "skipped": sum(event.get("skipped", 0) for event in steps[-1:]),
        "lock": run.lock,
    }


def gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean difference of the last losses."""
    pairs = list(zip(one["losses"], other["losses"], strict=True))[-LAST:]
    return statistics.fmean(a - b for a, b in pairs)


def compare(arms: dict[str, Any]) -> None:
    name, reference = next(iter(arms.items()))
    again = arms.get(f"{name}-2")
    noise = abs(gap(again, reference)) if again else 0.0
    band = max(0.01, 2 * noise)
    print(f"{name}: last {LAST} losses {statistics.fmean(reference['losses'][-LAST:]):.4f}; band ±{band:.4f}")
    for other, arm in arms.items():
        same = len(arm["losses"]) == len(reference["losses"])
        if other == name or not same:
            continue
        away = gap(arm, reference)
        said = f"{other}: {away:+.4f} {'agrees' if abs(away) <= band else 'IS APART'}"
        if arm["evaluations"] and reference["evaluations"]:
            said += f", last validation {arm['evaluations'][-1]['loss'] - reference['evaluations'][-1]['loss']:+.4f}"
        print(f"{said}, {arm['tokens_per_s'] / reference['tokens_per_s']:.2f}× the speed")


def read(out: Path) -> dict[str, Any]:
    try:
        arms = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    except ValueError:
        arms = None
    if not isinstance(arms, dict) or not all(isinstance(arm, dict) and "losses" in arm for arm in arms.values()):
        sys.exit(f"{out} holds no curves. Choose another OUT.json, or remove it.")
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
        sys.exit(f"{out} holds no curves yet. Name TOKENS_DIR and an arm to train the first.")
    compare(arms)


if __name__ == "__main__":
    main()
