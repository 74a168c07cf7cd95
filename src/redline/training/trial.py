"""Train a few steps on random weights and tokens, without a run, to measure speed and memory.

    python -m redline.training.trial < request.json

measures in a process of its own, because running out of memory or a crash of the compiler must not end the caller. The
request has a resolved recipe and the facts of its data, and optionally `least_steps` to time and `profile`, the number
of further steps to profile. The answer is one line of JSON.
"""

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
from redline.training.control import RunDirectory
from redline.training.profiling import kernel_time
from redline.training.step import peak_memory_gib, step_batch, to_device
from redline.training.trainer import Trainer


class SilentView:
    """A view that shows nothing."""

    def event(self, event: Event) -> None:
        return

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


class WarningCollector(SilentView):
    """A view that collects warnings: they may explain the measured figures."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def event(self, event: Event) -> None:
        if event["type"] in ("warning", "recovery"):
            self.warnings.append(str(event["message"]))


@dataclass(frozen=True)
class WarmTrainer:
    """A trainer that is built and warmed up."""

    trainer: Trainer
    objective: Any
    resolved: Resolved
    facts: DataFacts
    warmup_s: float
    collector: WarningCollector

    def settings(self) -> dict[str, Any]:
        """Return how the trainer is set up, and its warnings."""
        recipe = self.resolved.recipe
        chosen = {choice.key: choice.value for choice in self.resolved.choices}
        return {
            "micro_batch": self.trainer.batch.micro,
            "warmup_s": self.warmup_s,
            "precision": recipe.train.precision,
            "compiled": recipe.train.compile,
            "kernels": recipe.model.kernels,
            "warnings": [*self.resolved.warnings, *self.objective.warnings(), *self.collector.warnings],
            "choices": chosen | {key: value for key, value, _ in self.objective.choices()},
        }


@contextmanager
def warm_trainer(tree: dict[str, Any], facts: DataFacts, *, where: str) -> Iterator[WarmTrainer]:
    """Build and warm up a trainer from a resolved recipe and the facts of its data. `where` is for error messages."""
    recipe = validate(tree, where=where)
    resolved = resolve(recipe, detect_machine(recipe.train.device), facts)
    runtime = job_runtime(recipe.objective)
    objective = runtime.create(resolved, runtime.random_data(facts))
    collector = WarningCollector()
    with trainer_without_run(resolved, objective, collector) as trainer:
        trainer.build()
        begin = time.perf_counter()
        trainer.warm_up()
        yield WarmTrainer(trainer, objective, resolved, facts, time.perf_counter() - begin, collector)


@contextmanager
def trainer_without_run(resolved: Resolved, objective: Any, view: View) -> Iterator[Trainer]:
    """Make a trainer that is not built yet, with a temporary run directory."""
    with (
        tempfile.TemporaryDirectory() as name,
        RunDirectory(Path(name)) as run,
        Monitor(EventLog(Path(name) / "events.jsonl"), view) as monitor,
    ):
        yield Trainer(resolved, objective, run, monitor, horizon_steps=None, identity={})


UNTIMED_STEPS = 2  # the first steps, which only estimate how many steps to time
MIN_STEPS, MIN_SECONDS = 3, 3.0
MAX_STEPS, MAX_SECONDS = 30, 10.0


def trial(tree: dict[str, Any], facts: DataFacts, least_steps: int = MIN_STEPS, profile: int = 0) -> dict[str, Any]:
    """Measure training steps; return the answer as in the module's docstring."""
    with warm_trainer(tree, facts, where="trial") as warm:
        trainer = warm.trainer
        steps = _steps(trainer)
        seconds = _seconds_per_step(steps, least_steps)
        memory = peak_memory_gib(trainer.device)
        busy = kernel_time(lambda: steps(0, profile), trainer.device) if profile else None
    return {
        "tokens_per_s": warm.resolved.tokens_per_step / seconds,
        "step_ms": 1e3 * seconds,
        "memory_gib": memory,
        "compile_s": warm.warmup_s,
        "micro": trainer.batch.micro,
        "choices": [{"key": key, "value": value, "reason": reason} for key, value, reason in warm.objective.choices()],
        **({} if busy is None else {"kernel_ms": 1e3 * busy.kernels / profile, "kernel_share": busy.share}),
    }


def _steps(trainer: Trainer) -> Callable[[int, int], float]:
    """Return a function of (first, count) that trains `count` steps from step `first` on and returns the seconds."""
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
    estimate = steps(0, UNTIMED_STEPS) / UNTIMED_STEPS
    count = min(MAX_STEPS, max(least, round(MIN_SECONDS / estimate)))
    count = max(1, min(count, round(MAX_SECONDS / estimate)))
    return steps(UNTIMED_STEPS, count) / count


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
