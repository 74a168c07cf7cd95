"""Weighted skip connections and their gradients, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

KERNELS = "skip"
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu")
SLACK = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
sizes = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype, weight: float) -> None:
    generator = torch.Generator().manual_seed(n * 1009 + width)
    x, delta, state, grad = (torch.randn(n, width, generator=generator).to(device, dtype) for _ in range(4))
    factor = torch.tensor(weight, device=device)
    actual, (grad_state, grad_weight) = (
        kernels.add_skip(x, delta, state, factor),
        kernels.add_skip_backward(grad, state, factor),
    )
    assert (actual.dtype, grad_state.dtype, grad_weight.dtype) == (dtype, dtype, torch.float32)
    assert (actual.shape, grad_weight.shape) == (x.shape, ())
    near = {"rtol": SLACK[dtype], "atol": 4 * SLACK[dtype]}
    torch.testing.assert_close(actual.double(), x.double() + delta.double() + weight * state.double(), **near)
    torch.testing.assert_close(grad_state.double(), weight * grad.double(), **near)
    products: Tensor = grad.double() * state.double()
    assert abs(float(grad_weight) - float(products.sum())) <= 1e-5 * float(products.abs().sum()) + 1e-12


@sizes
@given(n=st.integers(1, 60), width=st.integers(1, 300), weight=st.floats(-3, 3, width=32))
def test_any_size(kernels: Any, device: str, n: int, width: int, weight: float) -> None:
    check(kernels, device, n, width, torch.float32, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "width"), [(3, 37), (17, 128), (5, 4096), (9, 8192)])
def test_half_precision(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype) -> None:
    check(kernels, device, n, width, dtype, 0.7)


def test_a_weight_that_is_part_of_a_vector(kernels: Any, device: str) -> None:
    x = torch.randn(4, 8, device=device)
    weights = torch.tensor([5.0, 0.25, 7.0], device=device).unbind()
    torch.testing.assert_close(kernels.add_skip(x, x, x, weights[1]), 2.25 * x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_stay(kernels: Any, device: str, bad: float) -> None:
    x, state = torch.ones(2, 8, device=device), torch.ones(2, 8, device=device)
    state[1, 3] = bad
    weight = torch.tensor(0.5, device=device)
    assert not kernels.add_skip(x, x, state, weight)[1, 3].isfinite()
    assert not kernels.add_skip_backward(x, state, weight)[1].isfinite()
