"""Optimizers whose every write is gated by a device flag: a bad step changes nothing, and nobody waits for the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from redline.objectives.base import ParamGroup
from redline.plan.memory import LOW_BIT
from redline.recipe.schema import Train
from redline.train.low_bit import Adam8bit, Gate, is_large

_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # Keller Jordan's coefficients


class Adam:
    """torch's fused AdamW with explicit state, so that it can be saved by name before the first step."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.names: dict[str, nn.Parameter] = {}
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for group in groups:
            self.names |= group.parameters
            (plain if group.role == "scalar" else decayed).extend(group.parameters.values())
        sets = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.torch = torch.optim.AdamW(
            [s for s in sets if s["params"]], lr=1.0, betas=train.betas, eps=train.eps, fused=True
        )
        for parameter in self.names.values():
            self.torch.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float, gate: Gate) -> None:
        for group in self.torch.param_groups:
            group["lr"] = lr
        # the fused kernel reads both on the device (this is how torch's GradScaler speaks to it)
        self.torch.grad_scale, self.torch.found_inf = gate  # type: ignore[attr-defined]
        self.torch.step()

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": value for name, p in self.names.items() for key, value in self.torch.state[p].items()}


class Muon:
    """Momentum, orthogonalised by Newton–Schulz (kellerjordan.github.io/posts/muon).

    Matrices that are stored merged are orthogonalised one by one. All of one shape are kept and worked on as one
    batch: a few large kernels instead of many small ones.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.beta, self.weight_decay = train.muon_momentum, train.weight_decay
        self.members: dict[torch.Size, list[tuple[str, nn.Parameter, int, int]]] = defaultdict(list)
        for group in groups:
            for name, parameter in group.parameters.items():
                start = 0
                for rows in group.splits[name]:
                    shape = torch.Size((rows, parameter.shape[1]))
                    self.members[shape].append((f"{name}.momentum.{start}", parameter, start, rows))
                    start += rows
        self.momentum = {
            shape: torch.zeros(len(members), *shape, device=members[0][1].device)
            for shape, members in self.members.items()
        }

    @torch.no_grad()
    def step(self, lr: float, gate: Gate) -> None:
        divisor, bad = gate
        stop = bad > 0
        for shape, members in self.members.items():
            momentum = self.momentum[shape]
            gradient = torch.stack([_rows(p.grad, start, rows) for _, p, start, rows in members]) / divisor
            momentum.copy_(torch.where(stop, momentum, momentum.lerp(gradient, 1.0 - self.beta)))
            update = orthogonalise(gradient.lerp(momentum, self.beta))  # Nesterov
            weights = [_rows(p, start, rows) for _, p, start, rows in members]
            before = torch.stack(weights)
            factor = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            moved = torch.where(stop, before, before * (1.0 - lr * self.weight_decay) - factor * update)
            torch._foreach_copy_(weights, list(moved.unbind()))

    def tensors(self) -> dict[str, Tensor]:
        return {
            member[0]: self.momentum[shape][i]
            for shape, members in self.members.items()
            for i, member in enumerate(members)
        }


def _rows(tensor: Tensor | None, start: int, rows: int) -> Tensor:
    assert tensor is not None
    return tensor.narrow(0, start, rows)


def orthogonalise(matrices: Tensor) -> Tensor:
    """U·Vᵀ of each matrix, roughly: singular values end between 0.7 and 1.2."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Optimizer:
    """AdamW for all; or Muon for the hidden matrices, or 8-bit AdamW for all that is large, and AdamW for the rest."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        hidden = [g for g in groups if g.role == "matrix" and train.optimizer == "muon"]
        rest = [g for g in groups if g not in hidden]
        large: list[ParamGroup] = []
        if train.optimizer in LOW_BIT:
            large, rest = _part(rest, is_large), _part(rest, lambda p: not is_large(p))
        self.muon = Muon(hidden, train) if hidden else None
        self.low_bit = Adam8bit(large, train) if large else None
        self.adam = Adam(rest, train) if rest else None
        self.lr, self.muon_lr = train.lr, train.muon_lr

    def step(self, factor: float, gate: Gate) -> None:
        if self.muon:
            self.muon.step(self.muon_lr * factor, gate)
        if self.low_bit:
            self.low_bit.step(self.lr * factor, gate)
        if self.adam:
            self.adam.step(self.lr * factor, gate)

    def tensors(self) -> dict[str, Tensor]:
        parts = [part.tensors() for part in (self.muon, self.low_bit, self.adam) if part]
        return {name: tensor for part in parts for name, tensor in part.items()}


def _part(groups: Sequence[ParamGroup], wanted: Callable[[nn.Parameter], bool]) -> list[ParamGroup]:
    """The groups with only such parameters; those without any fall away."""
    parts = [replace(g, parameters={n: p for n, p in g.parameters.items() if wanted(p)}) for g in groups]
    return [part for part in parts if part.parameters]


class Ema:
    """A moving average of the weights that skips bad steps too."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.parameters = parameters
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, bad: Tensor) -> None:
        stop = bad > 0
        for name, parameter in self.parameters.items():
            average = self.average[name]
            average.copy_(torch.where(stop, average, average.lerp(parameter, 1.0 - self.decay)))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange average and weights; twice is nothing."""
        for name, parameter in self.parameters.items():
            parameter.data, self.average[name] = self.average[name], parameter.data
