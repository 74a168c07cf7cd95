"""8-bit AdamW with the kernels of bitsandbytes (arXiv 2110.02861): 2 bytes of moments per parameter instead of 8."""

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

Gate = tuple[Tensor, Tensor]  # (the divisor of the gradients, 1.0 if the step must change nothing), on the device

# The step count passed to the kernel: so large that its bias correction is 1. `Adam8bit` applies its own.
_MANY_STEPS = 1 << 30
_MAX_BATCH = 1 << 26  # values that are updated by one launch
_PAGED_FROM = 100_000  # values; as in bitsandbytes, smaller states stay in ordinary memory


def is_large(parameter: nn.Parameter) -> bool:
    """Return whether the moments are worth quantising. Small tensors save little and need the precision most."""
    return parameter.numel() >= LOW_BIT_FROM


class Adam8bit:
    """The blockwise 8-bit update of bitsandbytes, gated by a device flag.

    The kernel takes its step count from the host, which does not know yet whether the step is bad. So the kernel runs
    on copies: of the quantised moments, and of a zero weight, which then holds the bare update −lr·m/(√v + eps). The
    device flag then decides whether the copies are used. The bias correction √(1−β₂ᵗ)/(1−β₁ᵗ) comes from a step count
    on the device that is gated too. (Compared with textbook AdamW, eps is larger by 1/√(1−β₂ᵗ), which is soon 1.)

    Small parameters are concatenated and updated together: with one launch for each of the hundreds of matrices of an
    adapter, launching would take longer than the work.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self._bnb = _bitsandbytes()
        self.betas, self.eps = train.betas, train.eps
        by_options: dict[tuple[float, float, torch.dtype], dict[str, nn.Parameter]] = {}
        for group in groups:
            rate, decay = train.role_lr(group.role), 0.0 if group.role == "scalar" else train.weight_decay
            for name, parameter in group.parameters.items():
                by_options.setdefault((rate, decay, parameter.dtype), {})[name] = parameter
        device = next(parameter.device for group in groups for parameter in group.parameters.values())
        paged = train.optimizer.startswith("paged") and device.type == "cuda"
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.maps = [self._bnb.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self.batches = [
            _ParameterBatch(part, rate, decay, self._bnb, paged)
            for (rate, decay, _), named in by_options.items()
            for part in _split(named)
        ]

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, momentum: float | None = None) -> None:
        divisor, bad = gate
        stop = bad > 0
        torch.where(stop, self.count, self.count + 1, out=self.count)
        beta1, beta2 = self.betas[0] if momentum is None else momentum, self.betas[1]
        correction = ((1 - beta2**self.count).sqrt() / (1 - beta1**self.count)).float()
        for batch in self.batches:
            lr, values = batch.rate * factor, batch.concatenate(batch.parameters)
            update, codes, scales = torch.zeros_like(values), batch.codes.clone(), batch.scales.clone()
            self._update(batch.concatenate(batch.gradients()) / divisor, update, codes, scales, lr, (beta1, beta2))
            updated = torch.addcmul(values * (1.0 - lr * batch.decay), update, correction)
            batch.write(torch.where(stop, values, updated, out=values))
            torch.where(stop, batch.codes, codes, out=batch.codes)
            torch.where(stop, batch.scales, scales, out=batch.scales)

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
            _MANY_STEPS,
            lr,
            *self.maps,
            *scales,
        )

    def tensors(self) -> dict[str, Tensor]:
        moments = {key: tensor for batch in self.batches for key, tensor in batch.tensors().items()}
        return {"adam_8bit.step": self.count, **moments}


def _split(named: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Yield batches of at most _MAX_BATCH values, in order. `step` copies a batch, so its size costs memory."""
    part: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        if part and sum(p.numel() for p in part.values()) + parameter.numel() > _MAX_BATCH:
            yield part
            part = {}
        part[name] = parameter
    if part:
        yield part


class _ParameterBatch:
    """Parameters that are updated together, and their quantised moments.

    The parameters are concatenated, each padded to blocks of 256 values. Both moments are stored as one byte per value
    (`codes`) and one scale per block (`scales`).
    """

    def __init__(self, named: dict[str, nn.Parameter], rate: float, decay: float, bnb: Any, paged: bool) -> None:
        self.names: list[str] = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.rate, self.decay = rate, decay
        device = self.parameters[0].device
        blocks = [-(-parameter.numel() // LOW_BIT_BLOCK) for parameter in self.parameters]
        self.first_block = [0, *accumulate(blocks)]  # of each parameter, and the number of blocks
        self.padding = [
            torch.zeros(count * LOW_BIT_BLOCK - parameter.numel(), dtype=parameter.dtype, device=device)
            for count, parameter in zip(blocks, self.parameters, strict=True)
        ]
        shape = (2, self.first_block[-1] * LOW_BIT_BLOCK)
        self.pages: Tensor | None = None
        if paged and shape[1] >= _PAGED_FROM:
            self.pages = bnb.get_paged(*shape, dtype=torch.uint8, device=device)
            self.codes = _as_cuda_tensor(self.pages, device).zero_()
        else:
            self.codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(2, self.first_block[-1], device=device)

    def gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters]
        assert all(gradient is not None for gradient in gradients)
        return [gradient for gradient in gradients if gradient is not None]

    def concatenate(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one flat padded tensor: a copy, unless there is a single tensor that needs no padding."""
        parts = (part for tensor, pad in zip(tensors, self.padding, strict=True) for part in (tensor.flatten(), pad))
        filled = [part for part in parts if len(part)]
        return filled[0] if len(filled) == 1 else torch.cat(filled)

    def write(self, values: Tensor) -> None:
        """Copy concatenated values back into the parameters."""
        torch._foreach_copy_(self.parameters, [self._view(index, values) for index in range(len(self.parameters))])

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of each parameter by its name, as views."""
        views = {}
        for index, name in enumerate(self.names):
            blocks = slice(self.first_block[index], self.first_block[index + 1])
            for row, key in enumerate(("exp_avg", "exp_avg_sq")):
                views[f"{name}.{key}_8bit"] = self._view(index, self.codes[row])
                views[f"{name}.{key}_scale"] = self.scales[row, blocks]
        return views

    def _view(self, index: int, flat: Tensor) -> Tensor:
        """Return the part of a concatenated tensor that belongs to one parameter, in its shape."""
        parameter, begin = self.parameters[index], self.first_block[index] * LOW_BIT_BLOCK
        return flat[begin : begin + parameter.numel()].view(parameter.shape)


class _ManagedMemory:
    """CUDA managed memory as an array. The driver moves its pages to the GPU and, under memory pressure, back."""

    def __init__(self, pages: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pages.shape),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
            "version": 3,
        }


def _as_cuda_tensor(pages: Tensor, device: torch.device) -> Tensor:
    """Return managed memory, which bitsandbytes hands out as a CPU tensor, as a CUDA tensor without a copy."""
    return torch.as_tensor(_ManagedMemory(pages), device=device)


def _bitsandbytes() -> ModuleType:
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # its warnings about missing inference kernels do not concern training
    try:
        from bitsandbytes import functional
    except ImportError:
        fix = f"Install it with {install_hint('low-bit')}, or use train.optimizer=adamw."
        raise UserError("8-bit moments need the package bitsandbytes.", where="train.optimizer", fix=fix) from None
    finally:
        log.setLevel(level)
    return functional
