"""Effect of a batch that grows during a run, at the same number of tokens. redline has no such schedule: emulate it.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.growing_batch SOURCE STEPSxMICROS [STEPSxMICROS …]

Each phase is a number of steps and of micro-batches per step: `300x1 150x2` is 300 steps of 8 sequences, then 150 of
16, with the data in their usual order. The model is that of `parts.py`; BATCH=4 in the environment makes micro-batches
of 4.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.studies.parts import ARMS, COMMON
from redline.cli.main import main as redline
from redline.training import step as training_step
from redline.training.step import StepBatch

ARM = "race, betas 0.7, 0.998, no decay"
Phases = list[tuple[int, int]]  # steps, and micro-batches per step


def parse_phases(words: list[str]) -> Phases:
    try:
        return [(int(steps), int(micros)) for steps, _, micros in (word.partition("x") for word in words)]
    except ValueError:
        sys.exit("A phase is written STEPSxMICROS, for example 300x1.")


def micro_batches_of(step: int, phases: Phases) -> tuple[int, int]:
    """Return the index in the run of a step's first micro-batch, and the step's number of micro-batches."""
    first = 0
    for steps, micros in phases[:-1]:
        if step < steps:
            return first + step * micros, micros
        first, step = first + steps * micros, step - steps
    return first + step * phases[-1][1], phases[-1][1]


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m benchmarks.studies.growing_batch SOURCE STEPSxMICROS [STEPSxMICROS …]")
    source, phases = sys.argv[1], parse_phases(sys.argv[2:])
    steps, batch = sum(count for count, _ in phases), os.environ.get("BATCH", "8")

    def make(self: training_step.BatchLoader, step: int) -> StepBatch:
        (first, micros), micro = micro_batches_of(step, phases), self.plan.micro
        starts = range(first * micro, (first + micros) * micro, micro)
        return training_step.step_batch(self.objective, [self.objective.batch(np.arange(s, s + micro)) for s in starts])

    training_step.BatchLoader._make = make  # type: ignore[method-assign]
    last = [f"data.source={source}", f"train.steps={steps}", f"eval.every={steps}", f"train.global_batch={batch}"]
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        sys.argv = ["redline", "train", "pretrain-350m", *COMMON, *ARMS[ARM], *last, "--run", run]
        redline()


if __name__ == "__main__":
    main()
