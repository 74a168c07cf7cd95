"""Squared ReLU and its gradient, in place and in fp8, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels.float8 import LARGEST, Float8, Scale, quantise

KERNELS = "activations"
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu")
# a half-precision result is one rounding away from float32's
SLACK = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
sizes = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def problem(n: int, width: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1009 + width)
    h, grad_s = (torch.randn(n, width, generator=generator) for _ in range(2))
    return (3.0 * h).to(device, dtype), grad_s.to(device, dtype)


def exact(h: Tensor, grad_s: Tensor) -> tuple[Tensor, Tensor]:
    double = h.double().requires_grad_()
    s = double.relu().square()
    s.backward(grad_s.double())
    assert double.grad is not None
    return s.detach(), double.grad


def check(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype) -> None:
    h, grad_s = problem(n, width, device, dtype)
    before, grad_before = h.clone(), grad_s.clone()
    s = kernels.relu2(h)
    assert torch.equal(h, before)
    expected, expected_grad = exact(h, grad_s)
    grad = kernels.relu2_backward_(grad_s, h)
    assert grad is h
    assert torch.equal(grad_s, grad_before)
    assert (s.dtype, grad.dtype, s.shape) == (dtype, dtype, (n, width))
    tiny = float(torch.finfo(dtype).smallest_normal)
    torch.testing.assert_close(s.double(), expected, rtol=SLACK[dtype], atol=tiny)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=SLACK[dtype], atol=tiny)


@sizes
@given(n=st.integers(1, 60), width=st.integers(1, 300))
def test_any_size(kernels: Any, device: str, n: int, width: int) -> None:
    check(kernels, device, n, width, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "width"), [(3, 37), (17, 128), (5, 4096), (0, 8)])
def test_half_precision(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype) -> None:
    check(kernels, device, n, width, dtype)


def test_operands_may_have_any_strides(kernels: Any, device: str) -> None:
    h, grad_s = problem(9, 33, device)
    assert torch.equal(kernels.relu2(h.T.contiguous().T), kernels.relu2(h))
    across = kernels.relu2_backward_(grad_s.T.contiguous().T, h.clone())
    assert torch.equal(across, kernels.relu2_backward_(grad_s, h.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_stay_where_they_are(kernels: Any, device: str, dtype: torch.dtype) -> None:
    h, grad_s = problem(6, 20, device, dtype)
    h[2, 4], h[3, 5], h[4, 6] = math.nan, math.inf, -math.inf
    s = kernels.relu2(h)
    assert s[2, 4].isnan()
    assert s[3, 5] == math.inf
    assert s[4, 6] == 0.0
    assert int(s.isfinite().sum()) == s.numel() - 2
    grad = kernels.relu2_backward_(grad_s, h)
    assert grad[2, 4].isnan()
    assert float(grad[3, 5]) == math.copysign(math.inf, float(grad_s[3, 5]))
    assert grad[4, 6] == 0.0
    assert int(grad.isfinite().sum()) == grad.numel() - 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_of_nan_shows_even_where_the_activation_is_zero(kernels: Any, device: str, value: float) -> None:
    h, grad_s = torch.tensor([[2.0, -3.0, 1.0]], device=device), torch.tensor([[value, value, 1.0]], device=device)
    made = kernels.relu2_backward8(grad_s, h, scale_of(1.0, device)).row.float()
    grad = kernels.relu2_backward_(grad_s, h)
    assert grad.isfinite().tolist() == [[False, False, True]]
    assert made.isnan().tolist() == [[True, True, False]]


def scale_of(factor: float, device: str, amax: float | None = 0.0) -> Scale:
    values = [torch.tensor(value, device=device) for value in (factor, 1.0 / factor)]
    return Scale(values[0], values[1], None if amax is None else torch.tensor(amax, device=device))


def check8(got: Float8, scale: Scale, expected: Tensor) -> None:
    """`got` is `expected`, rounded; but for the rare value that float32 puts across a border between two codes."""
    assert got.row is not None
    assert (got.row.shape, got.row.dtype) == (expected.shape, torch.float8_e4m3fn)
    assert got.row.is_contiguous()
    assert got.column.is_contiguous()
    assert got.unscale is scale.unscale
    assert torch.equal(got.column.view(torch.uint8), got.row.view(torch.uint8).T)
    rounded = (expected * scale.factor.double()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    assert torch.equal(got.row.isnan(), rounded.isnan())
    off = (got.row.double() - rounded.double()).abs().nan_to_num()
    unit = torch.exp2(rounded.double().abs().clamp_min(2**-6).log2().floor() - 3).nan_to_num()
    assert bool((off <= unit).all())
    assert int((off > 0).sum()) <= max(2, expected.numel() * 0.001)
    if scale.amax is not None:
        finite = expected.abs().nan_to_num(0.0, posinf=0.0)
        assert float(scale.amax) == pytest.approx(float(finite.max()) if finite.numel() else 0.0, rel=1e-6)


def check_eight(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype = torch.float32) -> None:
    h, grad_s = problem(n, width, device, dtype)
    before = h.clone(), grad_s.clone()
    scale, grad_scale = scale_of(3.0, device), scale_of(30.0, device)
    s, grad = kernels.relu2_8(h, scale), kernels.relu2_backward8(grad_s, h, grad_scale)
    assert torch.equal(h, before[0])
    assert torch.equal(grad_s, before[1])
    expected, expected_grad = exact(h, grad_s)
    check8(s, scale, expected)
    check8(grad, grad_scale, expected_grad)


@sizes
@given(n=st.integers(1, 150), width=st.integers(1, 150))
def test_fp8_any_size(kernels: Any, device: str, n: int, width: int) -> None:
    check_eight(kernels, device, n, width)


@pytest.mark.parametrize(("n", "width"), [(5, 1024), (132, 64), (131, 65), (0, 8)])
def test_fp8_of_half_precision(kernels: Any, device: str, n: int, width: int) -> None:
    check_eight(kernels, device, n, width, torch.bfloat16)


def test_fp8_of_operands_with_any_strides(kernels: Any, device: str) -> None:
    h, grad_s = problem(12, 33, device)
    across = [x.T.contiguous().T for x in (grad_s, h)]
    for got, plain in (
        (kernels.relu2_8(across[1], scale_of(2.0, device)), kernels.relu2_8(h, scale_of(2.0, device))),
        (
            kernels.relu2_backward8(*across, scale_of(2.0, device)),
            kernels.relu2_backward8(grad_s, h, scale_of(2.0, device)),
        ),
    ):
        assert torch.equal(got.row.view(torch.uint8), plain.row.view(torch.uint8))


def test_fp8_codes_are_those_of_the_rounded_square(kernels: Any, device: str) -> None:
    h, grad_s = problem(40, 70, device)
    for got, plain in (
        (kernels.relu2_8(h, scale_of(4.0, device, None)), kernels.relu2(h)),
        (kernels.relu2_backward8(grad_s, h, scale_of(4.0, device, None)), kernels.relu2_backward_(grad_s, h.clone())),
    ):
        expected = quantise.reference(plain, scale_of(4.0, device, None)).row
        assert expected is not None
        assert torch.equal(got.row.view(torch.uint8), expected.view(torch.uint8))


def test_large_values_saturate_and_amax_only_rises(kernels: Any, device: str) -> None:
    h, grad_s = torch.tensor([[30.0, -30.0, 1.0]], device=device), torch.tensor([[20.0, 9.0, -900.0]], device=device)
    scale = scale_of(1.0, device, 1000.0)
    assert kernels.relu2_8(h, scale).row.float().tolist() == [[LARGEST, 0.0, 1.0]]
    assert float(scale.amax) == 1000.0  # type: ignore[arg-type]
    assert kernels.relu2_backward8(grad_s, h, scale).row.float().tolist() == [[LARGEST, 0.0, -LARGEST]]
    assert float(scale.amax) == 1800.0  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])  # the square of the last passes float32
def test_in_fp8_nan_and_infinity_become_nan_and_do_not_count_for_amax(kernels: Any, device: str, value: float) -> None:
    h, grad_s = problem(37, 21, device)
    h[5, 3] = h[36, 20] = value
    places = [] if value == -math.inf else [[5, 3], [36, 20]]
    scale = scale_of(1.0, device)
    assert kernels.relu2_8(h, scale).row.float().isnan().nonzero().tolist() == places
    assert 0.0 < float(scale.amax) < 1000.0  # type: ignore[arg-type]
    if value != 1e30:
        grad_scale = scale_of(1.0, device)
        got = kernels.relu2_backward8(grad_s, h, grad_scale)
        assert got.row.float().isnan().nonzero().tolist() == places
        assert 0.0 < float(grad_scale.amax) < 1000.0  # type: ignore[arg-type]
        if places:
            scale_with_nan = scale_of(1.0, device, 0.25)
            assert kernels.relu2_8(torch.full((3, 5), value, device=device), scale_with_nan).row.float().isnan().all()
            assert float(scale_with_nan.amax) == 0.25  # type: ignore[arg-type]


def test_other_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    from redline.kernels.triton import activations as in_triton

    tile = in_triton.TILES["relu2"]._replace(tokens=16, columns=32)
    monkeypatch.setitem(in_triton.TILES, "relu2", tile)
    monkeypatch.setattr(in_triton, "_RELU2_VALUES", 64)
    check_eight(in_triton, device, 35, 70)
    check(in_triton, device, 35, 70, torch.float32)
