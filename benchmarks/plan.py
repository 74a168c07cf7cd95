"""The plan against a few real steps: peak memory and tokens/s, planned and measured, case by case.

    python benchmarks/plan.py [--out FILE.json] [CASE …]      a CASE is "RECIPE key=value key=value …"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redline.hardware.detect import detect
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.recipe.resolve import DataFacts, resolve

GPU_CASES = [
    "pretrain-350m",
    "pretrain-350m train.micro_batch=64",
    "pretrain-350m train.micro_batch=32",
    "pretrain-350m data.seq_len=2048 train.global_batch=64",
    "pretrain-350m data.seq_len=4096 train.global_batch=32",
    "pretrain-350m train.grad_checkpointing=full",
    "pretrain-350m train.grad_checkpointing=selective",
    "pretrain-350m train.optimizer=muon",
    "pretrain-350m train.ema=0.999 train.micro_batch=64",
    "pretrain-350m data.pack=true",
    "pretrain-350m train.compile=false train.micro_batch=32",
    "pretrain-350m model.heads=8",
    "pretrain-125m",
    "pretrain-125m data.seq_len=2048 train.global_batch=64",
    "quickstart train.global_batch=512",
    "quickstart model.size=40m train.global_batch=512",
    "pretrain-350m model.size=760m model.layers=24 model.d_model=1536 model.d_ff=4096 train.micro_batch=32",
    "pretrain-350m model.size=1.3b model.layers=24 model.d_model=2048 model.d_ff=5504 train.micro_batch=16",
]
CPU_CASES = ["quickstart", "quickstart model.size=5m", "quickstart model.size=15m data.seq_len=512"]


def compare(case: str) -> dict[str, Any]:
    name, *overrides = case.split()
    recipe = load(name, overrides).recipe
    gpt2 = recipe.data.tokenizer == "gpt2"
    facts = DataFacts(50257 if gpt2 else 4096, 3_700_000, 190_000, "", recipe.data.tokenizer, "")
    resolved = resolve(recipe, detect(recipe.train.device), facts)
    plan = resolved.plan_event()
    request = json.dumps({"recipe": resolved.recipe.model_dump(mode="json"), "facts": asdict(facts)})
    done = subprocess.run(
        [sys.executable, "-m", "redline.train.trial"], input=request, capture_output=True, text=True, check=False
    )
    try:
        measured = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        measured = {"error": done.stderr.strip().splitlines()[-1:]}
    return {
        "case": case,
        "planned": {
            "memory_gib": plan["memory_gib"]["peak"],
            "tokens_per_s": plan["throughput"]["tokens_per_s"],
            "micro": plan["batch"]["micro"],
        },
        "measured": measured,
    }


def line(row: dict[str, Any]) -> str:
    planned, measured = row["planned"], row["measured"]
    if "error" in measured:
        return f"{row['case']:60s} {measured['error']}"
    memory = planned["memory_gib"] / measured["memory_gib"] - 1
    rate = f"{planned['tokens_per_s'] / measured['tokens_per_s'] - 1:+6.1%}" if planned["tokens_per_s"] else ""
    return (
        f"{row['case'][:60]:60s} {measured['memory_gib']:7.2f} GiB {memory:+6.1%}   "
        f"{measured['tokens_per_s']:9,.0f} tok/s {rate}  first step {measured['compile_s']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine = detect()
    rows = []
    for case in given.cases or (GPU_CASES if machine.device == "cuda" else CPU_CASES):
        rows.append(compare(case))
        print(line(rows[-1]), flush=True)
        if given.out:
            result = {"machine": machine.facts(), "versions": versions(), "git": git_state(), "rows": rows}
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
