"""Which matmuls of small steps to run in fp8: the choices of two ways of timing, and the step time with each choice.

    python -m benchmarks.studies.which_fp8 OUT.json TOKENS_DIR

The shapes are those of `time-to-loss`: `race-350m` at 16 × 1024 tokens, `speedrun-50m` at 32 × 1024. One way waits for
each call, so that it times the launch where the kernel is small; the other queues all calls first. Then the real loop
trains with each choice, and with every matmul in fp8, alone on the card.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.studies.runs import run_training
from benchmarks.time_to_loss import median_step_ms
from redline.bench.setting import UNDISTURBED
from redline.hardware.measurements import FLOAT8, store_measurement
from redline.kernels import float8_choice
from redline.kernels.cross_entropy import chunk_tokens
from redline.kernels.float8_choice import CAST, Shapes
from redline.recipe.lock import git_state, versions

VOCABULARY = 50304
STEPS, WINDOW = 90, 10
STOP = ("train.hours=null", f"train.steps={STEPS}", f"monitor.log_every={WINDOW}", "train.warmup_steps=10")


def shapes(tokens: int, width: int, inner: int) -> Shapes:
    """Return the matmul shapes of a gated block and of the head, as a run measures them."""
    return {
        "qkv": (tokens, width, 3 * width),
        "out": (tokens, width, width),
        "up": (tokens, width, 2 * inner),
        "down": (tokens, inner, width),
        "head": (chunk_tokens(VOCABULARY, tokens), width, VOCABULARY),
    }


MODELS = {"race-350m": shapes(16 * 1024, 1024, 2688), "speedrun-50m": shapes(32 * 1024, 512, 1408)}


def waiting_ms(work: Callable[[], Any]) -> float:
    """Return the median time of a call, waiting for each: the way redline timed this choice before."""
    for _ in range(2):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


Times = dict[str, tuple[float, float]]


def time_matmuls(model: Shapes) -> Times:
    """Return the milliseconds of each matmul in bf16 and in fp8."""
    return {name: float8_choice.measure("native", *shape, cast=name in CAST) for name, shape in model.items()}


def faster_in_fp8(times: Times) -> tuple[str, ...]:
    return tuple(name for name, (bf16, fp8) in times.items() if fp8 < bf16)


def real_step(recipe: str, model: Shapes, linears: Iterable[str], source: str) -> dict[str, Any]:
    """Train with only these linears in fp8 and return the figures of a step.

    The choice is put into the measurement cache as invented times, so that the run reads it and measures nothing.
    """
    invented = {name: (2.0, 1.0) if name in linears else (1.0, 2.0) for name in model}
    store_measurement(FLOAT8, float8_choice._key("native", model, True), {"ms": invented})
    run = run_training([recipe, *UNDISTURBED, *STOP, f"data.source={source}"])
    chosen = [choice["value"] for choice in run.lock["choices"] if choice["key"] == "train.fp8"]
    memory = [event["memory_gib"] for event in run.of_type("step")]
    graph_messages = [event["message"] for event in run.of_type("warmup") if "launch" in event.get("message", "")]
    return {
        "chosen": chosen,
        "step_ms": median_step_ms(run.events),
        "power_w": run.of_type("step")[-1].get("power_w"),
        "memory_gib": max(memory),
        "graph": graph_messages,
    }


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.studies.which_fp8 OUT.json TOKENS_DIR")
    if not torch.cuda.is_available():
        sys.exit("This study needs a GPU with fp8.")
    out, source = Path(sys.argv[1]), sys.argv[2]
    if not Path(source).is_dir():
        sys.exit(f"{source} is not a folder. TOKENS_DIR is a folder that `redline prepare` wrote.")
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "git": git_state()}
    for recipe, model in MODELS.items():
        queued = time_matmuls(model)
        with mock.patch.object(float8_choice, "kernel_ms", waiting_ms):
            waiting = time_matmuls(model)
        torch.cuda.empty_cache()
        ways = {"queued": faster_in_fp8(queued), "waiting": faster_in_fp8(waiting), "all": tuple(model)}
        record[recipe] = {"ms in bf16 and fp8": {"queued": queued, "waiting": waiting}, "chosen": ways, "steps": {}}
        for linear in model:
            figures = [" → ".join(f"{ms:.3f}" for ms in way[linear]) for way in (waiting, queued)]
            print(f"{recipe:14} {linear:5} {figures[0]:16} queued {figures[1]}", flush=True)
        for linears in dict.fromkeys(ways.values()):
            name = " ".join(linears) or "none"
            row = record[recipe]["steps"][name] = real_step(recipe, model, linears, source)
            print(f"{recipe:14} {name:26} {row['step_ms']:.2f} ms", flush=True)
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["REDLINE_CACHE"] = cache  # the invented times must not reach the real cache
        main()
