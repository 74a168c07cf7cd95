"""Where a step of `python -m benchmarks finetune` goes, kernel by kernel: its own rows, timed and then profiled.

    python -m benchmarks.studies.finetune_profile OUT.json CONTENDER [--top 30] [key=value …]

CONTENDER is the name of one of redline's rows, as `redline qlora packed`. The trace is not kept; times are of the GPU.
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

STEPS = 2  # under the profiler


def kernels(step: Any) -> list[dict[str, Any]]:
    """Milliseconds and calls a step, the longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for number in range(STEPS):
            step(number)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name].append(event.time_range.elapsed_us() / 1e3)
    rows = [{"ms": sum(each) / STEPS, "calls": len(each) / STEPS, "kernel": name} for name, each in times.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("contender", choices=[one.name for one in CONTENDERS if one.peer is None])
    parser.add_argument("--top", type=int, default=30)
    given, overrides = parser.parse_known_args()
    check_out(given.out)
    if not torch.cuda.is_available():
        raise UserError("kernels are timed on a GPU, and there is none here.")
    contender = next(one for one in CONTENDERS if one.name == given.contender)
    _, request = request_for(contender, choose(None, ["train.steps=5", *overrides]))
    with warm_trainer(request["recipe"], DataFacts(**request["facts"]), where="bench") as own:
        batch, _ = step_of(own, request["sample_tokens"])

        def step(number: int) -> torch.Tensor:
            return own.trainer.train_step(number, batch, 1.0).loss

        tokens, device = own.resolved.tokens_per_step, own.trainer.device
        figures = time_steps(step, steps=request["steps"], tokens=tokens, device=device)
        found = kernels(step)
    record = {"contender": contender.name, "overrides": overrides, **figures, **own.settings(), "kernels": found}
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    busy = sum(row["ms"] for row in found)
    print(f"{contender.name} {' '.join(overrides)}: {figures['tokens_per_s']:,.0f} tok/s, {figures['step_ms']:.0f} ms,")
    print(f"  {busy:.0f} ms in kernels, {figures['memory_gib']:.1f} GiB, warm-up {own.warmup_s:.0f} s")
    for row in found[: given.top]:
        print(f"{row['ms']:9.2f} ms {row['calls']:7.0f}×  {row['kernel'][:110]}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(error.message())
