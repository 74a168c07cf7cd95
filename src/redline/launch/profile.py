"""Profile training steps of a recipe: everything that `redline profile` prints and writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cache import write_atomically
from redline.errors import UsageError
from redline.launch.start import set_environment
from redline.recipe.forecast import step_work
from redline.recipe.load import Loaded
from redline.recipe.resolve import Resolved, resolve_tried
from redline.runs.breakdown import MATMUL, Breakdown, MemoryHistory, breakdown
from redline.runs.roofline import limits_ms

if TYPE_CHECKING:
    from redline.data.sources import Progress


@dataclass(frozen=True)
class StepProfile:
    """The time of a step by kind of work, the memory by the code that allocated it, and the files with the details."""

    name: str  # of the recipe
    parts: Breakdown
    memory: MemoryHistory | None
    peak_memory_gib: float | None
    files: list[Path]

    def record(self) -> dict[str, Any]:
        """Return the content of profile.json."""
        memory = None if self.memory is None else self.memory.data()
        return {"recipe": self.name, **self.parts.data(), "peak_memory_gib": self.peak_memory_gib, "memory": memory}


def profile_recipe(
    loaded: Loaded,
    options: dict[str, Any],
    folder: Path,
    *,
    preparation: AbstractContextManager[Callable[[Progress], None]],
    on_step: Callable[[int, int], None],
    log: Callable[[str], None],
) -> StepProfile:
    """Train a few steps under the profiler, and write profile.json and the trace into the folder.

    `options` are fields of `training.trial.Recording`. `preparation` shows the progress of preparing the data, and
    `on_step` is called with the number of finished steps and of all steps.
    """
    set_environment(loaded.recipe)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler's messages about starting and stopping
    # These import torch, which reads the environment when it is imported.
    from redline.hardware.probe import detect_machine
    from redline.jobs.objective import job_runtime
    from redline.models.fused_trial import fused_failure
    from redline.runs.monitor import SilentView
    from redline.training.step import peak_memory_gib
    from redline.training.trial import Recording, memory_recorded, profiled, trainer_without_run

    machine = detect_machine(loaded.recipe.train.device)
    if machine.device == "mps":
        what = "torch's profiler does not see what the GPU of a Mac does."
        raise UsageError(
            what, where="redline profile", fix="Profile on the CPU with train.device=cpu, or use Instruments."
        )
    recording = Recording(**options)
    runtime = job_runtime(loaded.recipe.objective)
    recipe = runtime.complete(loaded.recipe, log)
    with preparation as progress:
        data = runtime.load_data(recipe, progress=progress)
    resolved = resolve_tried(recipe, machine, data.facts, fused_failure)
    # A teacher model generates data for the profiled steps only.
    resolved = replace(resolved, horizon_steps=recording.steps)
    objective = runtime.create(resolved, data)
    trace = folder / f"{loaded.name}.pt.trace.json.gz"
    with trainer_without_run(resolved, objective, SilentView()) as trainer:
        with memory_recorded(trainer.device) as recorded:
            log("building and warming up")
            trainer.build()
            trainer.warm_up()
            measured = profiled(trainer, recording, trace, lambda done: on_step(done, recording.steps))
            memory = recorded()
        peak = peak_memory_gib(trainer.device)
    parts = breakdown(
        measured.spans,
        steps=recording.active,
        seconds=measured.seconds,
        busy=measured.busy,
        data_wait=measured.data_wait,
        best=_best(resolved),
        gpu=trainer.device.type == "cuda",
    )
    files = [folder / "profile.json", trace]
    result = StepProfile(loaded.name, parts, memory, peak, files)
    write_atomically(files[0], json.dumps(result.record(), indent=1) + "\n")
    return result


def _best(resolved: Resolved) -> dict[str, float]:
    """Return the planned milliseconds per kind of work at the best known rates; on a CPU only those of matmuls."""
    best = limits_ms({"type": "plan", **resolved.plan_event()}, "ms_per_step")
    if not best and resolved.machine.cpu_flops:
        best[MATMUL] = 1e3 * resolved.tokens_per_step * step_work(resolved).matmul / resolved.machine.cpu_flops
    return best
