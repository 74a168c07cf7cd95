"""Before the first step: compile, allocate, and meet an out-of-memory here instead of in hour three."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from redline.errors import UserError
from redline.monitor.monitor import Monitor
from redline.plan.batch import BatchPlan
from redline.train.ranks import ALONE, Ranks
from redline.train.signals import StopRequested
from redline.units import format_seconds


def warm_up(
    rehearse: Callable[[BatchPlan], None],
    plan: BatchPlan,
    monitor: Monitor,
    ranks: Ranks = ALONE,
    *,
    compiled: bool,
    device: str,
) -> BatchPlan:
    """Rehearse the worst-case batch until it runs in all ranks; the plan that did."""
    monitor.say("warming up" + (" (the first time compiles: up to a minute)" if compiled else ""))
    begin = time.perf_counter()
    while True:
        try:
            if not ranks.highest(float(_too_large(rehearse, plan)))[0]:
                break
            plan = _halved(plan, monitor, device)
        except (StopRequested, UserError):
            raise
        except Exception as error:
            if not compiled:
                raise
            compiled = False
            _uncompile(error, monitor)
    seconds = time.perf_counter() - begin
    monitor.emit("warmup", seconds=seconds, message=f"warmed up in {format_seconds(seconds)}")
    return plan


def as_decided(saved: BatchPlan, planned: BatchPlan) -> BatchPlan:
    """What a run found to fit, unless there are other ranks now, or still less is planned."""
    alike = saved.world == planned.world and saved.global_batch == planned.global_batch
    return saved if alike and saved.micro < planned.micro else planned


def _too_large(rehearse: Callable[[BatchPlan], None], plan: BatchPlan) -> bool:
    try:
        rehearse(plan)
    except torch.OutOfMemoryError:
        return True
    return False


def _halved(plan: BatchPlan, monitor: Monitor, device: str) -> BatchPlan:
    smaller = plan.halved()
    torch.cuda.empty_cache()
    if smaller is None:
        raise UserError(
            f"a micro-batch of {plan.micro} does not fit into {device}.",
            where="train.micro_batch",
            fix="Use train.grad_checkpointing=full, a shorter data.seq_len or a smaller model.",
        )
    change = f"{plan.micro} → {smaller.micro}, the global batch stays {smaller.global_batch}"
    monitor.emit("recovery", message=f"out of memory: micro-batch {change}")
    return smaller


def _uncompile(error: Exception, monitor: Monitor) -> None:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    monitor.warn(f"torch.compile failed ({first_line[:120]}); going on uncompiled, which is slower")
    torch.compiler.set_stance("force_eager")
