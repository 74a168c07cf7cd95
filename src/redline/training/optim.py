"""The optimizers, and the moving average of the weights.

Every write is gated by a device flag: a bad step (loss or gradient not finite) changes nothing, and the host does not
have to wait for the GPU to find out.
"""

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
    """torch's fused AdamW kernel, called directly.

    `torch.optim.AdamW` would import torch's compiler, which takes seconds, and creates its state only in the first
    step. Here the state exists, with names to save it by, from the start.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.betas, self.eps = train.betas, train.eps
        # parameters that one kernel call updates together, by (learning rate, weight decay, dtype)
        self.groups: dict[tuple[float, float, torch.dtype], list[_Moments]] = defaultdict(list)
        for group in groups:
            rate, decay = train.role_lr(group.role), 0.0 if group.role == "scalar" else train.weight_decay
            for name, parameter in group.parameters.items():
                self.groups[rate, decay, parameter.dtype].append(_Moments(name, parameter))

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, momentum: float | None = None) -> None:
        divisor, bad = gate
        for (rate, decay, _), moments in self.groups.items():
            used = [m for m in moments if m.parameter.grad is not None]
            if not used:
                continue
            steps = [m.step for m in used]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [m.parameter for m in used],
                [m.parameter.grad for m in used],  # type: ignore[misc]
                [m.first for m in used],
                [m.second for m in used],
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
        """Restore the step counts on exit.

        `step` counts before the kernel runs and takes that back after a bad step. A signal in between would raise, and
        leave the count too high.
        """
        counts = [(m.step, m.step.clone()) for moments in self.groups.values() for m in moments]
        try:
            yield
        finally:
            for step, before in counts:
                step.copy_(before)

    def tensors(self) -> dict[str, Tensor]:
        every = (m for moments in self.groups.values() for m in moments)
        return {f"{m.name}.{key}": value for m in every for key, value in m.tensors().items()}


class _Moments:
    """AdamW's state of one parameter."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self.first, self.second = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def tensors(self) -> dict[str, Tensor]:
        return {"step": self.step, "exp_avg": self.first, "exp_avg_sq": self.second}


class Optimizer:
    """AdamW for all parameters; or Muon for the hidden matrices (or 8-bit AdamW for the large tensors) and AdamW for
    the rest."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train, make_muon: MakeMuon = Muon) -> None:
        hidden = [g for g in groups if g.role == "matrix" and train.optimizer in MUON]
        rest = [g for g in groups if g not in hidden]
        large: list[ParamGroup] = []
        if train.optimizer in LOW_BIT:
            large, rest = _select(rest, is_large), _select(rest, lambda p: not is_large(p))
        self.muon = make_muon(hidden, train) if hidden else None
        self.low_bit = Adam8bit(large, train) if large else None
        self.adam = Adam(rest, train) if rest else None

    def step(self, factor: float, gate: Gate, step: int = 0, momentum: float | None = None) -> None:
        """Take one step.

        `factor` multiplies every peak learning rate. `momentum`, if given, replaces AdamW's beta1 and Muon's momentum.
        `step` counts from the start of the run, over all resumes.
        """
        if self.muon:
            self.muon.step(factor, gate, step, momentum)
        if self.low_bit:
            self.low_bit.step(factor, gate, momentum)
        if self.adam:
            self.adam.step(factor, gate, momentum)

    def dry_run(self) -> AbstractContextManager[None]:
        """Return a context for a step that must change nothing, however it ends."""
        return self.adam.dry_run() if self.adam else nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        parts = [part.tensors() for part in (self.muon, self.low_bit, self.adam) if part]
        return {name: tensor for part in parts for name, tensor in part.items()}


def _select(groups: Sequence[ParamGroup], wanted: Callable[[nn.Parameter], bool]) -> list[ParamGroup]:
    """Return the groups with the wanted parameters only, without groups that have none."""
    selected = [replace(g, parameters={n: p for n, p in g.parameters.items() if wanted(p)}) for g in groups]
    return [group for group in selected if group.parameters]


class Ema:
    """An exponential moving average of the weights, which skips bad steps too.

    Early in a run the decay is smaller: with the full decay the average would still consist mostly of the initial
    weights.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, in_place: bool = False) -> None:
        # With in_place, `swap` copies values: under FSDP torch holds views of the same memory, which an exchange of
        # tensors would not reach.
        self.decay, self.in_place = decay, in_place
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
        """Exchange the average and the weights. A second call undoes the first."""
        for name, parameter in self.parameters.items():
            if self.in_place:
                weights = parameter.clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(weights)
            else:
                parameter.data, self.average[name] = self.average[name], parameter.data
