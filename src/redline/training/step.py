"""One training step: load the batch, compute the gradients of its micro-batches, update the weights.

The update is gated by a flag on the device: if loss or gradient is not finite, weights, moments and averages keep every
bit, and no host sync is needed to decide it.
"""

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
# Loss scaling for fp16. In bf16 and fp32 the scale stays 1.


# As torch.amp.GradScaler: grow after so many good steps, shrink after a bad one.
_GROWTH, _BACKOFF, _GROWTH_INTERVAL, _FIRST_SCALE = 2.0, 0.5, 2000, 65536.0


class LossScale:
    """Dynamic loss scale, held and updated on the device."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.scale = torch.full((), _FIRST_SCALE if self.dynamic else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: Tensor) -> None:
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self._good_steps, bad, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale.good_steps": self._good_steps} if self.dynamic else {}


@dataclass(frozen=True)
class StepBatch:
    """A rank's micro-batches of a step, and the weights that the step's loss terms are divided by."""

    micros: list[Batch]
    weights: Mapping[str, float | Tensor]  # summed over all micro-batches of all ranks
    wait_seconds: float = 0.0  # how long the trainer waited for it
    first_micro: int = 0  # number of its first micro-batch among those of all ranks

    def scale_weights(self, factor: float) -> StepBatch:
        """Return the batch with its weights multiplied, as if it were a part of a step `factor` times as large."""
        return replace(self, weights={name: factor * weight for name, weight in self.weights.items()})


@dataclass(frozen=True)
class StepResult:
    """Results as device tensors. Reading one waits for the GPU, so only the step log does that."""

    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    bad: Tensor  # 1.0 if loss or gradient was not finite, so that nothing was changed
    figures: dict[str, Tensor] = field(default_factory=dict)  # further metrics of the job, for the log


Backward = Callable[[int, StepBatch], tuple[Tensor, dict[str, Tensor]]]


def micro_batch_seed(seed: int, step: int, micro: int) -> int:
    """Return the seed of a micro-batch. It depends on nothing that ran before: a resumed run draws the same noise."""
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
        self.graph: Backward | None = None  # replaces `backward` if a CUDA graph was recorded

    def __call__(self, step: int, batch: StepBatch, lr_factor: float, momentum: float | None = None) -> StepResult:
        loss, terms = (self.graph or self.backward)(step, batch)
        grad_norm, bad = self._measure(loss)
        self._update(step, lr_factor, grad_norm, bad, momentum)
        self.scale.update(bad)
        return StepResult(loss, terms, grad_norm, bad, self.objective.figures(loss, batch.weights))

    def backward(self, step: int, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradients of Σ coefficient·sum/weight over all micro-batches of all ranks.

        Return that loss and its terms, summed over the ranks.
        """
        totals: dict[str, Tensor] = {}
        recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.clear()
        for index, micro in enumerate(batch.micros):
            self.parallel.begin_micro_batch(last=index == len(batch.micros) - 1)
            if not recording:  # only steps without randomness are recorded, and a graph cannot contain seeding
                torch.manual_seed(micro_batch_seed(self.seed, step, batch.first_micro + index))
            terms = self.objective.loss(micro)
            parts = {name: term.coefficient * term.sum / batch.weights[term.weight] for name, term in terms.items()}
            loss = torch.stack(list(parts.values())).sum()
            (loss * self.scale.scale).backward()
            for name, part in parts.items():
                totals[name] = totals[name] + part.detach() if name in totals else part.detach()
        self.parallel.end_backward()
        summed = self.parallel.all_reduce(torch.stack(list(totals.values())))
        return summed.sum(), dict(zip(totals, summed.unbind(), strict=True))

    @torch.no_grad()
    def _measure(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = self.parallel.grad_norm(gradients) / self.scale.scale
        finite = torch.isfinite(grad_norm) & torch.isfinite(loss)
        return grad_norm, (~finite).float()

    @torch.no_grad()
    def _update(
        self, step: int, lr_factor: float, grad_norm: Tensor, bad: Tensor, momentum: float | None = None
    ) -> None:
        # The optimizer divides the gradients in its own pass, so that clipping and unscaling cost no extra one.
        divisor = self.scale.scale
        if self.clip is not None:
            divisor = divisor * torch.clamp_min(grad_norm / self.clip, 1.0)
        divisor = torch.where(bad > 0, 1.0, divisor)
        self.optimizer.step(lr_factor, (divisor, bad), step, momentum)
        if self.ema is not None:
            self.ema.update(bad, step)

    def dry_run(self, batch: StepBatch) -> None:
        """Do all that a step does without changing anything: to compile, to allocate, to run out of memory early."""
        with self.parallel.local_only(), self.optimizer.dry_run():
            loss, _ = self.backward(0, batch)
            grad_norm, bad = self._measure(loss)
            self._update(0, 0.0, grad_norm, torch.ones_like(bad))
        self.clear()

    def clear(self) -> None:
        self.parallel.clear()


# ----------------------------------------------------------------------------------------------------
# Loading: from positions in the global batch to a step's micro-batches on the device.


class BatchLoader:
    """Prefetches the batches of this rank in background threads.

    The batch of a step depends only on the step's number and on the rank's positions in the global batch, so it is the
    same whatever the number of workers, and after a resume.
    """

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
        """Drop the prefetched batches and prefetch again from `step`, because the job's batches have changed."""
        self._loader.close()
        self._loader = Prefetcher(self._make, step, workers=self.workers, depth=self.depth)

    def next(self, step: int) -> StepBatch:
        begin = time.perf_counter()
        batch = self._loader.next(step)
        wait_seconds = time.perf_counter() - begin
        micros = [to_device(micro, self.device) for micro in batch.micros]
        weights = dict(zip(batch.weights, self.ranks.sum(*map(float, batch.weights.values())), strict=True))
        return StepBatch(micros, weights, wait_seconds, self.ranks.rank * self.plan.accumulation)

    def _make(self, step: int) -> StepBatch:
        micro, share = self.plan.micro, self.plan.micro * self.plan.accumulation
        first = data_step(step, self.skipped) * self.plan.global_batch + self.ranks.rank * share
        starts = range(first, first + share, micro)
        batch = step_batch(self.objective, [self.objective.batch(np.arange(s, s + micro)) for s in starts])
        if self.device.type != "cuda":
            return batch
        return replace(batch, micros=[pin(m) for m in batch.micros])


def data_step(step: int, skipped: Sequence[int]) -> int:
    """Return the step whose data this step reads if the data of the `skipped` steps (in order) are left out."""
    for skip in skipped:
        step += skip <= step
    return step


def step_batch(objective: Objective, micros: list[Batch]) -> StepBatch:
    """Return the micro-batches with the sums of their weights."""
    weights: dict[str, float] = {}
    for micro in micros:
        for name, weight in objective.weights(micro).items():
            weights[name] = weights.get(name, 0.0) + weight
    return StepBatch(micros, weights)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # A scalar is a size that the host needs to launch kernels. Reading it back from the device would be a host sync.
    return {name: t if t.dim() == 0 else t.to(device, non_blocking=True) for name, t in batch.items()}
