"""Bounds of −log p on real text for autoregressive, block-diffusion (several block sizes) and masked-diffusion models.

    python -m benchmarks.studies.bounds OUT.json TOKENS_DIR [--arms ar,4,8,16,mdlm] [--seeds 1,2,3] [--at-once 3]
        [key=value …]

All arms have the same shape and see the same tokens in the same number of steps. A row is one run. Rows that OUT.json
already holds are not trained again, so that a long table can be made in several calls. At the end the script prints the
mean of each arm over its seeds with a 95 % interval (Student's t), and in how many seeds the expected order holds: AR
below blocks of four, blocks of four below masked diffusion.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.studies.runs import evaluations, read_existing, run_training
from redline.bench.child import ChildError

LENGTH = 512
# A small decoder, so that fifteen runs take minutes. The EMA averages about the last hundred steps.
COMMON = (
    *("model.layers=6", "model.d_model=384", "model.heads=6", "model.d_ff=1024"),
    *(f"data.seq_len={LENGTH}", "data.tokenizer=gpt2"),
    *("train.tokens=null", "train.steps=1500", "train.global_batch=64", "train.lr=1e-3", "train.warmup_steps=100"),
    *(
        "train.schedule=wsd",
        "train.min_lr_ratio=0.0",
        "train.betas=[0.9,0.95]",
        "train.weight_decay=0.1",
        "train.ema=0.99",
    ),
    *("eval.every=500", "eval.sequences=512", "eval.samples=0", "checkpoint.every=100000", "checkpoint.best=false"),
)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # by number of seeds


def recipe_words(arm: str, overrides: list[str]) -> list[str]:
    if arm == "ar":
        return ["pretrain-125m", *COMMON, *overrides]
    length = next((word.split("=")[1] for word in reversed(overrides) if word.startswith("data.seq_len=")), LENGTH)
    return ["owt-bd3lm", *COMMON, *overrides, f"block_diffusion.block_size={length if arm == 'mdlm' else arm}"]


def train(arm: str, seed: int, source: str, overrides: list[str]) -> dict[str, Any]:
    words = [*recipe_words(arm, overrides), f"data.source={source}", f"train.seed={seed}"]
    try:
        run = run_training(words)
    except ChildError as error:
        return {"arm": arm, "seed": seed, "error": str(error)}
    curve = evaluations(run)
    return {
        "arm": arm,
        "seed": seed,
        "bound": curve[-1]["loss"],
        "evaluations": curve,
        "words": words,
        "lock": run.lock,
    }


def summary_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the mean of each arm, the comparisons of arms, and the errors."""
    bounds: dict[str, dict[int, float]] = {}
    for row in rows:
        if "bound" in row:
            bounds.setdefault(row["arm"], {})[row["seed"]] = row["bound"]
    lines = [_line(arm, list(by_seed.values())) for arm, by_seed in bounds.items()]
    for low, high in (("ar", "4"), ("4", "mdlm")):
        seeds = sorted(bounds.get(low, {}).keys() & bounds.get(high, {}).keys())
        if seeds:
            holds = sum(bounds[low][seed] < bounds[high][seed] for seed in seeds)
            lines.append(f"{low} < {high}: in {holds} of {len(seeds)} seeds")
    return lines + [f"{row['arm']}, seed {row['seed']}: {row['error']}" for row in rows if "error" in row]


def _line(arm: str, bounds: list[float]) -> str:
    mean = statistics.fmean(bounds)
    margin = T_95.get(len(bounds), 2.5) * statistics.stdev(bounds) / math.sqrt(len(bounds)) if len(bounds) > 1 else 0.0
    return f"{arm:5} {mean:.4f} ± {margin:.4f} nats a token, perplexity {math.exp(mean):.1f}, {len(bounds)} seeds"


def main() -> None:
    parser = argparse.ArgumentParser(description="Bounds of −log p by block size.")
    parser.add_argument("out", type=Path)
    parser.add_argument("source")
    parser.add_argument("--arms", default="ar,4,8,16,mdlm")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    rows = read_existing(options.out, [])
    finished = {(row["arm"], row["seed"]) for row in rows if "bound" in row}
    wanted = [(arm, int(seed)) for seed in options.seeds.split(",") for arm in options.arms.split(",")]
    rows_lock = Lock()

    def run_arm(arm_and_seed: tuple[str, int]) -> None:
        row = train(*arm_and_seed, options.source, options.overrides)
        with rows_lock:
            rows.append(row)
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(arm_and_seed, row.get("bound", row.get("error")), flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run_arm, [pair for pair in wanted if pair not in finished]))
    print("\n".join(summary_lines(rows)))


if __name__ == "__main__":
    main()
