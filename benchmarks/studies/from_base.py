"""Block diffusion that starts from an autoregressive base: its bounds beside those of a run from random weights.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.from_base OUT.json BASE SOURCE [--arms 'ARM;…'] [--seeds 1,2,3]
        [key=value …]

BASE is a folder with a small Llama, SOURCE a text. All arms have the base's shape and tokenizer, and see the same
tokens in the same number of steps. They differ in what a run starts from, in the position whose state predicts a
hidden token (`shift`), and in the share of the run in which blocks grow (`causal_warmup`). A row is one run. Rows that
OUT.json already holds are not trained again. The result records BASE and SOURCE as they are given. At the end the
script prints the mean of each arm over its seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import refuse_dirty
from benchmarks.studies.runs import evaluations, read_existing, run_main, run_training
from redline.bench.child import ChildError
from redline.cache import cache_dir
from redline.data.chat_template import definition_file
from redline.models.pretrained import open_base
from redline.recipe.lock import git_state

STEPS = 400
RECIPE = {
    "objective": "block_diffusion",
    "block_diffusion": {"block_size": 8},
    "data": {"seq_len": 128, "workers": 1},
    "train": {
        "device": "cpu",
        "precision": "fp32",
        "compile": False,
        "steps": STEPS,
        "global_batch": 16,
        "lr": 2e-3,
        "schedule": "wsd",
        "min_lr_ratio": 0.0,
        "warmup_steps": 10,
        "weight_decay": 0.0,
    },
    "eval": {"every": 100, "sequences": 64, "samples": 0},
    "checkpoint": {"every": 100000, "best": False},
}
# arm → what it changes; the numbers are shares of the run in which blocks grow
ARMS: dict[str, tuple[bool, bool, float]] = {
    "scratch": (False, False, 0.0),
    "scratch, shift": (False, True, 0.0),
    "base, own position": (True, False, 0.0),
    "base, own position, warm-up 0.2": (True, False, 0.2),
    "base, shift": (True, True, 0.0),
    "base, shift, warm-up 0.1": (True, True, 0.1),
    "base, shift, warm-up 0.2": (True, True, 0.2),
    "base, shift, warm-up 0.4": (True, True, 0.4),
}


def words_of(arm: str, base: str, steps: int) -> list[str]:
    """Return the overrides of an arm. A run from random weights states the base's shape and tokenizer."""
    from_base, shift, warmup = ARMS[arm]
    words = [f"block_diffusion.shift={str(shift).lower()}", f"block_diffusion.causal_warmup={round(warmup * steps)}"]
    if from_base:
        return [*words, f"model.base={base}"]
    opened = open_base(base)
    keys = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "tied", "rope_theta", "norm_eps")
    shape = [f"model.{key}={json.dumps(opened.model[key])}" for key in keys]
    return [*words, *shape, f"data.tokenizer={definition_file(opened.folder)}"]


def train(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    stated = [int(word.partition("=")[2]) for word in options.overrides if word.startswith("train.steps=")]
    own = [*options.overrides, *words_of(arm, options.base, stated[-1] if stated else STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(json.dumps(RECIPE), encoding="utf-8")
        words = [f"data.source={options.source}", f"train.seed={seed}", *own]
        try:
            run = run_training([str(recipe), *words])
        except ChildError as error:
            return {"name": f"{arm}, seed {seed}", "arm": arm, "seed": seed, "error": str(error)}
    curve = evaluations(run)
    result = {"name": f"{arm}, seed {seed}", "arm": arm, "seed": seed, "bound": curve[-1]["loss"]}
    row = {**result, "evaluations": curve, "words": words, "lock": run.lock}
    without_cache: dict[str, Any] = json.loads(json.dumps(row).replace(str(cache_dir()), "CACHE"))
    return without_cache


def summary_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the mean bound of each arm at each evaluation, and the errors."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows if "bound" in row):
        curves = [row["evaluations"] for row in rows if row["arm"] == arm and "bound" in row]
        means = [statistics.fmean(event["loss"] for event in events) for events in zip(*curves, strict=True)]
        steps = [event["step"] for event in curves[0]]
        figures = "  ".join(f"{step}: {mean:.3f}" for step, mean in zip(steps, means, strict=True))
        lines.append(f"{arm:32} {figures}  ({len(curves)} seeds)")
    return lines + [f"{row['name']}: {row['error']}" for row in rows if "error" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description="Bounds of block diffusion from a base and from random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("base")
    parser.add_argument("source")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by semicolons")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--allow-dirty", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    if not options.allow_dirty:
        refuse_dirty({"git": git_state()}, options.out)
    result = read_existing(options.out, {})
    rows: list[dict[str, Any]] = result.setdefault("rows", [])
    finished = {(row["arm"], row["seed"]) for row in rows if "bound" in row}
    for seed in map(int, options.seeds.split(",")):
        for arm in options.arms.split(";"):
            if (arm, seed) not in finished:
                row = train(arm, seed, options)
                rows.append(row)
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(row["name"], row.get("bound", row.get("error")), flush=True)
    print("\n".join(summary_lines(rows)))


if __name__ == "__main__":
    run_main(main)
