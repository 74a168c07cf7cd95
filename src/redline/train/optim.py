"""Optimizers whose every write is gated by a device flag: a bad step changes nothing, and nobody waits for the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from redline.objectives.base import ParamGroup
from redline.recipe.schema import Train

Gate = tuple[Tensor, Tensor]  # what gradients are divided by; 1.0 when the step must not happen

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

    Matrices that are stored merged are orthogonalised one by one; matrices of one shape go through as one batch.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.names = {name: p for group in groups for name, p in group.parameters.items()}
        self.splits = {name: s for group in groups for name, s in group.splits.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.names.items()}
        self.beta, self.weight_decay = train.muon_momentum, train.weight_decay

    @torch.no_grad()
    def step(self, lr: float, gate: Gate) -> None:
        scale, bad = gate
        stop = bad > 0
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, parameter in self.names.items():
            assert parameter.grad is not None
            gradient = parameter.grad / scale
            momentum = self.momentum[name]
            momentum.copy_(torch.where(stop, momentum, momentum.lerp(gradient, 1.0 - self.beta)))
            update = gradient.lerp(momentum, self.beta)  # Nesterov
            pieces = zip(update.split(self.splits[name]), parameter.split(self.splits[name]), strict=True)
            for piece, weight in pieces:
                by_shape[piece.shape].append((piece, weight))
        for shape, pairs in by_shape.items():
            updates = orthogonalise(torch.stack([piece for piece, _ in pairs]))
            factor = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for update, (_, weight) in zip(updates, pairs, strict=True):
                moved = weight * (1.0 - lr * self.weight_decay) - factor * update
                weight.copy_(torch.where(stop, weight, moved))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.momentum": value for name, value in self.momentum.items()}


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
    """AdamW for all, or Muon for the hidden matrices and AdamW for the rest."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        hidden = [g for g in groups if g.role == "matrix" and train.optimizer == "muon"]
        rest = [g for g in groups if g not in hidden]
        self.muon = Muon(hidden, train) if hidden else None
        self.adam = Adam(rest, train) if rest else None
        self.lr, self.muon_lr = train.lr, train.muon_lr

    def step(self, factor: float, gate: Gate) -> None:
        if self.muon:
            self.muon.step(self.muon_lr * factor, gate)
        if self.adam:
            self.adam.step(self.lr * factor, gate)

    def tensors(self) -> dict[str, Tensor]:
        parts = [part.tensors() for part in (self.muon, self.adam) if part]
        return {name: tensor for part in parts for name, tensor in part.items()}


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
