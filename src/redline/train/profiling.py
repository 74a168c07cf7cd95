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
from torch.profiler import ProfilerActivity, profile, record_function

from redline.errors import UserError
from redline.monitor.breakdown import Span, covered
from redline.monitor.kernel_classes import UPDATE
from redline.monitor.memory_history import MemoryHistory, memory_history
from redline.train.feed import Feed
from redline.train.trainer import Trainer

SETTLE_STEPS = 3
_HISTORY = 1_000_000  # events of the allocator
_STEPS = "redline.steps"


@dataclass(frozen=True)
class Profiled:
    spans: list[Span]
    steps: int
    seconds: float
    busy: float  # seconds of these in which a kernel, or an operator, ran
    data_wait: float


def profiled(trainer: Trainer, steps: int, trace: Path, told: Callable[[int], None] = lambda _: None) -> Profiled:
    """Of a trainer that is built and warmed up; `told` hears how many steps are done, those that settle among them."""
    setattr(trainer.optimizer, "step", _named(UPDATE, trainer.optimizer.step))  # noqa: B010, a method of one instance
    gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with Feed(trainer.objective, trainer.batch, trainer.device, trainer.recipe.data.workers, 0) as feed:

        def run(first: int, count: int) -> float:
            waited = 0.0
            for step in range(first, first + count):
                batch = feed.next(step)
                trainer.step(step, batch, 1e-3)
                waited += batch.seconds
                told(step + 1)
            if gpu:
                torch.cuda.synchronize()
            return waited

        run(0, SETTLE_STEPS)
        with profile(activities=activities) as profiler:
            begin = time.perf_counter()
            with record_function(_STEPS):
                waited = run(SETTLE_STEPS, steps)
            seconds = time.perf_counter() - begin
    _export(profiler, trace)
    events = list(profiler.events() or [])
    spans = _kernels(events) if gpu else _operators(events)
    busy = covered((s.start, s.end) for s in spans) if gpu else sum(s.end - s.start for s in spans)
    return Profiled(spans, steps, seconds, busy, waited)


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
    ours = next((event.thread for event in events if event.name == _STEPS), None)
    spans = []
    for event in events:
        if event.thread == ours and event.name not in (_STEPS, UPDATE) and event.self_cpu_time_total > 0:
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
