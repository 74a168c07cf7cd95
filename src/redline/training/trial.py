"""Train a few steps without a run, to measure speed and memory and to profile.

    python -m redline.training.trial < request.json

trains on random weights and tokens in a process of its own, because running out of memory or a crash of the compiler
must not end the caller. The request has a resolved recipe and the facts of its data, and optionally `least_steps` to
time and `profile`, the number of further steps to profile. The answer is one line of JSON.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from redline.errors import UserError
from redline.hardware.device import synchronize
from redline.hardware.host import keep_freed_memory_mapped
from redline.hardware.probe import detect_machine
from redline.jobs.objective import job_runtime
from redline.models.fused_trial import fused_failure
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, Resolved, resolve_tried
from redline.runs.breakdown import UPDATE, MemoryHistory, Span, covered, memory_history
from redline.runs.events import Event, EventLog
from redline.runs.monitor import Monitor, SilentView, View
from redline.training.control import RunDirectory
from redline.training.step import BatchLoader, peak_memory_gib, step_batch, to_device
from redline.training.trainer import Trainer

# ----------------------------------------------------------------------------------------------------
# Profiling: where the time of a step goes by kernel or operator, and who allocates memory.


_MAX_MEMORY_EVENTS = 1_000_000
_STEP = "redline.step"
_TORCH_STEP = "ProfilerStep"  # the range that torch.profiler puts around each step
_ATTENTION = "_MatmulAttention"  # attention on a CPU, forward and backward


@dataclass(frozen=True)
class Recording:
    """What to record, with the names of torch.profiler's options."""

    active: int = 3  # recorded steps
    wait: int = 2  # steps before them, without the profiler
    warmup: int = 1  # steps between, profiled but discarded: starting the profiler slows the first one
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    @property
    def unrecorded(self) -> int:
        return self.wait + self.warmup

    @property
    def steps(self) -> int:
        return self.unrecorded + self.active


@dataclass(frozen=True)
class Profiled:
    spans: list[Span]
    steps: int
    seconds: float
    busy: float  # of `seconds`, those in which a kernel (on a CPU: an operator) ran
    data_wait: float


def profiled(
    trainer: Trainer, recording: Recording, trace: Path, on_step: Callable[[int], None] = lambda _: None
) -> Profiled:
    """Profile steps of a trainer that is built and warmed up, and write the trace.

    `on_step` is called with the number of steps done.
    """
    setattr(trainer.optimizer, "step", _in_range(UPDATE, trainer.optimizer.step))  # noqa: B010, on one instance
    gpu = trainer.device.type == "cuda"
    begin = seconds = wait_seconds = 0.0
    events: list[Any] = []

    def finished(profiler: profile) -> None:
        _export(profiler, trace)
        events.extend(profiler.events() or [])

    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])],
        schedule=schedule(wait=recording.wait, warmup=recording.warmup, active=recording.active, repeat=1),
        on_trace_ready=finished,
        record_shapes=recording.record_shapes,
        profile_memory=recording.profile_memory,
        with_stack=recording.with_stack,
    )
    data = trainer.recipe.data
    work = (trainer.objective, trainer.batch, trainer.device, data.workers, 0)
    with BatchLoader(*work, depth=data.prefetch) as loader, profiler:
        for step in range(recording.steps):
            if step == recording.unrecorded:
                begin = time.perf_counter()
            with record_function(_STEP):
                batch = loader.next(step)
                trainer.train_step(step, batch, 1e-3)
            wait_seconds += batch.wait_seconds if step >= recording.unrecorded else 0.0
            if gpu and step + 1 in (recording.unrecorded, recording.steps):
                torch.cuda.synchronize()  # else queued kernels would run, and be recorded, in the next phase
            seconds = time.perf_counter() - begin
            on_step(step + 1)
            profiler.step()  # after the last step it stops and calls `finished`
    spans = _kernels(events) if gpu else _operators(events)
    busy = covered((s.start, s.end) for s in spans) if gpu else sum(s.end - s.start for s in spans)
    return Profiled(spans, recording.active, seconds, busy, wait_seconds)


def _export(profiler: profile, trace: Path) -> None:
    """Write the compressed trace.

    The uncompressed one is written beside it and not into the temporary folder, which may be small: torch writes a
    truncated file there without an error.
    """
    plain = trace.with_suffix("")
    try:
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(trace, "wb") as packed:
            shutil.copyfileobj(source, packed)
            source.seek(-min(16, source.tell()), os.SEEK_END)
            if not source.read().rstrip().endswith(b"}"):  # torch raises no error if the disk is full
                raise UserError("the trace is incomplete.", where=str(trace), fix="Free some disk space.")
    finally:
        plain.unlink(missing_ok=True)


def _in_range(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with record_function(name):
            return work(*args, **options)

    return run


def _kernels(events: list[Any]) -> list[Span]:
    """Return the kernels of the GPU, marked if they ran within the optimizer's range."""
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    ranges = [_seconds(event) for event in on_gpu if event.is_user_annotation and event.name == UPDATE]
    spans = []
    for event in on_gpu:
        if not event.is_user_annotation:
            start, end = _seconds(event)
            spans.append(Span(event.name, start, end, any(a <= start < b for a, b in ranges)))
    return spans


def _operators(events: list[Any]) -> list[Span]:
    """Return the operators of the training thread on a CPU, each with its own time without those that it called."""
    training_thread = next((event.thread for event in events if event.name == _STEP), None)
    spans = []
    for event in events:
        is_range = event.name in (_STEP, UPDATE) or event.name.startswith(_TORCH_STEP)
        is_python = getattr(event, "is_python_function", False)  # with_stack records an event for each Python call
        if event.thread == training_thread and not is_range and not is_python and event.self_cpu_time_total > 0:
            start, _ = _seconds(event)
            # The matmuls of attention are a part of it.
            name = next((caller for caller in _callers(event) if caller.startswith(_ATTENTION)), event.name)
            spans.append(Span(name, start, start + 1e-6 * event.self_cpu_time_total, UPDATE in _callers(event)))
    return spans


def _callers(event: Any) -> list[str]:
    """Return the names of the operators and ranges that an operator ran within, the innermost first."""
    names, parent = [], event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    return names


def _seconds(event: Any) -> tuple[float, float]:
    return 1e-6 * event.time_range.start, 1e-6 * event.time_range.end


@contextmanager
def memory_recorded(device: torch.device) -> Iterator[Callable[[], MemoryHistory | None]]:
    """Record allocations and the Python code that makes them; None without a GPU, whose allocator keeps the record."""
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MAX_MEMORY_EVENTS)
    try:
        yield lambda: memory_history(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()])
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


# ----------------------------------------------------------------------------------------------------
# The share of wall time in which the GPU runs kernels.


_NO_KERNELS = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Busy:
    """Seconds in kernels and in all. The profiler slows the host a little, so the share is a lower bound."""

    kernels: float
    wall: float

    @property
    def share(self) -> float:
        return self.kernels / self.wall


def kernel_time(work: Callable[[], object], device: torch.device) -> Busy | None:
    """Measure `work` under the profiler until the GPU has finished it; None without a GPU or if profiling fails."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            wall = time.perf_counter() - begin
        events = profiler.events() or []
    except RuntimeError:  # another profiler is active, or the process has no permission
        return None
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        # a user annotation also covers the pauses between its kernels
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(_NO_KERNELS)
    ]
    return Busy(covered(spans) / 1e6, wall) if spans else None


# ----------------------------------------------------------------------------------------------------
# Trial steps on random weights and tokens.


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
    keep_freed_memory_mapped()  # as a run does: without it a CPU step spends up to a fifth of its time on page faults
    recipe = validate(tree, where=where)
    resolved = resolve_tried(recipe, detect_machine(recipe.train.device), facts, fused_failure)
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
        synchronize(trainer.device)
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
