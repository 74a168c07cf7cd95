"""The time of each kernel in a step of `python -m benchmarks finetune`: run one of its rows, time it, then profile it.

    python -m benchmarks.studies.finetune_profile OUT.json CONTENDER [--top 30] [key=value …]

CONTENDER is the name of one of redline's rows, for example `redline qlora packed`. Times are GPU times. The trace is
not saved.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.finetune import CONTENDERS, choose, request_for
from benchmarks.finetune_steps import step_of, time_steps
from redline.bench.record import check_out
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.training.trial import warm_trainer

PROFILED_STEPS = 2


def kernels(step: Any) -> list[dict[str, Any]]:
    """Return milliseconds and calls per step of each kernel, longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for number in range(PROFILED_STEPS):
            step(number)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name].append(event.time_range.elapsed_us() / 1e3)
    rows = [
        {"ms": sum(each) / PROFILED_STEPS, "calls": len(each) / PROFILED_STEPS, "kernel": name}
        for name, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("contender", choices=[one.name for one in CONTENDERS if one.peer is None])
    parser.add_argument("--top", type=int, default=30)
    options, overrides = parser.parse_known_args()
    check_out(options.out)
    if not torch.cuda.is_available():
        raise UserError("This study times GPU kernels, and this machine has no GPU.")
    contender = next(one for one in CONTENDERS if one.name == options.contender)
    _, request = request_for(contender, choose(None, ["train.steps=5", *overrides]))
    with warm_trainer(request["recipe"], DataFacts(**request["facts"]), where="bench") as warm:
        batch, _ = step_of(warm, request["sample_tokens"])

        def step(number: int) -> torch.Tensor:
            return warm.trainer.train_step(number, batch, 1.0).loss

        tokens, device = warm.resolved.tokens_per_step, warm.trainer.device
        figures = time_steps(step, steps=request["steps"], tokens=tokens, device=device)
        rows = kernels(step)
    record = {"contender": contender.name, "overrides": overrides, **figures, **warm.settings(), "kernels": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    busy = sum(row["ms"] for row in rows)
    print(f"{contender.name} {' '.join(overrides)}: {figures['tokens_per_s']:,.0f} tok/s, {figures['step_ms']:.0f} ms,")
    print(f"  {busy:.0f} ms in kernels, {figures['memory_gib']:.1f} GiB, warm-up {warm.warmup_s:.0f} s")
    for row in rows[: options.top]:
        print(f"{row['ms']:9.2f} ms {row['calls']:7.0f}×  {row['kernel'][:110]}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(error.message())
