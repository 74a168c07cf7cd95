"""The block's kernels as a GPU compiles them, at the sizes of real models, against float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.kernels.rms_norm import (
    add_rms_norm,
    reference_add_rms_norm,
    reference_rms_norm_backward,
    rms_norm_backward,
)
from redline.kernels.rotary import (
    merge_rotated_gradients,
    reference_merge_rotated_gradients,
    reference_rotate_qkv_,
    rotate_qkv_,
)
from redline.kernels.swiglu import reference_swiglu, reference_swiglu_backward_, swiglu, swiglu_backward_
from redline.models.layers import rotary_table

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
    _, wanted, wanted_rstd = reference_add_rms_norm(total.float(), None, weight, 1e-5)
    assert_rounded(normed, wanted)
    torch.testing.assert_close(rstd, wanted_rstd, rtol=1e-5, atol=0.0)
    grad, grad_weight = rms_norm_backward(g, total, rstd, weight, g_sum)
    past = None if g_sum is None else g_sum.float()
    wanted, wanted_weight = reference_rms_norm_backward(g.float(), total.float(), rstd, weight, past)
    assert_rounded(grad, wanted)
    torch.testing.assert_close(grad_weight, wanted_weight, rtol=1e-4, atol=1e-4 * n**0.5)
    again = rms_norm_backward(g, total, rstd, weight, g_sum)
    assert torch.equal(grad, again[0])
    assert torch.equal(grad_weight, again[1])


@dtypes
@pytest.mark.parametrize(("n", "width"), [(4096, 2688), (1003, 2816), (515, 4096), (77, 11008), (33, 2689), (1, 7)])
def test_swiglu(n: int, width: int, dtype: torch.dtype) -> None:
    h, grad_s = 2.0 * randoms(n, 2 * width, dtype=dtype), randoms(n, width, dtype=dtype)
    assert_rounded(swiglu(h), reference_swiglu(h.float()))
    wanted = reference_swiglu_backward_(grad_s.float(), h.to(torch.float32, copy=True))
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
    reference_rotate_qkv_(wanted, cos, sin, heads, kv_heads, head_dim)
    rotate_qkv_(qkv, cos, sin, heads, kv_heads, head_dim)
    assert_rounded(qkv, wanted)
    each = qkv.view(batch, length, total, head_dim).split((heads, kv_heads, kv_heads), 2)
    grads = [grad.transpose(1, 2) for grad in each]
    if heads_first:
        grads = [grad.contiguous() for grad in grads]
    merged = merge_rotated_gradients(*grads, cos, sin)
    q, k, v = (grad.float() for grad in grads)
    assert_rounded(merged, reference_merge_rotated_gradients(q, k, v, cos, sin))
    assert torch.equal(merged.view(batch, length, total, head_dim)[:, :, heads + kv_heads :], each[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_every_output(value: float) -> None:
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
    assert_rounded(swiglu(h)[-9:], reference_swiglu(tail))
    assert_rounded(swiglu_backward_(grad_s, h)[-9:], reference_swiglu_backward_(tail_grad, tail))
