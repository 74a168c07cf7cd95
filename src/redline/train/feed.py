"""From places in the global batch to a step's micro-batches on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import numpy as np
import torch

from redline.data.loader import Prefetcher, pin
from redline.objectives.base import Batch, Objective
from redline.plan.batch import BatchPlan
from redline.train.ranks import ALONE, Ranks
from redline.train.step import StepBatch


class Feed:
    """Makes batches ahead of the steps. What a step gets depends on its number alone; a rank has its places of it."""

    def __init__(
        self,
        objective: Objective,
        plan: BatchPlan,
        device: torch.device,
        workers: int,
        first: int,
        *,
        depth: int = 4,
        ranks: Ranks = ALONE,
        skipped: Sequence[int] = (),
    ) -> None:
        self.objective, self.plan, self.device, self.workers = objective, plan, device, workers
        self.depth, self.ranks, self.skipped = depth, ranks, sorted(skipped)
        self._loader: Prefetcher[StepBatch] = Prefetcher(self._make, first, workers=workers, depth=depth)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.close()

    def restart(self, step: int) -> None:
        """What was made ahead is made anew."""
        self._loader.close()
        self._loader = Prefetcher(self._make, step, workers=self.workers, depth=self.depth)

    def next(self, step: int) -> StepBatch:
        begin = time.perf_counter()
        batch = self._loader.next(step)
        waited = time.perf_counter() - begin
        micros = [to_device(micro, self.device) for micro in batch.micros]
        weights = dict(zip(batch.weights, self.ranks.sums(*map(float, batch.weights.values())), strict=True))
        return StepBatch(micros, weights, waited, self.ranks.rank * self.plan.accumulation)

    def _make(self, step: int) -> StepBatch:
        micro, share = self.plan.micro, self.plan.micro * self.plan.accumulation
        first = unskipped(step, self.skipped) * self.plan.global_batch + self.ranks.rank * share
        starts = range(first, first + share, micro)
        batch = step_batch(self.objective, [self.objective.batch(np.arange(s, s + micro)) for s in starts])
        if self.device.type != "cuda":
            return batch
        return replace(batch, micros=[pin(m) for m in batch.micros])


def unskipped(step: int, skipped: Sequence[int]) -> int:
    """The step whose data this one reads when those of the `skipped` ones, in order, are left out."""
    for gone in skipped:
        step += gone <= step
    return step


def step_batch(objective: Objective, micros: list[Batch]) -> StepBatch:
    """Micro-batches with the weights of all of them together."""
    weights: dict[str, float] = {}
    for micro in micros:
        for name, weight in objective.weights(micro).items():
            weights[name] = weights.get(name, 0.0) + weight
    return StepBatch(micros, weights)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # one number alone is a size: the host needs it, to launch kernels by
    return {name: one if one.dim() == 0 else one.to(device, non_blocking=True) for name, one in batch.items()}
