"""Optimizers whose every write is gated by a device flag: a bad step changes nothing, and nobody waits for the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from redline.jobs.objective import ParamGroup
from redline.planning.memory import LOW_BIT, MUON
from redline.recipe.schema import Train
from redline.training.low_bit import Adam8bit, Gate, is_large
from redline.training.muon import Muon

MakeMuon = Callable[[Sequence[ParamGroup], Train], Muon]


class Adam:
    """torch's fused AdamW, called as its optimizer calls it: that one imports a compiler, for seconds.

    Its state has names before the first step, so that it can be saved by them.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.betas, self.eps = train.betas, train.eps
        self.alike: dict[tuple[float, float, torch.dtype], list[_Moments]] = defaultdict(list)  # by rate and decay
        for group in groups:
            rate, decay = train.role_lr(group.role), 0.0 if group.role == "scalar" else train.weight_decay
            for name, parameter in group.parameters.items():
                self.alike[rate, decay, parameter.dtype].append(_Moments(name, parameter))

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, momentum: float | None = None) -> None:
        divisor, bad = gate
        for (rate, decay, _), moments in self.alike.items():
            there = [one for one in moments if one.parameter.grad is not None]
            if not there:
                continue
            steps = [one.step for one in there]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [one.parameter for one in there],
                [one.parameter.grad for one in there],  # type: ignore[misc]
                [one.first for one in there],
                [one.second for one in there],
                [],
                steps,
                lr=rate * factor,
                beta1=self.betas[0] if momentum is None else momentum,
                beta2=self.betas[1],
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,  # both are read on the device
                found_inf=bad,
            )
            torch._foreach_sub_(steps, [bad] * len(steps))

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """A step is counted before it is taken, and that taken back after a bad one: a signal may come in between."""
        counts = [(one.step, one.step.clone()) for moments in self.alike.values() for one in moments]
        try:
            yield
        finally:
            for step, before in counts:
                step.copy_(before)

    def tensors(self) -> dict[str, Tensor]:
        every = (one for moments in self.alike.values() for one in moments)
        return {f"{one.name}.{key}": value for one in every for key, value in one.tensors().items()}


class _Moments:
    """Of one parameter."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self.first, self.second = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def tensors(self) -> dict[str, Tensor]:
        return {"step": self.step, "exp_avg": self.first, "exp_avg_sq": self.second}


class Optimizer:
    """AdamW for all; or Muon for the hidden matrices, or 8-bit AdamW for all that is large, and AdamW for the rest."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train, muon: MakeMuon = Muon) -> None:
        hidden = [g for g in groups if g.role == "matrix" and train.optimizer in MUON]
        rest = [g for g in groups if g not in hidden]
        large: list[ParamGroup] = []
        if train.optimizer in LOW_BIT:
            large, rest = _part(rest, is_large), _part(rest, lambda p: not is_large(p))
        self.muon = muon(hidden, train) if hidden else None
        self.low_bit = Adam8bit(large, train) if large else None
        self.adam = Adam(rest, train) if rest else None

    def step(self, factor: float, gate: Gate, step: int = 0, momentum: float | None = None) -> None:
        """Take one step. `factor` multiplies every peak rate, `momentum` replaces beta1 and Muon's momentum if given,
        and `step` counts from the run's beginning, resumes included."""
        if self.muon:
            self.muon.step(factor, gate, step, momentum)
        if self.low_bit:
            self.low_bit.step(factor, gate, momentum)
        if self.adam:
            self.adam.step(factor, gate, momentum)

    def dry_run(self) -> AbstractContextManager[None]:
        """Around a step that must leave nothing behind, however it ends."""
        return self.adam.dry_run() if self.adam else nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        parts = [part.tensors() for part in (self.muon, self.low_bit, self.adam) if part]
        return {name: tensor for part in parts for name, tensor in part.items()}


def _part(groups: Sequence[ParamGroup], wanted: Callable[[nn.Parameter], bool]) -> list[ParamGroup]:
    """The groups with only such parameters; those without any fall away."""
    parts = [replace(g, parameters={n: p for n, p in g.parameters.items() if wanted(p)}) for g in groups]
    return [part for part in parts if part.parameters]


class Ema:
    """A moving average of the weights that skips bad steps too. It looks back over a share of a young run, and not over
    more steps than there were: else it would keep the weights that the run began with."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, in_place: bool = False) -> None:
        self.decay, self.in_place = decay, in_place  # in place: others see the parameters' memory too
        self.parameters = parameters
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, bad: Tensor, step: int) -> None:
        stop, decay = bad > 0, min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self.parameters.items():
            average = self.average[name]
            average.copy_(torch.where(stop, average, average.lerp(parameter, 1.0 - decay)))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange average and weights; twice is nothing."""
        for name, parameter in self.parameters.items():
            if self.in_place:
                kept = parameter.clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(kept)
            else:
                parameter.data, self.average[name] = self.average[name], parameter.data
