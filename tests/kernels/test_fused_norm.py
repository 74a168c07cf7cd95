"""Residual add and RMSNorm, and its gradient, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.models.decoder import RMSNorm

KERNELS = "rms_norm"
EPS = 1e-5
# a half-precision result is one rounding away from float32's; the interpreter rounds bf16 towards zero
SLACK = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11 + 2e-6}
sizes = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def randoms(seed: int, *shapes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def exact(total: Tensor, weight: Tensor, g: Tensor, g_sum: Tensor | None) -> tuple[Tensor, ...]:
    """Normed, 1/rms, gradients of sum and weight in float64."""
    total = total.double().requires_grad_()
    double = weight.double().requires_grad_()
    rstd = torch.rsqrt(total.square().mean(-1) + EPS)
    normed = total * rstd[:, None] * double
    normed.backward(g.double())
    assert total.grad is not None
    assert double.grad is not None
    past = 0.0 if g_sum is None else g_sum.double()
    return normed.detach(), rstd.detach(), total.grad + past, double.grad


def check(kernels: Any, device: str, n: int, d: int, add: bool, dtype: torch.dtype) -> None:
    x, delta, g, g_sum = randoms(n * 997 + d, *[(n, d)] * 4, device=device, dtype=dtype)
    weight = 1.0 + 0.3 * randoms(7, (d,), device=device)[0]
    delta_or, g_sum_or = (delta, g_sum) if add else (None, None)
    before = [tensor.clone() for tensor in (x, delta, g, g_sum)]
    total, normed, rstd = kernels.add_rms_norm(x, delta_or, weight, EPS)
    grad, grad_weight = kernels.rms_norm_backward(g, total, rstd, weight, g_sum_or)
    assert (total is x) is not add
    assert (total.dtype, normed.dtype, grad.dtype) == (dtype,) * 3
    assert (rstd.dtype, grad_weight.dtype) == (torch.float32,) * 2
    assert all(torch.equal(a, b) for a, b in zip(before, (x, delta, g, g_sum), strict=True))
    slack = SLACK[dtype]
    torch.testing.assert_close(total, x + delta if add else x, rtol=slack, atol=0.0)
    wanted_normed, wanted_rstd, wanted_grad, wanted_weight = exact(total, weight, g, g_sum_or)
    torch.testing.assert_close(normed.double(), wanted_normed, rtol=slack, atol=1e-6)
    torch.testing.assert_close(rstd.double(), wanted_rstd, rtol=2e-6, atol=0.0)
    lever = 4 * (1 + wanted_rstd)[:, None]  # terms as large as 1/rms cancel in the gradient
    assert ((grad.double() - wanted_grad).abs() <= slack * wanted_grad.abs() + SLACK[torch.float32] * lever).all()
    torch.testing.assert_close(grad_weight.double(), wanted_weight, rtol=1e-5, atol=1e-5 * max(1.0, n**0.5))


@sizes
@given(n=st.integers(1, 37), d=st.integers(1, 300), add=st.booleans())
def test_any_size(kernels: Any, device: str, n: int, d: int, add: bool) -> None:
    check(kernels, device, n, d, add, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "d"), [(5, 33), (17, 128)])
def test_half_precision(kernels: Any, device: str, n: int, d: int, dtype: torch.dtype) -> None:
    check(kernels, device, n, d, True, dtype)


@pytest.mark.parametrize(("n", "d"), [(9, 1024), (41, 512), (3, 2500), (2, 8192), (0, 16)])
def test_the_widths_of_real_models(kernels: Any, device: str, n: int, d: int) -> None:
    check(kernels, device, n, d, True, torch.float32)


def test_it_is_the_norm_of_the_layers(kernels: Any, device: str) -> None:
    norm = RMSNorm(48, EPS).to(device)
    x, norm.weight.data = randoms(3, (6, 48), (48,), device=device)
    torch.testing.assert_close(kernels.add_rms_norm(x, None, norm.weight.detach(), EPS)[1], norm(x).detach())


def test_the_norm_sees_the_rounded_sum(kernels: Any, device: str) -> None:
    x, delta = randoms(4, (8, 64), (8, 64), device=device, dtype=torch.float16)
    weight = torch.ones(64, device=device)
    total, normed, rstd = kernels.add_rms_norm(x, 0.01 * delta, weight, EPS)
    again = kernels.add_rms_norm(total, None, weight, EPS)
    assert torch.equal(total, x + 0.01 * delta)
    assert torch.equal(normed, again[1])
    assert torch.equal(rstd, again[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_in_their_row(kernels: Any, device: str, value: float, dtype: torch.dtype) -> None:
    x, delta, g = randoms(5, *[(7, 40)] * 3, device=device, dtype=dtype)
    weight = torch.ones(40, device=device)
    clean = kernels.add_rms_norm(x, delta, weight, EPS)[1]
    delta[3, 5] = value
    total, normed, rstd = kernels.add_rms_norm(x, delta, weight, EPS)
    grad, grad_weight = kernels.rms_norm_backward(g, total, rstd, weight, None)
    others = [0, 1, 2, 4, 5, 6]
    assert not total[3, 5].isfinite()
    assert normed[3, 5].isnan()
    assert torch.equal(normed[others], clean[others])
    assert grad[3, 5].isnan()
    assert grad[others].isfinite().all()
    assert grad_weight[5].isnan()


@pytest.mark.parametrize("where", ["normed", "sum"])
def test_a_gradient_of_nan_shows(kernels: Any, device: str, where: str) -> None:
    x, g, g_sum = randoms(6, *[(4, 24)] * 3, device=device)
    weight = torch.ones(24, device=device)
    _, _, rstd = kernels.add_rms_norm(x, None, weight, EPS)
    (g if where == "normed" else g_sum)[2, 3] = float("nan")
    grad, grad_weight = kernels.rms_norm_backward(g, x, rstd, weight, g_sum)
    assert grad[2, 3].isnan()
    assert grad[[0, 1, 3]].isfinite().all()
    assert bool(grad_weight[3].isnan()) is (where == "normed")


def test_the_weights_gradient_is_the_same_every_time(kernels: Any, device: str) -> None:
    x, g = randoms(8, (300, 20), (300, 20), device=device)
    weight = torch.ones(20, device=device)
    _, _, rstd = kernels.add_rms_norm(x, None, weight, EPS)
    first, second = (kernels.rms_norm_backward(g, x, rstd, weight, None)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_strided_gradients_are_read_right(kernels: Any, device: str) -> None:
    x, double = randoms(9, (6, 20), (6, 40), device=device)
    weight = torch.ones(20, device=device)
    _, _, rstd = kernels.add_rms_norm(x, None, weight, EPS)
    got = kernels.rms_norm_backward(double[:, ::2], x, rstd, weight, double[:, 20:])
    expected = kernels.rms_norm_backward(double[:, ::2].clone(), x, rstd, weight, double[:, 20:].clone())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
