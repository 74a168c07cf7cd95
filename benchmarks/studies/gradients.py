"""Error of a model's gradients relative to float32, for each way of computing its blocks.

    python -m benchmarks.studies.gradients OUT.json TOKENS_DIR [key=value …]

Train one `pretrain-350m`; at some of its steps compute the gradients of its weights on the same batch in every way. For
each kind of weight, report `error`, the norm of the error divided by the norm of the gradient, and `along`, the signed
part of the error along the gradient, where a systematic error shows. Without a GPU the model is tiny.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.runs import run_main
from redline.bench.setting import TINY
from redline.data.corpus import TextData, load_text
from redline.hardware.probe import detect_machine
from redline.jobs.causal_lm.objective import CausalLM
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.recipe.resolve import resolve
from redline.runs.monitor import SilentView
from redline.training.step import step_batch, to_device
from redline.training.trial import trainer_without_run

BATCH, WARMUP = 16, 50  # sequences a step; steps
COMPARE_AT = (0, 45, 150)  # steps before which the ways are compared
COMPILED = ("model.kernels=torch", "train.compile=true")
Ways = dict[str, tuple[str, ...]]
Row = dict[str, Any]

WAYS: Ways = {
    "float32": ("train.precision=fp32", "model.kernels=torch", "train.compile=false"),
    "compiled, cuDNN": (*COMPILED, "model.attention=cudnn"),
    "compiled, flash": (*COMPILED, "model.attention=flash"),
    "fused": ("model.kernels=fused",),
}
ON_A_CPU: Ways = {"float32": ("train.compile=false",), "compiled": ("train.compile=true",)}
COMMON = ("train.tokens=null", "train.steps=200", f"train.global_batch={BATCH}", "train.lr=1e-4")
Gradients = dict[str, Tensor]


def objective(words: tuple[str, ...], data: TextData) -> CausalLM:
    recipe = load("pretrain-350m", [*COMMON, *words]).recipe
    return CausalLM(resolve(recipe, detect_machine(recipe.train.device), data.facts), data)


def batches(job: CausalLM, step: int, micro: int) -> list[dict[str, Tensor]]:
    samples = np.arange(step * BATCH, (step + 1) * BATCH)
    return [to_device(job.batch(part), job.device) for part in np.split(samples, BATCH // micro)]


def gradients(words: tuple[str, ...], data: TextData, weights: Gradients, step: int) -> tuple[float, Gradients]:
    job = objective((*words, "train.micro_batch=4"), data)
    job.build(torch.device(job.recipe.train.device))
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            parameter.copy_(weights[name])
    if job.recipe.train.compile:
        job.compile()
    total = 0.0
    for micro in batches(job, step, 4):
        loss = job.loss(micro)["cross_entropy"].sum / (BATCH * job.seq_len)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.cpu() for name, p in job.model.named_parameters() if p.grad is not None}


def relative_errors(gradients: Gradients, exact: Gradients) -> dict[str, dict[str, float]]:
    """Return the errors by kind of weight: its name without the number of the layer."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    for name, gradient in exact.items():
        expected = gradient.double()
        error = gradients[name].double() - expected
        figures = torch.stack([error.square().sum(), (error * expected).sum(), expected.square().sum()])
        for kind in (re.sub(r"\d+", "*", name), "all"):
            sums[kind] += figures
    return {
        kind: {"error": (squared_error / square).sqrt().item(), "along": (along / square).item()}
        for kind, (squared_error, along, square) in sums.items()
    }


def compare(ways: Ways, common: tuple[str, ...], data: TextData, weights: Gradients, step: int) -> list[Row]:
    """Compare the gradients of every way on these weights with float32."""
    results = {way: gradients((*common, *words), data, weights, step) for way, words in ways.items()}
    exact = results["float32"][1]
    rows: list[Row] = [
        {"step": step, "way": way, "loss": loss, "kinds": relative_errors(of_way, exact)}
        for way, (loss, of_way) in results.items()
    ]
    for row in rows:
        errors = "  ".join(f"{name} {figure:+.5f}" for name, figure in row["kinds"]["all"].items())
        print(f"step {step:4d}  {row['way']:16s} loss {row['loss']:.5f}  {errors}", flush=True)
    return rows


def compare_while_training(ways: Ways, steps: tuple[int, ...], common: tuple[str, ...]) -> Iterator[list[Row]]:
    """Train, compare the ways before each of these steps, and yield all rows so far."""
    data = load_text(load("pretrain-350m", list(common)).recipe)
    job = objective(common, data)
    rows: list[Row] = []
    with trainer_without_run(job.resolved, job, SilentView()) as trainer:
        trainer.build()
        for step in range(max(steps) + 1):
            if step in steps:
                weights = {name: p.detach().clone() for name, p in job.model.named_parameters()}
                rows += compare(ways, common, data, weights, step)
                yield rows
            batch = step_batch(job, batches(job, step, job.resolved.batch.micro))
            trainer.train_step(step, batch, min(1.0, (step + 1) / WARMUP))


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m benchmarks.studies.gradients OUT.json TOKENS_DIR [key=value …]")
    out, source, *overrides = sys.argv[1:]
    gpu = torch.cuda.is_available()
    common = (*(() if gpu else (*TINY, f"train.global_batch={BATCH}")), f"data.source={source}", *overrides)
    device = torch.cuda.get_device_name() if gpu else "cpu"
    record: Row = {"words": list(common), "device": device, "versions": versions(), "git": git_state()}
    for rows in (
        compare_while_training(WAYS, COMPARE_AT, common) if gpu else compare_while_training(ON_A_CPU, (0, 4), common)
    ):
        Path(out).write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
