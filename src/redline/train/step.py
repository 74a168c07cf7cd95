"""One update: micro-batches → gradients → one gated step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redline.objectives.base import Batch, Objective
from redline.train.optim import Ema, Optimizer
from redline.train.parallel import Parallel
from redline.train.precision import LossScale


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


def seed_of(seed: int, step: int, micro: int) -> int:
    """Randomness is a function of these, never of what ran before."""
    return (seed * 1_000_003 + step) * 4099 + micro & 0x7FFF_FFFF_FFFF_FFFF


class Step:
    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        *,
        parallel: Parallel,
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
                torch.manual_seed(seed_of(self.seed, step, batch.first + index))
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

    def rehearse(self, batch: StepBatch) -> None:
        """Everything a step does except to change anything: compiles, allocates, meets an OOM early."""
        with self.parallel.apart(), self.optimizer.rehearsing():
            loss, _ = self.backward(0, batch)
            grad_norm, bad = self._measure(loss)
            self._update(0, 0.0, grad_norm, torch.ones_like(bad))
        self.clear()

    def clear(self) -> None:
        self.parallel.clear()
