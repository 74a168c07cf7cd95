"""fp8 operands: exact rounding, both layouts, and the operands of each fused kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eight_bits import in_triton, kernels, randoms, scale_of
from redline.kernels.float8 import LARGEST, Float8, Scale
from redline.models.decoder import rotary_table

__all__ = ["kernels"]  # a fixture
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu")
E4M3 = torch.float8_e4m3fn
EPS = 1e-5
POSITIVE = torch.arange(127, dtype=torch.uint8).view(E4M3).double()  # every value there is, from 0 to 448
BORDERS = (POSITIVE[1:] + POSITIVE[:-1]) / 2
sizes = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Shape = tuple[int, int, int, int, int]  # B, T, heads, kv_heads, head_dim


def codes(values: Tensor) -> Tensor:
    """Return codes as integers in the order of their values; NaN is far from all others."""
    raw = values.view(torch.uint8).cpu().to(torch.int32)
    size = torch.where(raw % 128 == 127, 10_000, raw % 128)
    return torch.where(raw >= 128, -size, size).where(raw % 128 != 127, size)


def rounded(value: Tensor, factor: float) -> Tensor:
    """Return the codes of float64 values by the table: nearest, ties to even, saturating."""
    value = value.double().cpu() * factor
    place = torch.searchsorted(BORDERS, value.abs())  # of a tie, the lower
    tie = (place < len(BORDERS)) & (BORDERS[place.clamp_max(len(BORDERS) - 1)] == value.abs())
    place = (place + (tie & (place % 2 == 1))).to(torch.int32)
    return torch.where(value.isfinite(), torch.where(value < 0, -place, place), 10_000)


def check(got: Float8, scale: Scale, exact: Tensor, *, any_off: bool = True, share: float = 0.001) -> None:
    """`got` is `exact`, but for the rare value that float32 puts on the other side of a border between two codes."""
    assert got.row is not None
    assert (got.row.dtype, got.column.dtype) == (E4M3, E4M3)
    assert got.row.shape == exact.shape
    assert got.row.is_contiguous()
    assert got.column.is_contiguous()
    assert got.unscale is scale.unscale
    assert torch.equal(got.column.view(torch.uint8), got.row.view(torch.uint8).T)
    off = (codes(got.row) - rounded(exact, float(scale.factor))).abs()
    assert off.numel() == 0 or off.max() <= int(any_off)
    assert int((off > 0).sum()) <= max(2, exact.numel() * share)
    if scale.amax is not None:
        finite = exact.abs().nan_to_num(0.0, posinf=0.0)
        largest = float(finite.max()) if finite.numel() else 0.0
        assert float(scale.amax) == pytest.approx(largest, rel=2**-8 if share > 0.01 else 1e-5 if any_off else 0.0)


def test_every_border_between_codes(kernels: Any, device: str) -> None:
    near = [BORDERS, POSITIVE, BORDERS * (1 + 2**-20), BORDERS * (1 - 2**-20)]
    x = torch.cat([*near, *(-x for x in near)]).float().reshape(10, -1).to(device)
    for factor in (1.0, 2.0**-9, 2.0**20):
        scale = scale_of(factor, device)
        check(kernels.quantise(x / factor, scale), scale, x.double() / factor, any_off=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_half_a_unit_of_the_last_place(kernels: Any, device: str, dtype: torch.dtype) -> None:
    x = (torch.exp2(torch.linspace(-12, 8.8, 3 * 701)).reshape(3, 701)).to(device, dtype)
    got = kernels.quantise(x, scale_of(1.0, device, None)).row.double()
    unit = torch.exp2(x.double().log2().floor().clamp_min(-6) - 3)
    assert ((got - x.double()).abs() <= unit / 2).all()


@pytest.mark.parametrize("value", [449.0, 464.0, 1e4, 1e30, 3e38])
def test_large_values_saturate(kernels: Any, device: str, value: float) -> None:
    x = torch.tensor([[value, -value, 1.0]], device=device)
    for factor in (1.0, 2.0**8):  # the product may itself pass float32
        scale = scale_of(factor, device)
        got = kernels.quantise(x, scale)
        assert got.row.float()[0, :2].tolist() == [LARGEST, -LARGEST]
        assert float(scale.amax) == float(x[0, 0])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_become_nan_and_do_not_count_for_amax(
    kernels: Any, device: str, value: float, dtype: torch.dtype
) -> None:
    (x,) = randoms(1, (37, 21), device=device, dtype=dtype)
    x[5, 3] = x[36, 20] = value
    scale = scale_of(16.0, device)
    check(kernels.quantise(x, scale), scale, x.double(), any_off=False)
    scale_with_nan = scale_of(16.0, device, 0.25)
    got = kernels.quantise(torch.full((3, 5), value, device=device), scale_with_nan)
    assert got.row.float().isnan().all()
    assert float(scale_with_nan.amax) == 0.25  # type: ignore[arg-type]


def test_amax_only_rises(kernels: Any, device: str) -> None:
    (x,) = randoms(2, (9, 300), device=device)
    scale = scale_of(1.0, device, 1e-3)
    for times, largest in ((1.0, 1.0), (0.5, 1.0), (3.0, 3.0)):
        kernels.quantise(times * x / x.abs().max(), scale)
        assert float(scale.amax) == pytest.approx(largest, rel=1e-6)  # type: ignore[arg-type]


@sizes
@given(n=st.integers(1, 150), width=st.integers(1, 150))
def test_quantise_any_size(kernels: Any, device: str, n: int, width: int) -> None:
    (x,) = randoms(n * 151 + width, (n, width), device=device)
    scale = scale_of(37.0, device)
    check(kernels.quantise(x, scale), scale, (x * scale.factor).double() / 37.0)
    strided = kernels.quantise(x.T.contiguous().T, scale)
    check(strided, scale, (x * scale.factor).double() / 37.0)


@sizes
@given(n=st.integers(0, 300), width=st.integers(1, 300), by=st.sampled_from([1, 4]))
def test_transpose_any_size(device: str, n: int, width: int, by: int) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    generator = torch.Generator().manual_seed(n * 307 + width)
    codes = torch.randint(0, 256, (n * by, width * by), generator=generator, dtype=torch.uint8).to(device)
    column = in_triton().transpose(codes.view(torch.float8_e4m3fn))
    assert column.is_contiguous()
    assert torch.equal(column.view(torch.uint8), codes.T)


def check_norm(kernels: Any, device: str, n: int, d: int, add: bool, dtype: torch.dtype = torch.float32) -> None:
    x, delta, g, g_sum = randoms(n * 997 + d, *[(n, d)] * 4, device=device, dtype=dtype)
    weight = 1.0 + 0.3 * randoms(7, (d,), device=device)[0]
    delta_or, past = (delta, g_sum) if add else (None, None)
    scale, grad_scale = scale_of(64.0, device), scale_of(100.0, device)
    before = [tensor.clone() for tensor in (x, delta, g, g_sum)]
    total, normed, rstd = kernels.add_rms_norm8(x, delta_or, weight, EPS, scale)
    grad, grad8, grad_weight = kernels.rms_norm_backward8(g, total, rstd, weight, past, grad_scale)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, delta, g, g_sum), strict=True))
    assert (total is x) is not add
    assert torch.equal(total, x + delta if add else x)
    assert (grad.dtype, rstd.dtype, grad_weight.dtype) == (dtype, torch.float32, torch.float32)
    double, double_weight = total.double().requires_grad_(), weight.double().requires_grad_()
    exact_rstd = torch.rsqrt(double.square().mean(-1) + EPS)
    exact = double * exact_rstd[:, None] * double_weight
    exact.backward(g.double())
    torch.testing.assert_close(rstd.double(), exact_rstd.detach(), rtol=2e-6, atol=0.0)
    check(normed, scale, exact.detach(), share=0.001)
    exact_grad = double.grad + (past.double() if past is not None else 0.0)
    check(grad8, grad_scale, grad.double())
    torch.testing.assert_close(grad.double(), exact_grad, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=2e-5)
    torch.testing.assert_close(grad_weight.double(), double_weight.grad, rtol=1e-5, atol=1e-5 * max(1.0, n**0.5))


@sizes
@given(n=st.integers(1, 70), d=st.integers(3, 300), add=st.booleans())
def test_norm_any_size(kernels: Any, device: str, n: int, d: int, add: bool) -> None:
    check_norm(kernels, device, n, d, add)


@pytest.mark.parametrize(("n", "d"), [(33, 1024), (40, 1030), (3, 2048), (2, 2500), (0, 16)])
def test_norms_of_rows_in_one_block_or_more(kernels: Any, device: str, n: int, d: int) -> None:
    check_norm(kernels, device, n, d, True)
    check_norm(kernels, device, n, d, False, torch.bfloat16)


@pytest.mark.parametrize("add", [True, False])
def test_norm_in_half_precision(kernels: Any, device: str, add: bool) -> None:
    check_norm(kernels, device, 45, 130, add, torch.bfloat16)


def test_the_weights_gradient_is_the_same_every_time(kernels: Any, device: str) -> None:
    x, g = randoms(8, (300, 20), (300, 20), device=device)
    weight, scale = torch.ones(20, device=device), scale_of(1.0, device, None)
    rstd = kernels.add_rms_norm8(x, None, weight, EPS, scale)[2]
    first, second = (kernels.rms_norm_backward8(g, x, rstd, weight, None, scale)[2] for _ in range(2))
    assert torch.equal(first, second)


def exact_swiglu(h: Tensor, grad_s: Tensor) -> tuple[Tensor, Tensor]:
    double = h.double().requires_grad_()
    gate, up = double.chunk(2, -1)
    s = torch.nn.functional.silu(gate) * up
    s.backward(grad_s.double())
    assert double.grad is not None
    return s.detach(), double.grad


def check_swiglu(kernels: Any, device: str, n: int, width: int, dtype: torch.dtype = torch.float32) -> None:
    h, grad_s = randoms(n * 1009 + width, (n, 2 * width), (n, width), device=device, dtype=dtype)
    h *= 3
    before = h.clone(), grad_s.clone()
    scale, grad_scale = scale_of(10.0, device), scale_of(30.0, device)
    s, grad = kernels.swiglu8(h, scale), kernels.swiglu_backward8(grad_s, h, grad_scale)
    assert torch.equal(h, before[0])
    assert torch.equal(grad_s, before[1])
    exact, exact_grad = exact_swiglu(h, grad_s)
    check(s, scale, exact)
    check(grad, grad_scale, exact_grad)


@sizes
@given(n=st.integers(1, 150), width=st.integers(1, 100))
def test_swiglu_any_size(kernels: Any, device: str, n: int, width: int) -> None:
    check_swiglu(kernels, device, n, width)


@pytest.mark.parametrize(("n", "width"), [(5, 2688), (131, 64), (0, 8)])
def test_swiglu_in_half_precision(kernels: Any, device: str, n: int, width: int) -> None:
    check_swiglu(kernels, device, n, width, torch.bfloat16)


@pytest.mark.parametrize("gate", [-200.0, -90.0, -20.0, 20.0, 90.0, 200.0])
def test_large_gates_neither_overflow_nor_vanish(kernels: Any, device: str, gate: float) -> None:
    h, grad_s = torch.tensor([[gate, 2.0]], device=device), torch.ones(1, 1, device=device)
    exact, exact_grad = exact_swiglu(h, grad_s)
    for factor in (1.0, 2.0**30):
        scale, grad_scale = scale_of(factor, device), scale_of(factor, device)
        check(kernels.swiglu8(h, scale), scale, exact)
        check(kernels.swiglu_backward8(grad_s, h, grad_scale), grad_scale, exact_grad)


def heads_of(merged: Tensor, shape: Shape) -> list[Tensor]:
    """Queries, keys, values as [B, H, T, K]."""
    _, _, heads, kv_heads, K = shape
    each = merged.unflatten(-1, (heads + 2 * kv_heads, K)).split((heads, kv_heads, kv_heads), 2)
    return [x.transpose(1, 2) for x in each]


def check_merge(kernels: Any, device: str, shape: Shape, heads_first: bool, dtype: torch.dtype = torch.float32) -> None:
    B, T, heads, kv_heads, K = shape
    (merged,) = randoms(sum(shape), (B, T, (heads + 2 * kv_heads) * K), device=device, dtype=dtype)
    cos, sin = rotary_table(T, K, 100.0, torch.device(device))
    q, k, v = (x.contiguous() if heads_first else x for x in heads_of(merged, shape))
    turned = []
    for x in (q.double(), k.double()):
        a, b = x.chunk(2, -1)
        turned.append(torch.cat((a * cos + b * sin, b * cos - a * sin), -1))
    exact = torch.cat([x.transpose(1, 2) for x in (*turned, v.double())], 2).flatten(2).flatten(0, 1)
    scale = scale_of(50.0, device)
    check(kernels.merge_rotated_gradients8(q, k, v, cos, sin, scale), scale, exact)


@sizes
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 60),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 20),
    heads_first=st.booleans(),
)
def test_merge_any_shape_and_layout(
    kernels: Any, device: str, B: int, T: int, kv_heads: int, group: int, half: int, heads_first: bool
) -> None:
    check_merge(kernels, device, (B, T, kv_heads * group, kv_heads, 2 * half), heads_first)


@pytest.mark.parametrize("shape", [(2, 5, 16, 16, 64), (1, 3, 32, 8, 128), (1, 130, 3, 1, 80), (0, 4, 2, 2, 8)])
def test_merge_in_half_precision(kernels: Any, device: str, shape: Shape) -> None:
    check_merge(kernels, device, shape, True, torch.bfloat16)
    check_merge(kernels, device, shape, False, torch.bfloat16)


def test_merged_gradients_may_have_any_strides(kernels: Any, device: str) -> None:
    shape = (2, 5, 4, 2, 8)
    (merged,) = randoms(3, (2, 5, 64), device=device)
    cos, sin = rotary_table(5, 8, 100.0, torch.device(device))
    plain = [x.contiguous() for x in heads_of(merged, shape)]
    across = [x.mT.contiguous().mT for x in plain]  # not even the last dimension is contiguous
    expected, got = (kernels.merge_rotated_gradients8(*x, cos, sin, scale_of(9.0, device)) for x in (plain, across))
    assert torch.equal(codes(got.row), codes(expected.row))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_where_they_are(kernels: Any, device: str, value: float) -> None:
    x, delta, g = randoms(5, *[(7, 40)] * 3, device=device)
    delta[3, 5] = value
    weight, scale = torch.ones(40, device=device), scale_of(1.0, device)
    total, normed, rstd = kernels.add_rms_norm8(x, delta, weight, EPS, scale)
    grad, grad8, grad_weight = kernels.rms_norm_backward8(g, total, rstd, weight, None, scale)
    for bad in (normed.row.float()[3, 5], grad[3, 5], grad8.row.float()[3, 5], grad_weight[5]):
        assert bad.isnan()
    assert normed.row.float()[[0, 1, 2, 4, 5, 6]].isfinite().all()
    h, grad_s = randoms(6, (6, 40), (6, 20), device=device)
    h[2, 4] = value
    for got in (kernels.swiglu8(h, scale), kernels.swiglu_backward8(grad_s, h, scale)):
        assert got.row.float()[2, 4].isnan()
        assert got.row.float()[[0, 1, 3, 4, 5]].isfinite().all()
    q, k, v = randoms(7, (1, 2, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8), device=device)
    q[0, 1, 3, 2] = k[0, 0, 3, 1] = v[0, 0, 3, 1] = value
    merged = kernels.merge_rotated_gradients8(q, k, v, *rotary_table(5, 8, 100.0, torch.device(device)), scale)
    assert (~merged.row.float().isfinite()).nonzero().tolist() == [[3, c] for c in (10, 14, 17, 21, 25)]
    assert float(scale.amax) < 100.0  # type: ignore[arg-type]


def test_without_the_transpose_rows_are_the_same(kernels: Any, device: str) -> None:
    """With frozen weights no matmul sums over tokens, and no transpose is made."""
    x, delta, g, past = randoms(3, *[(24, 32)] * 4, device=device)
    (h,), (s,) = randoms(4, (24, 64), device=device), randoms(5, (24, 32), device=device)
    weight, rstd = torch.ones(32, device=device), torch.ones(24, device=device)
    q, k, v = randoms(6, (2, 2, 12, 16), (2, 1, 12, 16), (2, 1, 12, 16), device=device)
    cos, sin = (table.to(device) for table in rotary_table(12, 16, 10000.0))
    makers = {
        "quantise": lambda scale: kernels.quantise(x, scale),
        "norm": lambda scale: kernels.add_rms_norm8(x, delta, weight, EPS, scale)[1],
        "norm backward": lambda scale: kernels.rms_norm_backward8(g, x, rstd, weight, past, scale)[1],
        "swiglu": lambda scale: kernels.swiglu8(h, scale),
        "swiglu backward": lambda scale: kernels.swiglu_backward8(s, h, scale),
        "merge": lambda scale: kernels.merge_rotated_gradients8(q, k, v, cos, sin, scale),
    }
    for name, make in makers.items():
        both, alone = make(scale_of(16.0, device)), make(scale_of(16.0, device)._replace(rows_alone=True))
        assert alone.column is None, name
        assert both.column is not None, name
        assert torch.equal(alone.row.view(torch.uint8), both.row.view(torch.uint8)), name


def test_other_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    from redline.kernels.triton import activations, float8, rotary

    tile = float8.Tile(16, 32, 4)
    for module in (float8, activations):
        monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, tile))
    monkeypatch.setattr(rotary, "TILE", tile)
    check_norm(in_triton(), device, 35, 70, True)
    check_swiglu(in_triton(), device, 35, 70)
    check_merge(in_triton(), device, (2, 9, 3, 1, 6), False)
