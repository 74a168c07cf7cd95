"""A few steps of the real loop under the profiler."""

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

_HISTORY = 1_000_000  # events of the allocator
_STEP = "redline.step"
_TORCHS_STEP = "ProfilerStep"  # a range of torch.profiler around each step


@dataclass(frozen=True)
class Recording:
    """What the profiler records, under the names that torch.profiler has for it."""

    active: int = 3  # steps that are recorded
    wait: int = 2  # steps before, without the profiler
    warmup: int = 1  # steps before, under the profiler and thrown away: starting it slows the first
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    @property
    def settling(self) -> int:
        return self.wait + self.warmup

    @property
    def steps(self) -> int:
        return self.settling + self.active


@dataclass(frozen=True)
class Profiled:
    spans: list[Span]
    steps: int
    seconds: float
    busy: float  # seconds of these in which a kernel, or an operator, ran
    data_wait: float


def profiled(
    trainer: Trainer, recording: Recording, trace: Path, told: Callable[[int], None] = lambda _: None
) -> Profiled:
    """Profile steps of a trainer that is built and warmed up; `told` is called with the number of steps done."""
    setattr(trainer.optimizer, "step", _named(UPDATE, trainer.optimizer.step))  # noqa: B010, a method of one instance
    gpu = trainer.device.type == "cuda"
    begin = seconds = waited = 0.0
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
    with BatchLoader(*work, depth=data.prefetch) as feed, profiler:
        for step in range(recording.steps):
            if step == recording.settling:
                begin = time.perf_counter()
            with record_function(_STEP):
                batch = feed.next(step)
                trainer.train_step(step, batch, 1e-3)
            waited += batch.seconds if step >= recording.settling else 0.0
            if gpu and step + 1 in (recording.settling, recording.steps):
                torch.cuda.synchronize()  # kernels that are still queued would run, and be recorded, in the next part
            seconds = time.perf_counter() - begin
            told(step + 1)
            profiler.step()  # after the last one it stops, and calls `finished`
    spans = _kernels(events) if gpu else _operators(events)
    busy = covered((s.start, s.end) for s in spans) if gpu else sum(s.end - s.start for s in spans)
    return Profiled(spans, recording.active, seconds, busy, waited)


def _export(profiler: profile, trace: Path) -> None:
    """Beside the trace, not where temporary files go, which torch would fill in silence."""
    plain = trace.with_suffix("")
    try:
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as whole, gzip.open(trace, "wb") as packed:
            shutil.copyfileobj(whole, packed)
            whole.seek(-min(16, whole.tell()), os.SEEK_END)
            if not whole.read().rstrip().endswith(b"}"):  # torch does not say that a disk was full
                raise UserError("the trace could not be written whole.", where=str(trace), fix="Free some disk.")
    finally:
        plain.unlink(missing_ok=True)


def _named(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with record_function(name):
            return work(*arguments, **named)

    return run


def _kernels(events: list[Any]) -> list[Span]:
    """On the GPU; those that ran within the optimizer's range there are its own."""
    there = [event for event in events if event.device_type == DeviceType.CUDA]
    ranges = [_seconds(event) for event in there if event.is_user_annotation and event.name == UPDATE]
    spans = []
    for event in there:
        if not event.is_user_annotation:
            start, end = _seconds(event)
            spans.append(Span(event.name, start, end, any(a <= start < b for a, b in ranges)))
    return spans


def _operators(events: list[Any]) -> list[Span]:
    """On a CPU, of the thread that trains: what each operator took itself, without those it called."""
    ours = next((event.thread for event in events if event.name == _STEP), None)
    spans = []
    for event in events:
        ranges = event.name in (_STEP, UPDATE) or event.name.startswith(_TORCHS_STEP)
        python = getattr(event, "is_python_function", False)  # with stacks there is an event for each Python call
        if event.thread == ours and not ranges and not python and event.self_cpu_time_total > 0:
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
    """What is allocated in here, and by whom; None without a GPU, whose allocator alone keeps a record."""
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_HISTORY)
    try:
        yield lambda: memory_history(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()])
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


# ----------------------------------------------------------------------------------------------------
# How much of the wall time the GPU spends in kernels.


_NO_KERNELS = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Busy:
    """In seconds. The profiler slows the host a little: the share is a lower bound."""

    kernels: float
    wall: float

    @property
    def share(self) -> float:
        return self.kernels / self.wall


def kernel_time(work: Callable[[], object], device: torch.device) -> Busy | None:
    """`work` under the profiler, from its first kernel's launch until the GPU has done it all; None without a GPU."""
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
    except RuntimeError:  # another profiler is at work, or the right to count is missing
        return None
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        # a named range covers the pauses between its kernels too
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(_NO_KERNELS)
    ]
    return Busy(covered(spans) / 1e6, wall) if spans else None
