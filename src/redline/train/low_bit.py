"""8-bit AdamW through bitsandbytes: two bytes of moments per parameter instead of eight (arXiv 2110.02861)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import UserError, install_hint
from redline.objectives.base import ParamGroup
from redline.plan.memory import LOW_BIT_BLOCK, LOW_BIT_FROM
from redline.recipe.rates import role_rate
from redline.recipe.schema import Train

Gate = tuple[Tensor, Tensor]  # what gradients are divided by; 1.0 when the step must not happen

_STEADY = 1 << 30  # so many steps that the kernel corrects no bias: that is done here, where the count is on the device
_PAGED_FROM = 100_000  # values; smaller states stay in ordinary memory, as bitsandbytes has it


def is_large(parameter: nn.Parameter) -> bool:
    """Small tensors gain nothing from 8 bits and need the precision most."""
    return parameter.numel() >= LOW_BIT_FROM


class Adam8bit:
    """bitsandbytes' blockwise update, gated by a device flag.

    The kernel counts steps on the host, where nobody knows yet whether a step happens. So it runs on copies: of the
    quantised moments, and of a zero weight, which then holds the bare update −lr·m/(√v + eps). What becomes of both is
    decided by the flag, and the bias correction √(1−β₂ᵗ)/(1−β₁ᵗ) comes from a step count that is gated too. (Against
    textbook AdamW, eps is larger by 1/√(1−β₂ᵗ): a factor that is 1 after the first hundred steps.)
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self._bnb = _bitsandbytes()
        self.betas, self.eps = train.betas, train.eps
        self.names: dict[str, nn.Parameter] = {}
        self.decay: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        for group in groups:
            self.names |= group.parameters
            self.decay |= dict.fromkeys(group.parameters, 0.0 if group.role == "scalar" else train.weight_decay)
            self.peak |= dict.fromkeys(group.parameters, role_rate(train, group.role))
        device = next(iter(self.names.values())).device
        paged = train.optimizer.startswith("paged") and device.type == "cuda"
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.maps = [self._bnb.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self.state = {name: _State(p, self._bnb, paged) for name, p in self.names.items()}

    @torch.no_grad()
    def step(self, factor: float, gate: Gate) -> None:
        divisor, bad = gate
        stop = bad > 0
        torch.where(stop, self.count, self.count + 1, out=self.count)
        beta1, beta2 = self.betas
        correction = ((1 - beta2**self.count).sqrt() / (1 - beta1**self.count)).float()
        for name, parameter in self.names.items():
            assert parameter.grad is not None
            state, update, lr = self.state[name], torch.zeros_like(parameter), self.peak[name] * factor
            codes, scales = state.codes.clone(), state.scales.clone()
            self._update(parameter.grad / divisor, update, codes, scales, lr)
            moved = torch.addcmul(parameter * (1.0 - lr * self.decay[name]), update, correction)
            torch.where(stop, parameter, moved, out=parameter)
            torch.where(stop, state.codes, codes, out=state.codes)
            torch.where(stop, state.scales, scales, out=state.scales)

    def _update(self, gradient: Tensor, update: Tensor, codes: Tensor, scales: Tensor, lr: float) -> None:
        self._bnb.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            update,
            *codes,
            *self.betas,
            0.0,  # beta3 and alpha belong to AdEMAMix
            0.0,
            self.eps,
            _STEADY,
            lr,
            *self.maps,
            *scales,
        )

    def tensors(self) -> dict[str, Tensor]:
        parts = {f"{name}.{key}": part for name, state in self.state.items() for key, part in state.tensors().items()}
        return {"adam_8bit.step": self.count, **parts}


class _State:
    """Both moments of a parameter in blocks of 256: codes of one byte, and the scale of each block."""

    def __init__(self, parameter: nn.Parameter, bnb: Any, paged: bool) -> None:
        shape, device = (2, *parameter.shape), parameter.device
        self.pages: Tensor | None = None
        if paged and parameter.numel() >= _PAGED_FROM:
            self.pages = bnb.get_paged(*shape, dtype=torch.uint8, device=device)
            self.codes = _on_device(self.pages, device).zero_()
        else:
            self.codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(2, -(-parameter.numel() // LOW_BIT_BLOCK), device=device)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "exp_avg_8bit": self.codes[0],
            "exp_avg_sq_8bit": self.codes[1],
            "exp_avg_scale": self.scales[0],
            "exp_avg_sq_scale": self.scales[1],
        }


class _Pages:
    """Managed memory as CUDA tensors see it: the driver moves its pages to the GPU and, under pressure, away."""

    def __init__(self, pages: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pages.shape),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
            "version": 3,
        }


def _on_device(pages: Tensor, device: torch.device) -> Tensor:
    """bitsandbytes hands managed memory out as a CPU tensor; the same memory as one of the GPU."""
    return torch.as_tensor(_Pages(pages), device=device)


def _bitsandbytes() -> ModuleType:
    log = logging.getLogger("bitsandbytes")
    before = log.level
    log.setLevel(logging.ERROR)  # what it lacks for inference is no news here
    try:
        from bitsandbytes import functional
    except ImportError:
        fix = f"Install it: {install_hint('low-bit')}; or use train.optimizer=adamw."
        raise UserError("8-bit moments need the package bitsandbytes.", where="train.optimizer", fix=fix) from None
    finally:
        log.setLevel(before)
    return functional
