"""Rotary positions on merged projections, forward and backward, against the plain layers and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.models.decoder import rotary_table, rotate

KERNELS = "rotary"
# a half-precision result is one rounding away from float32's; the interpreter rounds bf16 towards zero
SLACK = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11 + 2e-6}
sizes = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Shape = tuple[int, int, int, int, int]  # B, T, heads, kv_heads, head_dim


def problem(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    B, T, heads, kv_heads, K = shape
    generator = torch.Generator().manual_seed(sum(shape))
    qkv = torch.randn(B, T, (heads + 2 * kv_heads) * K, generator=generator).to(device, dtype)
    return qkv, *rotary_table(T, K, 100.0, torch.device(device))


def split(qkv: Tensor, shape: Shape) -> list[Tensor]:
    """Queries, keys, values as [B, H, T, K]."""
    _, _, heads, kv_heads, K = shape
    each = qkv.unflatten(-1, (heads + 2 * kv_heads, K)).split((heads, kv_heads, kv_heads), 2)
    return [x.transpose(1, 2) for x in each]


def exact(qkv: Tensor, cos: Tensor, sin: Tensor, shape: Shape, grads: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return rotated queries and keys, values, and the gradient of the merged projection, in float64 by autograd."""
    double = qkv.double().requires_grad_()
    q, k, v = split(double, shape)
    turned = []
    for x in (q, k):
        a, b = x.chunk(2, -1)
        turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    torch.autograd.backward([*turned, v], [grad.double() for grad in grads])
    assert double.grad is not None
    return [x.detach() for x in (*turned, v)], double.grad


def check(kernels: Any, device: str, shape: Shape, dtype: torch.dtype, heads_first: bool) -> None:
    qkv, cos, sin = problem(shape, device, dtype)
    grads = split(torch.randn(qkv.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype), shape)
    if heads_first:
        grads = [grad.contiguous() for grad in grads]
    expected, expected_grad = exact(qkv, cos, sin, shape, grads)
    values = split(qkv, shape)[2].clone()
    assert kernels.rotate_qkv_(qkv, cos, sin, *shape[2:]) is None
    slack = SLACK[dtype]
    for got, wanted in zip(split(qkv, shape), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=slack, atol=2e-6)
    assert torch.equal(split(qkv, shape)[2], values)
    merged = kernels.merge_rotated_gradients(*grads, cos, sin)
    assert (merged.shape, merged.dtype, merged.is_contiguous()) == (qkv.shape, dtype, True)
    torch.testing.assert_close(merged.double(), expected_grad, rtol=slack, atol=2e-6)
    assert torch.equal(split(merged, shape)[2], grads[2])


@sizes
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 19),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 20),
    heads_first=st.booleans(),
)
def test_any_shape_and_layout(
    kernels: Any, device: str, B: int, T: int, kv_heads: int, group: int, half: int, heads_first: bool
) -> None:
    check(kernels, device, (B, T, kv_heads * group, kv_heads, 2 * half), torch.float32, heads_first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_first", [True, False])
def test_half_precision(kernels: Any, device: str, dtype: torch.dtype, heads_first: bool) -> None:
    check(kernels, device, (2, 7, 6, 2, 16), dtype, heads_first)


@pytest.mark.parametrize("shape", [(2, 5, 16, 16, 64), (1, 3, 32, 8, 128), (1, 2, 70, 2, 80), (0, 4, 2, 2, 8)])
def test_the_shapes_of_real_models(kernels: Any, device: str, shape: Shape) -> None:
    check(kernels, device, shape, torch.float32, True)


def test_it_is_the_rotation_of_the_layers(kernels: Any, device: str) -> None:
    shape = (2, 9, 4, 2, 12)
    qkv, cos, sin = problem(shape, device)
    q, k, _ = split(qkv.clone(), shape)
    kernels.rotate_qkv_(qkv, cos, sin, *shape[2:])
    torch.testing.assert_close(split(qkv, shape)[0], rotate(q, cos, sin))
    torch.testing.assert_close(split(qkv, shape)[1], rotate(k, cos, sin))


def test_merging_undoes_the_rotation(kernels: Any, device: str) -> None:
    shape = (2, 11, 6, 3, 10)
    qkv, cos, sin = problem(shape, device)
    before = qkv.clone()
    kernels.rotate_qkv_(qkv, cos, sin, *shape[2:])
    torch.testing.assert_close(kernels.merge_rotated_gradients(*split(qkv, shape), cos, sin), before)


def test_gradients_may_have_any_strides(kernels: Any, device: str) -> None:
    shape = (2, 5, 4, 2, 8)
    plain = [grad.contiguous() for grad in split(problem(shape, device)[0], shape)]
    _, cos, sin = problem(shape, device)
    expected = kernels.merge_rotated_gradients(*plain, cos, sin)
    expanded = plain[2][:, :, :1].expand_as(plain[2])
    gaps = [torch.stack((grad, grad), 3)[:, :, :, 0] for grad in plain]
    across = [grad.mT.contiguous().mT for grad in plain]  # not even the last dimension is contiguous
    for layout in (gaps, across):
        assert torch.equal(kernels.merge_rotated_gradients(*layout, cos, sin), expected)
    got = kernels.merge_rotated_gradients(plain[0], plain[1], expanded, cos, sin)
    assert torch.equal(got, kernels.merge_rotated_gradients(plain[0], plain[1], expanded.contiguous(), cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_pair(kernels: Any, device: str, value: float, dtype: torch.dtype) -> None:
    shape = (2, 5, 2, 1, 8)
    qkv, cos, sin = problem(shape, device, dtype)
    columns = [2, 17, 25]  # a query, a key, a value: partners are 6, 21 and none
    qkv[1, 3, columns] = value
    grads = [grad.clone() for grad in split(qkv, shape)]
    kernels.rotate_qkv_(qkv, cos, sin, *shape[2:])
    for got in (qkv, kernels.merge_rotated_gradients(*grads, cos, sin)):
        assert (~got.isfinite()).nonzero().tolist() == [[1, 3, c] for c in (2, 6, 17, 21, 25)]
