"""Times the training step alone on random tokens: tok/s, MFU, peak memory against the plan, seconds to the first step.

usage: python benchmarks/step.py [--out FILE.json] [CASE …]      a CASE is "RECIPE key=value key=value …"
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redline.hardware.detect import detect
from redline.objectives import objective_module
from redline.plan.flops import mfu
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.recipe.resolve import resolve
from redline.train.feed import step_batch, to_device
from redline.train.log import peak_memory_gib
from redline.train.optim import Optimizer
from redline.train.precision import LossScale
from redline.train.step import Step
from redline.units import GIB

STEPS = 20
GPU_CASES = ["pretrain-350m", "pretrain-350m data.pack=true", "pretrain-125m"]
CPU_CASES = ["quickstart model.size=1m", "quickstart model.size=5m"]


def random_tokens(folder: Path, vocab: int = 50257, tokens: int = 2_000_000) -> Path:
    np.random.default_rng(0).integers(0, vocab, tokens, dtype=np.uint16).tofile(folder / "train.bin")
    return folder


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case: str, source: Path) -> dict[str, Any]:
    name, *overrides = case.split()
    data_options = [f"data.source={source}", "data.tokenizer=gpt2"] if name != "quickstart" else []
    recipe = load(name, [*data_options, *overrides]).recipe
    torch.compiler.reset()
    module = objective_module(recipe.objective)
    data = module.load_data(recipe)
    resolved = resolve(recipe, detect(recipe.train.device), data.facts)
    train = resolved.recipe.train
    device = torch.device(train.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    objective = module.create(resolved, data)
    objective.build(device)
    optimizer = Optimizer(objective.param_groups(), train)
    scale = LossScale(train.precision, device)
    step = Step(objective, optimizer, scale=scale, ema=None, clip=train.clip, seed=0)
    if train.compile:
        objective.compile()
    rows, count = resolved.batch.micro, resolved.batch.accumulation
    micros = [to_device(objective.batch(np.arange(rows) + rows * i), device) for i in range(count)]
    batch = step_batch(objective, micros)

    def timed(action: Any) -> float:
        wait(device)
        begin = time.perf_counter()
        action()
        wait(device)
        return time.perf_counter() - begin

    first = timed(lambda: step.rehearse(batch))
    seconds = statistics.median([timed(lambda: step(0, batch, 0.0)) for _ in range(STEPS)][3:])
    rate = resolved.tokens_per_step / seconds
    peak = resolved.machine.peak("bf16")
    return {
        "case": case,
        "tokens_per_s": round(rate),
        "mfu": mfu(rate, resolved.flops.useful, peak),
        "mfu_causal": mfu(rate, resolved.flops.causal, peak),
        "step_ms": 1000 * seconds,
        "memory_gib": peak_memory_gib(device),
        "memory_plan_gib": resolved.memory.peak / GIB,
        "first_step_s": first,
        "attention": objective.choices()[0][1:],
        "batch": [rows, count],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = options.cases or (GPU_CASES if torch.cuda.is_available() else CPU_CASES)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        source = random_tokens(Path(folder))
        for case in cases:
            result = measure(case, source)
            results.append(result)
            share = f"{100 * result['mfu']:.1f} % MFU" if result["mfu"] else "MFU unknown"
            print(f"{case:44s} {result['tokens_per_s']:>9,} tok/s  {share}  {result['step_ms']:.1f} ms", flush=True)
    if options.out:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        record = {"gpu": gpu, "versions": versions(), "git": git_state(), "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
