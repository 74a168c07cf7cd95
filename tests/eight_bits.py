"""Shared parts of the kernel tests: both implementations of operations, and random operands in fp8."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from redline.kernels import activations, float8, rms_norm, rotary
from redline.kernels.dispatch import Op
from redline.kernels.float8 import Scale


def implementations(form: str, *modules: ModuleType) -> SimpleNamespace:
    """Return the operations of kernel modules by name, in one form: "reference" or "triton"."""
    ops = {name: value for module in modules for name, value in vars(module).items() if isinstance(value, Op)}
    return SimpleNamespace(**{name: getattr(op, form) for name, op in ops.items()})


@pytest.fixture(scope="module", params=["reference", "triton"])
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Every operation that makes an fp8 operand, in one of its implementations."""
    if request.param == "triton":
        return in_triton()
    return implementations("reference", activations, float8, rms_norm, rotary)


def in_triton() -> SimpleNamespace:
    pytest.importorskip("triton", reason="the kernels need triton")
    return implementations("triton", activations, float8, rms_norm, rotary)


def scale_of(factor: float, device: str, amax: float | None = 0.0) -> Scale:
    values = [torch.tensor(value, device=device) for value in (factor, 1.0 / factor)]
    return Scale(values[0], values[1], None if amax is None else torch.tensor(amax, device=device))


def randoms(seed: int, *shapes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]
