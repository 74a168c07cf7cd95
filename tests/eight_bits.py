"""For tests of fp8: all that makes its operands, by torch and by Triton, and something to make them of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from redline.kernels import float8
from redline.kernels import float8 as float8_mean
from redline.kernels.float8 import Scale


@pytest.fixture(scope="module", params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """All that makes operands, in either form, under the public names."""
    if request.param == "torch":
        found, mark = vars(float8) | vars(float8_mean), "reference_"
        return SimpleNamespace(**{name.removeprefix(mark): found[name] for name in found if name.startswith(mark)})
    pytest.importorskip("triton", reason="the kernels need triton")
    return in_triton()


def in_triton() -> SimpleNamespace:
    from redline.kernels.triton import (
        float8 as float8_mean_triton,
    )
    from redline.kernels.triton import (
        float8 as float8_triton,
    )
    from redline.kernels.triton import (
        rms_norm as float8_norm_triton,
    )
    from redline.kernels.triton import (
        rotary as float8_rotary_triton,
    )

    modules = (float8_triton, float8_norm_triton, float8_rotary_triton, float8_mean_triton)
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def scale_of(factor: float, device: str, amax: float | None = 0.0) -> Scale:
    values = [torch.tensor(value, device=device) for value in (factor, 1.0 / factor)]
    return Scale(values[0], values[1], None if amax is None else torch.tensor(amax, device=device))


def randoms(seed: int, *shapes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]
