"""A few real steps on random tokens, in a process of their own: what a plan's figures are held against.

    python -m redline.train.trial < request.json

The request holds a resolved recipe and the facts of its data; the answer is one JSON line. A process of its own,
because running out of memory, or a compiler that crashes, must not take the plan with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from redline.errors import UserError
from redline.hardware.detect import detect
from redline.monitor.events import Event, EventLog
from redline.monitor.monitor import Monitor
from redline.objectives import objective_module
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, resolve
from redline.train.feed import step_batch, to_device
from redline.train.log import peak_memory_gib
from redline.train.rundir import RunDirectory
from redline.train.trainer import Trainer

SETTLE_STEPS = 2
LEAST_STEPS, LEAST_SECONDS = 3, 3.0
MOST_STEPS, MOST_SECONDS = 30, 10.0


class _Silent:
    def event(self, event: Event) -> None:
        return

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


def trial(tree: dict[str, Any], facts: DataFacts, folder: Path) -> dict[str, Any]:
    recipe = validate(tree, where="trial")
    resolved = resolve(recipe, detect(recipe.train.device), facts)
    module = objective_module(recipe.objective)
    objective = module.create(resolved, module.random_data(facts))
    with RunDirectory(folder) as run, Monitor(EventLog(folder / "events.jsonl"), _Silent()) as monitor:
        trainer = Trainer(resolved, objective, run, monitor, horizon_steps=None, identity={})
        trainer.build()
        begin = time.perf_counter()
        trainer.warm_up()
        compile_s = time.perf_counter() - begin
        seconds = _seconds_per_step(trainer)
    return {
        "tokens_per_s": resolved.tokens_per_step / seconds,
        "step_ms": 1e3 * seconds,
        "memory_gib": peak_memory_gib(trainer.device),
        "compile_s": compile_s,
        "micro": trainer.batch.micro,
    }


def _seconds_per_step(trainer: Trainer) -> float:
    micro = to_device(trainer.objective.worst_batch(trainer.batch.micro), trainer.device)
    batch = step_batch(trainer.objective, [micro] * trainer.batch.accumulation)

    def steps(first: int, count: int) -> float:
        begin = time.perf_counter()
        for step in range(first, first + count):
            trainer.step(step, batch, 1e-3)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    settling = steps(0, SETTLE_STEPS) / SETTLE_STEPS
    count = min(MOST_STEPS, max(LEAST_STEPS, round(LEAST_SECONDS / settling)))
    count = max(1, min(count, round(MOST_SECONDS / settling)))
    return steps(SETTLE_STEPS, count) / count


def main() -> None:
    request = json.load(sys.stdin)
    try:
        with tempfile.TemporaryDirectory() as folder:
            answer = trial(request["recipe"], DataFacts(**request["facts"]), Path(folder))
    except UserError as error:
        answer = {"error": error.message()}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
