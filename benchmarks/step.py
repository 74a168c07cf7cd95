"""Times the training step alone on random tokens: tok/s, MFU, peak memory against the plan, seconds to compile.

usage: python benchmarks/step.py OUT.json CASE [CASE …]      a CASE is "RECIPE key=value key=value …"
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redline.cli.running import _environment
from redline.hardware.detect import detect
from redline.objectives import objective_module
from redline.objectives.base import ParamGroup
from redline.plan.flops import mfu
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.recipe.resolve import resolve
from redline.train.feed import step_batch, to_device
from redline.train.optim import Optimizer
from redline.train.precision import LossScale
from redline.train.step import Step
from redline.units import GIB

STEPS = 20


def random_tokens(folder: Path, vocab: int = 50257, tokens: int = 2_000_000) -> Path:
    np.random.default_rng(0).integers(0, vocab, tokens, dtype=np.uint16).tofile(folder / "train.bin")
    return folder


def measure(case: str, source: Path) -> dict[str, Any]:
    name, *overrides = case.split()
    recipe = load(name, [f"data.source={source}", *overrides]).recipe
    _environment(recipe)
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = objective_module(recipe.objective)
    data = module.load_data(recipe)
    resolved = resolve(recipe, detect(), data.facts)
    train = resolved.recipe.train
    objective = module.create(resolved, data)
    device = torch.device(train.device)
    objective.build(device)
    groups: list[ParamGroup] = objective.param_groups()
    step = Step(
        objective, Optimizer(groups, train), scale=LossScale(train.precision, device), ema=None, clip=1.0, seed=0
    )
    if train.compile:
        objective.compile()
    rows, count = resolved.batch.micro, resolved.batch.accumulation
    micros = [to_device(objective.batch(np.arange(rows) + rows * i), device) for i in range(count)]
    batch = step_batch(objective, micros)
    begin = time.perf_counter()
    step.rehearse(batch)
    torch.cuda.synchronize()
    compiling = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(number, batch, 0.0)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    ms = statistics.median(times[3:])
    rate = resolved.tokens_per_step / ms * 1000
    peak = resolved.machine.peak("bf16")
    return {
        "case": case,
        "tokens_per_s": round(rate),
        "mfu": mfu(rate, resolved.flops.useful, peak),
        "mfu_causal": mfu(rate, resolved.flops.causal, peak),
        "step_ms": ms,
        "memory_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory_plan_gib": resolved.memory.peak / GIB,
        "first_step_s": compiling,
        "attention": objective.choices()[0][1:],
        "batch": [rows, count],
    }


def main() -> None:
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        source = random_tokens(Path(folder))
        for case in cases:
            try:
                results.append(measure(case, source))
            except Exception as error:
                results.append({"case": case, "error": f"{type(error).__name__}: {str(error)[:300]}"})
            print(json.dumps(results[-1]), flush=True)
    record = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "git": git_state(), "results": results}
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
