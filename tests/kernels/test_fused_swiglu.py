"""SwiGLU and its gradient in place, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

KERNELS = "activations"
# a half-precision result is one rounding away from float32's; the interpreter rounds bf16 towards zero
SLACK = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11 + 2e-6}
sizes = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def problem(n: int, width: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1009 + width)
    h = 3.0 * torch.randn(n, 2 * width, generator=generator)
    return h.to(device, dtype), torch.randn(n, width, generator=generator).to(device, dtype)


def exact(h: Tensor, grad_s: Tensor) -> tuple[Tensor, Tensor]:
    double = h.double().requires_grad_()
    gate, up = double.chunk(2, -1)
    s = F.silu(gate) * up
    s.backward(grad_s.double())
    assert double.grad is not None
    return s.detach(), double.grad


def check(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype) -> None:
    h, grad_s = problem(n, width, device, dtype)
    before, grad_before = h.clone(), grad_s.clone()
    s = kernels.swiglu(h)
    assert torch.equal(h, before)
    expected, expected_grad = exact(h, grad_s)
    grad = kernels.swiglu_backward_(grad_s, h)
    assert grad is h
    assert torch.equal(grad_s, grad_before)
    assert (s.dtype, grad.dtype, s.shape) == (dtype, dtype, (n, width))
    torch.testing.assert_close(s.double(), expected, rtol=SLACK[dtype], atol=4 * SLACK[torch.float32])
    torch.testing.assert_close(grad.double(), expected_grad, rtol=SLACK[dtype], atol=4 * SLACK[torch.float32])


@sizes
@given(n=st.integers(1, 40), width=st.integers(1, 300))
def test_any_size(kernels: Any, device: str, n: int, width: int) -> None:
    check(kernels, device, n, width, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "width"), [(3, 37), (17, 128)])
def test_half_precision(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype) -> None:
    check(kernels, device, n, width, dtype)


@pytest.mark.parametrize(("n", "width"), [(5, 2688), (3, 2816), (2, 4096), (2, 2689), (0, 8)])
def test_the_widths_of_real_models(kernels: Any, device: str, n: int, width: int) -> None:
    check(kernels, device, n, width, torch.float32)


@pytest.mark.parametrize("gate", [-200.0, -90.0, 90.0, 200.0])
def test_large_gates_neither_overflow_nor_vanish(kernels: Any, device: str, gate: float) -> None:
    h = torch.tensor([[gate, 2.0]], device=device)
    grad_s = torch.ones(1, 1, device=device)
    expected, expected_grad = exact(h, grad_s)
    torch.testing.assert_close(kernels.swiglu(h).double(), expected)
    torch.testing.assert_close(kernels.swiglu_backward_(grad_s, h).double(), expected_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [4, 24])  # in the gate, in the up
def test_nan_and_infinity_stay_where_they_are(
    kernels: Any, device: str, value: float, dtype: torch.dtype, column: int
) -> None:
    h, grad_s = problem(6, 20, device, dtype)
    h[2, column] = value
    s = kernels.swiglu(h)
    expected, expected_grad = exact(h, grad_s)
    grad = kernels.swiglu_backward_(grad_s, h)
    assert torch.equal(s.isfinite(), expected.isfinite())
    assert torch.equal(s.isnan(), expected.isnan())
    assert not s[2, 4].isfinite()
    assert torch.equal(grad.isfinite(), expected_grad.isfinite())


def test_a_gradient_of_nan_shows(kernels: Any, device: str) -> None:
    h, grad_s = problem(3, 10, device)
    grad_s[1, 7] = float("nan")
    grad = kernels.swiglu_backward_(grad_s, h)
    assert grad.isnan().nonzero().tolist() == [[1, 7], [1, 17]]
