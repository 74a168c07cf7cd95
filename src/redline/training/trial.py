"""A trainer on random weights and tokens, ready for its first step: what is tried, timed and held against a plan."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.errors import UserError
from redline.hardware.probe import detect_machine
from redline.jobs.objective import job_runtime
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.runs.events import Event, EventLog
from redline.runs.monitor import Monitor, View
from redline.training.profiling import kernel_time
from redline.training.run_directory import RunDirectory
from redline.training.step import step_batch, to_device
from redline.training.step_log import peak_memory_gib
from redline.training.trainer import Trainer


class Silent:
    """A view that shows nothing."""

    def event(self, event: Event) -> None:
        return

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


class Heard(Silent):
    """What is to be known of figures."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def event(self, event: Event) -> None:
        if event["type"] in ("warning", "recovery"):
            self.warnings.append(str(event["message"]))


@dataclass(frozen=True)
class Ready:
    trainer: Trainer
    objective: Any
    resolved: Resolved
    facts: DataFacts
    warmup_s: float
    heard: Heard

    def said(self) -> dict[str, Any]:
        """How it was set up, and what it warned of."""
        recipe = self.resolved.recipe
        chosen = {choice.key: choice.value for choice in self.resolved.choices}
        return {
            "micro_batch": self.trainer.batch.micro,
            "warmup_s": self.warmup_s,
            "precision": recipe.train.precision,
            "compiled": recipe.train.compile,
            "kernels": recipe.model.kernels,
            "warnings": [*self.resolved.warnings, *self.objective.warnings(), *self.heard.warnings],
            "choices": chosen | {key: value for key, value, _ in self.objective.choices()},
        }


@contextmanager
def ready(tree: dict[str, Any], facts: DataFacts, *, where: str) -> Iterator[Ready]:
    """Of a resolved recipe and the facts of its data."""
    recipe = validate(tree, where=where)
    resolved = resolve(recipe, detect_machine(recipe.train.device), facts)
    runtime = job_runtime(recipe.objective)
    objective = runtime.create(resolved, runtime.random_data(facts))
    heard = Heard()
    with trainer_alone(resolved, objective, heard) as trainer:
        trainer.build()
        begin = time.perf_counter()
        trainer.warm_up()
        yield Ready(trainer, objective, resolved, facts, time.perf_counter() - begin, heard)


@contextmanager
def trainer_alone(resolved: Resolved, objective: Any, view: View) -> Iterator[Trainer]:
    """Not built yet; of its run nothing stays."""
    with (
        tempfile.TemporaryDirectory() as name,
        RunDirectory(Path(name)) as run,
        Monitor(EventLog(Path(name) / "events.jsonl"), view) as monitor,
    ):
        yield Trainer(resolved, objective, run, monitor, horizon_steps=None, identity={})


# ----------------------------------------------------------------------------------------------------
# A few real steps on random tokens, in a process of their own: what a plan's figures are held against.
#
#     python -m redline.training.trial < request.json
#
# The request holds a resolved recipe and the facts of its data, and may ask for `least_steps` to be timed and for a
# `profile` of so many more; the answer is one JSON line. A process of its own, because running out of memory, or a
# compiler that crashes, must not take the plan with it.


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
            trainer.train_step(step, batch, 1e-3)
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
