"""Before the first step: compile, allocate, and meet an out-of-memory here instead of in hour three."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from redline.errors import UserError
from redline.planning.batch import BatchPlan
from redline.runs.monitor import Monitor
from redline.training.distributed import SINGLE_PROCESS, Ranks
from redline.training.signals import StopRequested
from redline.units import format_seconds


class SmallestBatchTooLargeError(torch.OutOfMemoryError):
    """One sequence at a time does not fit, with activations kept: whoever begins again computes them twice."""

    def __init__(self, plan: BatchPlan) -> None:
        super().__init__("a micro-batch of 1 does not fit")
        self.plan = plan


def warm_up(
    dry_run: Callable[[BatchPlan], None],
    plan: BatchPlan,
    monitor: Monitor,
    ranks: Ranks = SINGLE_PROCESS,
    *,
    compiled: bool,
    recomputed: bool,
    device: str,
) -> BatchPlan:
    """Rehearse the worst-case batch until it runs in all ranks; the plan that did."""
    monitor.status("warming up" + (" (the first time compiles: up to a minute)" if compiled else ""))
    begin = time.perf_counter()
    while True:
        try:
            if not ranks.max(float(_too_large(dry_run, plan)))[0]:
                break
            plan = _halved(plan, monitor, device, recomputed=recomputed)
        except (StopRequested, UserError, SmallestBatchTooLargeError):
            raise
        except Exception as error:
            if not compiled:
                raise
            compiled = False
            _uncompile(error, monitor)
    seconds = time.perf_counter() - begin
    monitor.emit("warmup", seconds=seconds, message=f"warmed up in {format_seconds(seconds)}")
    return plan


def resumed_batch_plan(saved: BatchPlan, planned: BatchPlan) -> BatchPlan:
    """What a run found to fit, unless there are other ranks now, or still less is planned."""
    alike = saved.world == planned.world and saved.global_batch == planned.global_batch
    return saved if alike and saved.micro < planned.micro else planned


def _too_large(dry_run: Callable[[BatchPlan], None], plan: BatchPlan) -> bool:
    try:
        dry_run(plan)
    except torch.OutOfMemoryError:
        return True
    return False


def _halved(plan: BatchPlan, monitor: Monitor, device: str, *, recomputed: bool) -> BatchPlan:
    smaller = plan.halved()
    torch.cuda.empty_cache()
    if smaller is None and not recomputed:
        raise SmallestBatchTooLargeError(plan)
    if smaller is None:
        what = f"a micro-batch of {plan.micro} does not fit into {device}, even with grad_checkpointing=full."
        fix = "Use a shorter data.seq_len, a smaller model, parallel.mode=fsdp on several GPUs, or a larger card."
        raise UserError(what, where="train.micro_batch", fix=fix)
    change = f"{plan.micro} → {smaller.micro}, the global batch stays {smaller.global_batch}"
    monitor.emit("recovery", message=f"out of memory: micro-batch {change}")
    return smaller


def _uncompile(error: Exception, monitor: Monitor) -> None:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    monitor.warn(f"torch.compile failed ({first_line[:120]}); going on uncompiled, which is slower")
    torch.compiler.set_stance("force_eager")
