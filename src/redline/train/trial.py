"""A few real steps on random tokens, in a process of their own: what a plan's figures are held against.

    python -m redline.train.trial < request.json

The request holds a resolved recipe and the facts of its data, and may ask for `least_steps` to be timed and for a
`profile` of so many more; the answer is one JSON line. A process of its own, because running out of memory, or a
compiler that crashes, must not take the plan with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.train.feed import step_batch, to_device
from redline.train.kernel_time import kernel_time
from redline.train.log import peak_memory_gib
from redline.train.ready import ready
from redline.train.trainer import Trainer

SETTLE_STEPS = 2
LEAST_STEPS, LEAST_SECONDS = 3, 3.0
MOST_STEPS, MOST_SECONDS = 30, 10.0


def trial(tree: dict[str, Any], facts: DataFacts, least_steps: int = LEAST_STEPS, profile: int = 0) -> dict[str, Any]:
    with ready(tree, facts, where="trial") as own:
        trainer = own.trainer
        steps = _steps(trainer)
        seconds = _seconds_per_step(steps, least_steps)
        memory = peak_memory_gib(trainer.device)
        busy = kernel_time(lambda: steps(0, profile), trainer.device) if profile else None
    return {
        "tokens_per_s": own.resolved.tokens_per_step / seconds,
        "step_ms": 1e3 * seconds,
        "memory_gib": memory,
        "compile_s": own.warmup_s,
        "micro": trainer.batch.micro,
        "choices": [{"key": key, "value": value, "reason": reason} for key, value, reason in own.objective.choices()],
        **({} if busy is None else {"kernel_ms": 1e3 * busy.kernels / profile, "kernel_share": busy.share}),
    }


def _steps(trainer: Trainer) -> Callable[[int, int], float]:
    """Seconds that `count` steps take, beginning with step `first`."""
    micro = to_device(trainer.objective.worst_batch(trainer.batch.micro), trainer.device)
    batch = step_batch(trainer.objective, [micro] * trainer.batch.accumulation)

    def steps(first: int, count: int) -> float:
        begin = time.perf_counter()
        for step in range(first, first + count):
            trainer.step(step, batch, 1e-3)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return steps


def _seconds_per_step(steps: Callable[[int, int], float], least: int) -> float:
    settling = steps(0, SETTLE_STEPS) / SETTLE_STEPS
    count = min(MOST_STEPS, max(least, round(LEAST_SECONDS / settling)))
    count = max(1, min(count, round(MOST_SECONDS / settling)))
    return steps(SETTLE_STEPS, count) / count


def main() -> None:
    request = json.load(sys.stdin)
    try:
        options = {key: request[key] for key in ("least_steps", "profile") if key in request}
        answer = trial(request["recipe"], DataFacts(**request["facts"]), **options)
    except UserError as error:
        answer = {"error": error.message()}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
