"""fp8 matmuls, and the bias that corrects the mean row for the rounding of the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eight_bits import kernels, randoms, scale_of
from redline.kernels import float8
from redline.kernels.float8 import Float8

__all__ = ["kernels"]  # a fixture
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu")
sizes = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_matmuls(device: str) -> None:
    x, w, g = randoms(9, (32, 48), (64, 48), (32, 64), device=device)
    scales = [scale_of(factor, device) for factor in (16.0, 32.0, 8.0)]
    x8, w8, g8 = (float8.quantise(t, scale) for t, scale in zip((x, w, g), scales, strict=True))
    x, w, g = (t.row.double() * t.unscale.double() for t in (x8, w8, g8))  # type: ignore[union-attr]
    bias = torch.arange(64, device=device).bfloat16()
    for got, exact, dtype in (
        (float8.linear8(x8, w8), x @ w.T, torch.bfloat16),
        (float8.linear8(x8, w8, bias), x @ w.T + bias.double(), torch.bfloat16),
        (float8.input_gradient8(g8, w8), g @ w, torch.bfloat16),
        (float8.input_gradient8(g8, w8, bias[:48]), g @ w + bias[:48].double(), torch.bfloat16),
        (float8.weight_gradient8(g8, x8), g.T @ x, torch.float32),
        (float8.weight_gradient8(g8, Float8(None, x8.column, x8.unscale)), g.T @ x, torch.float32),
    ):
        assert got.dtype == dtype
        slack = 2**-8 if dtype == torch.bfloat16 or device == "cuda" else 1e-5
        torch.testing.assert_close(got.double(), exact, rtol=slack, atol=slack * float(exact.abs().max()))


def lost_and_mean(rows8: Float8, w8: Float8, w: Tensor) -> tuple[Tensor, Tensor]:
    assert rows8.row is not None
    assert w8.row is not None
    rows = rows8.row.double()[:: len(rows8.row) // 2048 | 1] * rows8.unscale.double()
    return w.double() - w8.row.double() * w8.unscale.double(), rows.mean(0)


def check_corrections(kernels: Any, device: str, n: int, inner: int, outer: int) -> None:
    x, g, w = randoms(n + 7 * inner, (n, inner), (n, outer), (outer, inner), device=device)
    x8, g8, w8 = (float8.quantise(t, scale_of(16.0, device)) for t in (x + 1.0, g - 1.0, w))
    for actual, expected, terms in (
        (kernels.mean_correction(x8, w8, w), torch.mv(*lost_and_mean(x8, w8, w)), inner),
        (kernels.mean_gradient_correction(g8, w8, w), torch.mv(*_turned(*lost_and_mean(g8, w8, w))), outer),
    ):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=1e-5 * terms)


def _turned(matrix: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    return matrix.T, vector


@sizes
@given(n=st.integers(1, 300), inner=st.integers(1, 300), outer=st.integers(1, 70))
def test_corrections_any_size(kernels: Any, device: str, n: int, inner: int, outer: int) -> None:
    check_corrections(kernels, device, n, inner, outer)


@pytest.mark.parametrize(("n", "inner", "outer"), [(9000, 16, 16), (600, 16, 1100), (600, 520, 16)])
def test_corrections_of_more_than_one_program(kernels: Any, device: str, n: int, inner: int, outer: int) -> None:
    check_corrections(kernels, device, n, inner, outer)


def test_what_rows_share_is_multiplied_as_if_the_weight_were_exact(device: str) -> None:
    shared, own, w = randoms(4, (1, 256), (512, 256), (256, 256), device=device)
    x = (shared + 0.3 * own).to(torch.bfloat16)
    x8, w8 = (float8.quantise(t, scale_of(16.0, device)) for t in (x, w))
    rows = x8.row.double() * x8.unscale.double()  # type: ignore[union-attr]
    for matmul, correction, exact in (
        (float8.linear8, float8.mean_correction, rows @ w.double().T),
        (float8.input_gradient8, float8.mean_gradient_correction, rows @ w.double()),
    ):
        plain = matmul(x8, w8).double() - exact
        mended = matmul(x8, w8, correction(x8, w8, w)).double() - exact
        assert mended.norm() < 0.5 * plain.norm()
