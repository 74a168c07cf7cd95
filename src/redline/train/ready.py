"""A trainer on random weights and tokens, ready for its first step: what is tried, timed and held against a plan."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.hardware.detect import detect
from redline.monitor.events import Event, EventLog
from redline.monitor.monitor import Monitor, View
from redline.objectives import objective_module
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.train.rundir import RunDirectory
from redline.train.trainer import Trainer


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
    resolved = resolve(recipe, detect(recipe.train.device), facts)
    module = objective_module(recipe.objective)
    objective = module.create(resolved, module.random_data(facts))
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
