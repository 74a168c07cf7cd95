"""Check that this machine can train the 350M model: python scripts/test_optimized_model.py [--skip_compile]

Builds a small version of pretrain-350m and runs it (forward, backward, training, torch.compile, attention back-end),
and checks that the plan of the full model fits into this machine's memory. Takes less than a minute on a CPU. The exit
code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

try:
    import torch

    from redline.hardware.probe import detect_machine
    from redline.jobs.objective import job_runtime
    from redline.recipe.load import load
    from redline.recipe.resolve import DataFacts, Resolved, resolve
    from redline.training.distributed import SINGLE_PROCESS
    from redline.training.optim import Optimizer
    from redline.training.parallel import ParallelStrategy
    from redline.training.step import LossScale, Step, step_batch, to_device
    from redline.units import GIB
except ModuleNotFoundError as error:
    name = Path(sys.argv[0]).name
    sys.exit(f"{error.name} is not installed. Run `make setup`, then .venv/bin/python scripts/{name}")

FULL = DataFacts(50257, 10**10, 10**7, "", "gpt2", "")
SMALL = DataFacts(512, 10**6, 10**4, "", "bytes", "")
TINY = ["model.layers=2", "model.d_model=128", "model.heads=2", "model.d_ff=320", "data.seq_len=128"]
TINY += ["train.global_batch=8", "train.micro_batch=8", "train.lr=3e-3", "train.warmup_steps=0"]
LEARNING_STEPS = 12

Result = tuple[bool | None, str]  # passed (None: skipped), and details


class SmallModel:
    """The small model and its training step, with one fixed batch of random tokens."""

    def __init__(self, resolved: Resolved) -> None:
        train = resolved.recipe.train
        self.device = torch.device(train.device)
        self.exact = train.precision == "fp32"
        runtime = job_runtime(resolved.recipe.objective)
        self.objective = runtime.create(resolved, runtime.random_data(SMALL))
        self.objective.build(self.device)
        optimizer = Optimizer(self.objective.param_groups(), train)
        scale = LossScale(train.precision, self.device)
        parallel = ParallelStrategy(SINGLE_PROCESS, self.objective)
        self.step = Step(self.objective, optimizer, parallel=parallel, scale=scale, ema=None, clip=train.clip, seed=0)
        self.batch = step_batch(self.objective, [to_device(self.objective.worst_batch(8), self.device)])
        self.resolved = resolved

    def loss(self) -> float:
        loss, _ = self.step.backward(0, self.batch)
        return float(loss)


def parameters(model: SmallModel, full: Resolved) -> Result:
    built = sum(p.numel() for p in model.objective.model.parameters())
    planned = model.resolved.shape.parameters
    return built == planned, f"350M recipe {full.shape.parameters:,}; small model: {built:,} built, {planned:,} planned"


def forward(model: SmallModel, full: Resolved) -> Result:
    loss, uniform = model.loss(), math.log(SMALL.vocab_size)
    return abs(loss - uniform) < 0.5, f"loss {loss:.3f}; a uniform guess has ln {SMALL.vocab_size} = {uniform:.3f}"


def backward(model: SmallModel, full: Resolved) -> Result:
    model.loss()
    named = dict(model.objective.model.named_parameters())
    bad = [n for n, p in named.items() if p.grad is None or not torch.isfinite(p.grad).all() or not p.grad.any()]
    examples = f" (not {', '.join(bad[:3])})" if bad else ""
    return not bad, f"{len(named) - len(bad)} of {len(named)} gradients finite and not zero{examples}"


def attention(model: SmallModel, full: Resolved) -> Result:
    key, value, reason = model.objective.choices()[0]
    return True, f"{key.split('.')[-1]} = {value}: {reason}"


def compiles(model: SmallModel, full: Resolved) -> Result:
    if model.device.type == "cpu" and not model.resolved.machine.compiler:
        return None, "no C++ compiler on this machine (g++ or clang++)"
    before, begin = model.loss(), time.perf_counter()
    model.objective.compile()
    after, seconds = model.loss(), time.perf_counter() - begin
    close = abs(after - before) < (1e-4 if model.exact else 2e-2)
    return close, f"loss {after:.5f}, eager {before:.5f}; compiled in {seconds:.0f} s"


def learns(model: SmallModel, full: Resolved) -> Result:
    losses = [float(model.step(number, model.batch, 1.0).loss) for number in range(LEARNING_STEPS)]
    return losses[-1] < losses[0] - 0.3, f"{losses[0]:.3f} → {losses[-1]:.3f} in {LEARNING_STEPS} steps on one batch"


def memory(model: SmallModel, full: Resolved) -> Result:
    peak, available = full.memory.peak / GIB, full.machine.memory_bytes / GIB
    batch = f"micro-batch {full.batch.micro} × {full.batch.accumulation}"
    used = ""
    if model.device.type == "cuda":
        planned, measured = model.resolved.memory.peak / GIB, torch.cuda.max_memory_allocated() / GIB
        used = f"; small model: planned {planned:.2f}, measured {measured:.2f} GiB"
    return peak <= available, f"350M with {batch}: estimated {peak:.1f} of {available:.1f} GiB{used}"


CHECKS: dict[str, Callable[[SmallModel, Resolved], Result]] = {
    "parameters": parameters,
    "attention": attention,
    "forward": forward,
    "backward": backward,
    "learns": learns,
    "compile": compiles,
    "memory": memory,
}


def run_checks(skip_compile: bool) -> Iterator[tuple[str, bool | None, str]]:
    machine = detect_machine("auto")
    full = resolve(load("pretrain-350m").recipe, machine, FULL)
    model = SmallModel(resolve(load("pretrain-350m", TINY).recipe, machine, SMALL))
    yield "machine", True, f"{machine.name}, trains in {full.recipe.train.precision}"
    for name, check in CHECKS.items():
        if name == "compile" and skip_compile:
            yield name, None, "skipped by --skip_compile"
            continue
        try:
            yield name, *check(model, full)
        except Exception as error:  # whatever a check raises is reported as its failure, and the others still run
            yield name, False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--skip_compile", action="store_true", help="do not try torch.compile")
    failed: list[Any] = []
    for name, passed, text in run_checks(parser.parse_args().skip_compile):
        word = {True: "ok", False: "FAIL", None: "skip"}[passed]
        print(f"{word:<5} {name:<11} {text}", flush=True)
        failed += [name] if passed is False else []
    if failed:
        print(f"{', '.join(failed)} failed")
        return 1
    print("all checks passed; to train: python scripts/train_h100_optimized.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
