"""One update: micro-batches → gradients → one gated step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from redline.data.loader import Prefetcher, pin
from redline.jobs.objective import Batch, Objective
from redline.planning.batch import BatchPlan
from redline.training.distributed import SINGLE_PROCESS, Ranks
from redline.training.optim import Ema, Optimizer
from redline.training.parallel import ParallelStrategy

# ----------------------------------------------------------------------------------------------------
# Loss scaling for fp16; in bf16 and fp32 the scale is one and stays.


_GROWTH, _BACKOFF, _INTERVAL, _FIRST = 2.0, 0.5, 2000, 65536.0


class LossScale:
    """Dynamic scale, held and updated on the device."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.scale = torch.full((), _FIRST if self.dynamic else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: Tensor) -> None:
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self._good_steps, bad, _GROWTH, _BACKOFF, _INTERVAL)

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale.good_steps": self._good_steps} if self.dynamic else {}


@dataclass(frozen=True)
class StepBatch:
    """A rank's micro-batches of a step, and what the step's loss terms are divided by."""

    micros: list[Batch]
    weights: Mapping[str, float | Tensor]
    seconds: float = 0.0  # the trainer waited this long for it
    first: int = 0  # of the micro-batches, among those of all ranks

    def part_of(self, times: float) -> StepBatch:
        """The same as a part of a step so many times as large."""
        return replace(self, weights={name: times * weight for name, weight in self.weights.items()})


@dataclass(frozen=True)
class StepResult:
    """Device tensors: reading them waits for the GPU, so only the log does."""

    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    bad: Tensor  # 1.0 when loss or gradient was not finite and nothing was changed
    figures: dict[str, Tensor] = field(default_factory=dict)  # further ones of the job, for the log


Backward = Callable[[int, StepBatch], tuple[Tensor, dict[str, Tensor]]]


def micro_batch_seed(seed: int, step: int, micro: int) -> int:
    """Randomness is a function of these, never of what ran before."""
    return (seed * 1_000_003 + step) * 4099 + micro & 0x7FFF_FFFF_FFFF_FFFF


class Step:
    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        *,
        parallel: ParallelStrategy,
        scale: LossScale,
        ema: Ema | None,
        clip: float | None,
        seed: int,
    ) -> None:
        self.objective, self.optimizer, self.scale, self.ema = objective, optimizer, scale, ema
        self.parallel, self.clip, self.seed = parallel, clip, seed
        self.parameters = list(parallel.parameters().values())
        self.graph: Backward | None = None  # in place of `backward`, where that is faster

    def __call__(self, step: int, batch: StepBatch, lr_factor: float, momentum: float | None = None) -> StepResult:
        loss, terms = (self.graph or self.backward)(step, batch)
        grad_norm, bad = self._measure(loss)
        self._update(step, lr_factor, grad_norm, bad, momentum)
        self.scale.update(bad)
        return StepResult(loss, terms, grad_norm, bad, self.objective.figures(loss, batch.weights))

    def backward(self, step: int, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of Σ c·sum/W over all micro-batches of all ranks."""
        totals: dict[str, Tensor] = {}
        recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.clear()
        for index, micro in enumerate(batch.micros):
            self.parallel.before(last=index == len(batch.micros) - 1)
            if not recording:  # where nothing random is
                torch.manual_seed(micro_batch_seed(self.seed, step, batch.first + index))
            found = self.objective.loss(micro)
            parts = {name: term.coefficient * term.sum / batch.weights[term.weight] for name, term in found.items()}
            loss = torch.stack(list(parts.values())).sum()
            (loss * self.scale.scale).backward()
            for name, part in parts.items():
                totals[name] = totals[name] + part.detach() if name in totals else part.detach()
        self.parallel.after()
        summed = self.parallel.total(torch.stack(list(totals.values())))
        return summed.sum(), dict(zip(totals, summed.unbind(), strict=True))

    @torch.no_grad()
    def _measure(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = self.parallel.norm(gradients) / self.scale.scale
        finite = torch.isfinite(grad_norm) & torch.isfinite(loss)
        return grad_norm, (~finite).float()

    @torch.no_grad()
    def _update(
        self, step: int, lr_factor: float, grad_norm: Tensor, bad: Tensor, momentum: float | None = None
    ) -> None:
        # clipping and unscaling ride along in the optimizer's own pass over the gradients
        divisor = self.scale.scale
        if self.clip is not None:
            divisor = divisor * torch.clamp_min(grad_norm / self.clip, 1.0)
        divisor = torch.where(bad > 0, 1.0, divisor)
        self.optimizer.step(lr_factor, (divisor, bad), step, momentum)
        if self.ema is not None:
            self.ema.update(bad, step)

    def dry_run(self, batch: StepBatch) -> None:
        """Everything a step does except to change anything: compiles, allocates, meets an OOM early."""
        with self.parallel.apart(), self.optimizer.dry_run():
            loss, _ = self.backward(0, batch)
            grad_norm, bad = self._measure(loss)
            self._update(0, 0.0, grad_norm, torch.ones_like(bad))
        self.clear()

    def clear(self) -> None:
        self.parallel.clear()


# ----------------------------------------------------------------------------------------------------
# From places in the global batch to a step's micro-batches on the device.


class BatchLoader:
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
        ranks: Ranks = SINGLE_PROCESS,
        skipped: Sequence[int] = (),
    ) -> None:
        self.objective, self.plan, self.device, self.workers = objective, plan, device, workers
        self.depth, self.ranks, self.skipped = depth, ranks, sorted(skipped)
        self._loader: Prefetcher[StepBatch] = Prefetcher(self._make, first, workers=workers, depth=depth)

    def __enter__(self) -> BatchLoader:
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
        weights = dict(zip(batch.weights, self.ranks.sum(*map(float, batch.weights.values())), strict=True))
        return StepBatch(micros, weights, waited, self.ranks.rank * self.plan.accumulation)

    def _make(self, step: int) -> StepBatch:
        micro, share = self.plan.micro, self.plan.micro * self.plan.accumulation
        first = data_step(step, self.skipped) * self.plan.global_batch + self.ranks.rank * share
        starts = range(first, first + share, micro)
        batch = step_batch(self.objective, [self.objective.batch(np.arange(s, s + micro)) for s in starts])
        if self.device.type != "cuda":
            return batch
        return replace(batch, micros=[pin(m) for m in batch.micros])


def data_step(step: int, skipped: Sequence[int]) -> int:
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
