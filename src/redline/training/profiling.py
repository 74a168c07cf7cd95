"""Profile a few training steps: where time goes by kernel or operator, and who allocates memory."""

from __future__ import annotations

import gzip
import os
import shutil
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
from redline.runs.breakdown import UPDATE, MemoryHistory, Span, covered, memory_history
from redline.training.step import BatchLoader
from redline.training.trainer import Trainer

_MAX_MEMORY_EVENTS = 1_000_000
_STEP = "redline.step"
_TORCH_STEP = "ProfilerStep"  # the range that torch.profiler puts around each step


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
            spans.append(Span(event.name, start, start + 1e-6 * event.self_cpu_time_total, _within(event, UPDATE)))
    return spans


def _within(event: Any, name: str) -> bool:
    parent = event.cpu_parent
    while parent is not None and parent.name != name:
        parent = parent.cpu_parent
    return parent is not None


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
