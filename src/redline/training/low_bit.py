"""8-bit AdamW through bitsandbytes: two bytes of moments per parameter instead of eight (arXiv 2110.02861)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import UserError, install_hint
from redline.jobs.objective import ParamGroup
from redline.planning.memory import LOW_BIT_BLOCK, LOW_BIT_FROM
from redline.recipe.schema import Train

Gate = tuple[Tensor, Tensor]  # what gradients are divided by; 1.0 when the step must not happen

_STEADY = 1 << 30  # so many steps that the kernel corrects no bias: that is done here, where the count is on the device
_AT_ONCE = 1 << 26  # values
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

    Small parameters are updated together, one behind the other: a launch for each of an adapter's hundreds of matrices
    takes longer than the matrix.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self._bnb = _bitsandbytes()
        self.betas, self.eps = train.betas, train.eps
        alike: dict[tuple[float, float, torch.dtype], dict[str, nn.Parameter]] = {}
        for group in groups:
            rate, decay = train.role_lr(group.role), 0.0 if group.role == "scalar" else train.weight_decay
            for name, parameter in group.parameters.items():
                alike.setdefault((rate, decay, parameter.dtype), {})[name] = parameter
        device = next(parameter.device for group in groups for parameter in group.parameters.values())
        paged = train.optimizer.startswith("paged") and device.type == "cuda"
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.maps = [self._bnb.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self.together = [
            _Together(some, rate, decay, self._bnb, paged)
            for (rate, decay, _), named in alike.items()
            for some in _split(named)
        ]

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, momentum: float | None = None) -> None:
        divisor, bad = gate
        stop = bad > 0
        torch.where(stop, self.count, self.count + 1, out=self.count)
        beta1, beta2 = self.betas[0] if momentum is None else momentum, self.betas[1]
        correction = ((1 - beta2**self.count).sqrt() / (1 - beta1**self.count)).float()
        for some in self.together:
            lr, values = some.rate * factor, some.flat(some.parameters)
            update, codes, scales = torch.zeros_like(values), some.codes.clone(), some.scales.clone()
            self._update(some.flat(some.gradients()) / divisor, update, codes, scales, lr, (beta1, beta2))
            moved = torch.addcmul(values * (1.0 - lr * some.decay), update, correction)
            some.write(torch.where(stop, values, moved, out=values))
            torch.where(stop, some.codes, codes, out=some.codes)
            torch.where(stop, some.scales, scales, out=some.scales)

    def _update(
        self, gradient: Tensor, update: Tensor, codes: Tensor, scales: Tensor, lr: float, betas: tuple[float, float]
    ) -> None:
        self._bnb.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            update,
            *codes,
            *betas,
            0.0,  # beta3 and alpha belong to AdEMAMix
            0.0,
            self.eps,
            _STEADY,
            lr,
            *self.maps,
            *scales,
        )

    def tensors(self) -> dict[str, Tensor]:
        parts = {key: part for some in self.together for key, part in some.tensors().items()}
        return {"adam_8bit.step": self.count, **parts}


def _split(named: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """In their order, no more at once than copies of are little beside the model."""
    some: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        if some and sum(one.numel() for one in some.values()) + parameter.numel() > _AT_ONCE:
            yield some
            some = {}
        some[name] = parameter
    if some:
        yield some


class _Together:
    """Parameters one behind the other, each filled up to whole blocks of 256, and both of their moments: codes of one
    byte, and the scale of each block."""

    def __init__(self, named: dict[str, nn.Parameter], rate: float, decay: float, bnb: Any, paged: bool) -> None:
        self.names: list[str] = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.rate, self.decay = rate, decay
        device = self.parameters[0].device
        blocks = [-(-parameter.numel() // LOW_BIT_BLOCK) for parameter in self.parameters]
        self.first = [0, *accumulate(blocks)]  # blocks, where each begins
        self.fill = [
            torch.zeros(count * LOW_BIT_BLOCK - one.numel(), dtype=one.dtype, device=device)
            for count, one in zip(blocks, self.parameters, strict=True)
        ]
        shape = (2, self.first[-1] * LOW_BIT_BLOCK)
        self.pages: Tensor | None = None
        if paged and shape[1] >= _PAGED_FROM:
            self.pages = bnb.get_paged(*shape, dtype=torch.uint8, device=device)
            self.codes = _on_device(self.pages, device).zero_()
        else:
            self.codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(2, self.first[-1], device=device)

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.parameters]
        assert all(gradient is not None for gradient in found)
        return [gradient for gradient in found if gradient is not None]

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy, unless there is one alone in whole blocks."""
        parts = (part for tensor, fill in zip(tensors, self.fill, strict=True) for part in (tensor.flatten(), fill))
        filled = [part for part in parts if len(part)]
        return filled[0] if len(filled) == 1 else torch.cat(filled)

    def write(self, values: Tensor) -> None:
        torch._foreach_copy_(self.parameters, [self._of(place, values) for place in range(len(self.parameters))])

    def tensors(self) -> dict[str, Tensor]:
        """As each parameter's own."""
        found = {}
        for place, name in enumerate(self.names):
            blocks = slice(self.first[place], self.first[place + 1])
            for row, key in enumerate(("exp_avg", "exp_avg_sq")):
                found[f"{name}.{key}_8bit"] = self._of(place, self.codes[row])
                found[f"{name}.{key}_scale"] = self.scales[row, blocks]
        return found

    def _of(self, place: int, flat: Tensor) -> Tensor:
        parameter, begin = self.parameters[place], self.first[place] * LOW_BIT_BLOCK
        return flat[begin : begin + parameter.numel()].view(parameter.shape)


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
