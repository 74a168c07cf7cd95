"""The block's kernels as a GPU compiles them, at the sizes of real models, against float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.kernels.activations import swiglu, swiglu8, swiglu_backward8, swiglu_backward_
from redline.kernels.float8 import Float8, Scale, input_gradient8, linear8, quantise, weight_gradient8
from redline.kernels.rms_norm import add_rms_norm, add_rms_norm8, rms_norm_backward, rms_norm_backward8
from redline.kernels.rotary import merge_rotated_gradients, merge_rotated_gradients8, rotate_qkv_
from redline.models.decoder import rotary_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place
dtypes = pytest.mark.parametrize("dtype", list(ROUNDING), ids=["fp32", "bf16", "fp16"])


def randoms(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def assert_rounded(got: Tensor, wanted: Tensor) -> None:
    """`got` is float32's `wanted`, rounded once."""
    torch.testing.assert_close(got.float(), wanted, rtol=1.01 * ROUNDING[got.dtype], atol=2e-5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dtypes
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(("n", "d"), [(8192, 1024), (1001, 768), (333, 2048), (77, 4096), (35, 8192), (129, 1023)])
def test_norm(n: int, d: int, add: bool, dtype: torch.dtype) -> None:
    x, g = randoms(n, d, dtype=dtype), randoms(n, d, dtype=dtype)
    delta, g_sum = (randoms(n, d, dtype=dtype), randoms(n, d, dtype=dtype)) if add else (None, None)
    weight = 1.0 + 0.3 * randoms(d, dtype=torch.float32)
    total, normed, rstd = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x if delta is None else x + delta)
    _, wanted, wanted_rstd = add_rms_norm.reference(total.float(), None, weight, 1e-5)
    assert_rounded(normed, wanted)
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-5, atol=0.0)
    grad, grad_weight = rms_norm_backward(g, total, rstd, weight, g_sum)
    past = None if g_sum is None else g_sum.float()
    wanted, wanted_weight = rms_norm_backward.reference(g.float(), total.float(), rstd, weight, past)
    assert_rounded(grad, wanted)
    torch.testing.assert_close(grad_weight, wanted_weight, rtol=1e-4, atol=1e-4 * n**0.5)
    again = rms_norm_backward(g, total, rstd, weight, g_sum)
    assert torch.equal(grad, again[0])
    assert torch.equal(grad_weight, again[1])


@dtypes
@pytest.mark.parametrize(("n", "width"), [(4096, 2688), (1003, 2816), (515, 4096), (77, 11008), (33, 2689), (1, 7)])
def test_swiglu(n: int, width: int, dtype: torch.dtype) -> None:
    h, grad_s = 2.0 * randoms(n, 2 * width, dtype=dtype), randoms(n, width, dtype=dtype)
    assert_rounded(swiglu(h), swiglu.reference(h.float()))
    wanted = swiglu_backward_.reference(grad_s.float(), h.to(torch.float32, copy=True))
    assert swiglu_backward_(grad_s, h) is h
    assert_rounded(h, wanted)


@dtypes
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dim"),
    [(4, 1024, 16, 16, 64), (3, 515, 12, 12, 64), (2, 300, 32, 8, 128), (5, 77, 9, 3, 80), (1, 1, 1, 1, 2)],
)
def test_rotary(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, heads_first: bool, dtype: torch.dtype
) -> None:
    total = heads + 2 * kv_heads
    cos, sin = rotary_table(length, head_dim, 1e4, torch.device("cuda"))
    qkv = randoms(batch, length, total * head_dim, dtype=dtype)
    wanted = qkv.to(torch.float32, copy=True)
    rotate_qkv_.reference(wanted, cos, sin, heads, kv_heads, head_dim)
    rotate_qkv_(qkv, cos, sin, heads, kv_heads, head_dim)
    assert_rounded(qkv, wanted)
    each = qkv.view(batch, length, total, head_dim).split((heads, kv_heads, kv_heads), 2)
    grads = [grad.transpose(1, 2) for grad in each]
    if heads_first:
        grads = [grad.contiguous() for grad in grads]
    merged = merge_rotated_gradients(*grads, cos, sin)
    q, k, v = (grad.float() for grad in grads)
    assert_rounded(merged, merge_rotated_gradients.reference(q, k, v, cos, sin))
    assert torch.equal(merged.view(batch, length, total, head_dim)[:, :, heads + kv_heads :], each[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_every_output(value: float) -> None:
    x, delta, weight = randoms(64, 1024), randoms(64, 1024), torch.ones(1024, device="cuda")
    delta[3, 5] = value
    total, normed, rstd = add_rms_norm(x, delta, weight, 1e-5)
    grad, grad_weight = rms_norm_backward(x, total, rstd, weight, None)
    assert normed[3, 5].isnan()
    assert grad[3, 5].isnan()
    assert grad_weight[5].isnan()
    assert normed[:3].isfinite().all()
    h, grad_s = randoms(64, 2 * 2688), randoms(64, 2688)
    h[7, 11] = value
    assert not swiglu(h)[7, 11].isfinite()
    assert swiglu_backward_(grad_s, h)[7, 11].isnan()
    assert h[:7].isfinite().all()


def test_offsets_beyond_32_bits() -> None:
    n, width = 400_003, 2688  # 2·n·width is past 2^31
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    h, grad_s = randoms(n, 2 * width), randoms(n, width)
    tail, tail_grad = h[-9:].float(), grad_s[-9:].float()
    assert_rounded(swiglu(h)[-9:], swiglu.reference(tail))
    assert_rounded(swiglu_backward_(grad_s, h)[-9:], swiglu_backward_.reference(tail_grad, tail))


def scale_of(factor: float) -> Scale:
    return Scale(*(torch.tensor(value, device="cuda") for value in (factor, 1.0 / factor, 0.0)))


def codes(x: Tensor | None) -> Tensor:
    """Return codes as integers in the order of their values; NaN is far from all others."""
    assert x is not None
    raw = x.view(torch.uint8).to(torch.int32)
    size = torch.where(raw % 128 == 127, 10_000, raw % 128)
    return torch.where((raw >= 128) & (size < 10_000), -size, size)


def assert_codes(got: Float8, wanted: Float8, seen: Scale, expected: Scale, share: float = 0.001) -> None:
    """Compare both layouts; a value between two codes may be rounded to either."""
    assert got.row is not None
    assert torch.equal(got.column.view(torch.uint8), got.row.view(torch.uint8).T)
    off = (codes(got.row) - codes(wanted.row)).abs()
    assert int(off.max()) <= 1
    assert int((off > 0).sum()) <= max(2, off.numel() * share)
    assert seen.amax is not None
    assert expected.amax is not None
    torch.testing.assert_close(seen.amax, expected.amax, rtol=1e-5 if share < 0.01 else 2**-8, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "width"), [(5376, 1024), (16384, 1024), (1001, 769), (1, 1), (17, 48)])
def test_fp8_rounds_as_torch_does(n: int, width: int, dtype: torch.dtype) -> None:
    x = randoms(n, width, dtype=dtype)
    x.view(-1)[::97] *= 1e4  # some are cut off
    x.view(-1)[5::1009] = float("inf")
    x.view(-1)[7::1009] = float("nan")
    seen, expected = scale_of(100.0), scale_of(100.0)
    got, wanted = quantise(x, seen), quantise.reference(x, expected)
    assert_codes(got, wanted, seen, expected)
    assert torch.equal(codes(got.row), codes(wanted.row))
    assert torch.equal(seen.amax, expected.amax)  # type: ignore[arg-type]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(("n", "d"), [(8192, 1024), (1001, 768), (336, 2048), (77, 4096), (35, 8192), (129, 1023)])
def test_fp8_norm(n: int, d: int, add: bool) -> None:
    x, g = randoms(n, d), randoms(n, d)
    delta, g_sum = (randoms(n, d), randoms(n, d)) if add else (None, None)
    weight = 1.0 + 0.3 * randoms(d, dtype=torch.float32)
    seen, expected = [scale_of(64.0), scale_of(100.0)], [scale_of(64.0), scale_of(100.0)]
    total, normed, rstd = add_rms_norm8(x, delta, weight, 1e-5, seen[0])
    wanted_total, wanted, wanted_rstd = add_rms_norm8.reference(x, delta, weight, 1e-5, expected[0])
    assert torch.equal(total, wanted_total)
    assert (total is x) is not add
    assert_codes(normed, wanted, seen[0], expected[0], share=0.06 if d > 2048 else 0.001)  # wide: by way of bf16
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-5, atol=0.0)
    grad, grad8, grad_weight = rms_norm_backward8(g, total, rstd, weight, g_sum, seen[1])
    past = None if g_sum is None else g_sum.float()
    wanted_grad, wanted_weight = rms_norm_backward.reference(g.float(), total.float(), rstd, weight, past)
    assert_rounded(grad, wanted_grad)
    assert_codes(grad8, quantise.reference(grad, expected[1]), seen[1], expected[1])
    torch.testing.assert_close(grad_weight, wanted_weight, rtol=1e-4, atol=1e-4 * n**0.5)
    again = rms_norm_backward8(g, total, rstd, weight, g_sum, seen[1])
    assert torch.equal(grad_weight, again[2])
    assert torch.equal(codes(grad8.row), codes(again[1].row))


@pytest.mark.parametrize(("n", "width"), [(4096, 2688), (1003, 2816), (512, 4096), (77, 11008), (33, 2689), (1, 7)])
def test_fp8_swiglu(n: int, width: int) -> None:
    h, grad_s = 2.0 * randoms(n, 2 * width), randoms(n, width)
    before = h.clone()
    seen, expected = [scale_of(16.0), scale_of(50.0)], [scale_of(16.0), scale_of(50.0)]
    s, wanted = swiglu8(h, seen[0]), swiglu8.reference(h, expected[0])
    assert_codes(s, wanted, seen[0], expected[0])
    grad = swiglu_backward8(grad_s, h, seen[1])
    assert_codes(grad, swiglu_backward8.reference(grad_s, h, expected[1]), seen[1], expected[1])
    assert torch.equal(h, before)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dim"),
    [(4, 1024, 16, 16, 64), (3, 515, 12, 12, 64), (2, 300, 32, 8, 128), (5, 77, 9, 3, 80), (1, 1, 1, 1, 2)],
)
def test_fp8_merge(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, heads_first: bool) -> None:
    total = heads + 2 * kv_heads
    cos, sin = rotary_table(length, head_dim, 1e4, torch.device("cuda"))
    merged = randoms(batch, length, total, head_dim)
    grads = [grad.transpose(1, 2) for grad in merged.split((heads, kv_heads, kv_heads), 2)]
    if heads_first:
        grads = [grad.contiguous() for grad in grads]
    q, k, v = grads
    seen, expected = scale_of(100.0), scale_of(100.0)
    got = merge_rotated_gradients8(q, k, v, cos, sin, seen)
    assert_codes(got, merge_rotated_gradients8.reference(q, k, v, cos, sin, expected), seen, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_nan_in_fp8(value: float) -> None:
    x, delta, weight = randoms(64, 1024), randoms(64, 1024), torch.ones(1024, device="cuda")
    delta[3, 5] = value
    scale = scale_of(16.0)
    total, normed, rstd = add_rms_norm8(x, delta, weight, 1e-5, scale)
    grad, grad8, grad_weight = rms_norm_backward8(x, total, rstd, weight, None, scale)
    assert codes(normed.row)[3, 5] == codes(grad8.row)[3, 5] == codes(grad8.column)[5, 3] == 10_000
    assert grad[3, 5].isnan()
    assert grad_weight[5].isnan()
    assert (codes(normed.row)[:3] < 10_000).all()
    h, grad_s = randoms(64, 2 * 2688), randoms(64, 2688)
    h[7, 11] = value
    assert codes(swiglu8(h, scale).row)[7, 11] == 10_000
    back = codes(swiglu_backward8(grad_s, h, scale).row)
    assert back[7, 11] == 10_000
    assert (back[:7] < 10_000).all()
    lost = scale_of(1.0)
    quantise(torch.full((32, 64), value, device="cuda"), lost)
    assert scale.amax is not None
    assert 0.0 < float(scale.amax) < 1e3
    assert lost.amax is not None
    assert float(lost.amax) == 0.0


@pytest.mark.parametrize(
    ("n", "inner", "outer"), [(8192, 1024, 3072), (4096, 2688, 1024), (48, 16, 32), (400_000, 64, 128)]
)
def test_fp8_matmuls(n: int, inner: int, outer: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores for fp8")
    x, w, g = randoms(n, inner), randoms(outer, inner, dtype=torch.float32), randoms(n, outer)
    x8, w8, g8 = (quantise(value, scale_of(64.0)) for value in (x, w, g))
    x, w, g = (value.row.float() * value.unscale for value in (x8, w8, g8))  # type: ignore[union-attr]
    for got, wanted, dtype, slack in (
        (linear8(x8, w8), x @ w.T, torch.bfloat16, 4e-3),
        (input_gradient8(g8, w8), g @ w, torch.bfloat16, 4e-3),
        (weight_gradient8(g8, x8), g.T @ x, torch.float32, 3e-3),
    ):
        assert got.dtype == dtype
        assert (got.float() - wanted).norm() <= slack * wanted.norm()
    odd = quantise(randoms(24, inner), scale_of(64.0))
    with pytest.raises(AssertionError, match="multiples of 16"):
        linear8(odd, w8)


def test_fp8_offsets_beyond_32_bits() -> None:
    n, width = 400_016, 2688  # 2·n·width is past 2^31
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    h, grad_s = randoms(n, 2 * width), randoms(n, width)
    seen, expected = scale_of(50.0), scale_of(50.0)
    got = swiglu_backward8(grad_s, h, seen)
    assert got.row is not None
    tail = swiglu_backward8.reference(grad_s[-9:], h[-9:], expected)
    assert (codes(got.row[-9:]) - codes(tail.row)).abs().max() <= 1
    assert torch.equal(codes(got.column[:, -9:].contiguous()), codes(got.row[-9:]).T)
