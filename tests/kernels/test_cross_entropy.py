"""The chunked head and loss against plain torch, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.kernels import cross_entropy
from redline.kernels.cross_entropy import IGNORE, in_place_softmax_loss, linear_cross_entropy
from redline.kernels.cross_entropy import reference_linear_cross_entropy as reference


def problem(n: int, d: int, v: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator).requires_grad_()
    weight = torch.randn(v, d, generator=generator).requires_grad_()
    target = torch.randint(0, v, (n,), generator=generator)
    target[torch.rand(n, generator=generator) < 0.2] = IGNORE
    return x, weight, target


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 9),
    v=st.integers(2, 33),
    chunk=st.integers(1, 50),
    cap=st.sampled_from([None, 5.0]),
)
def test_any_chunking_equals_the_reference(n: int, d: int, v: int, chunk: int, cap: float | None) -> None:
    results = []
    for function in (linear_cross_entropy, reference):
        x, weight, target = problem(n, d, v)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy, "head_chunk", lambda *_: chunk)
            loss = function(x, weight, target, softcap=cap)
        (3.0 * loss).backward()
        results.append((loss.detach(), x.grad, weight.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(2, 33),
    chunk=st.integers(1, 50),
    cap=st.sampled_from([None, 5.0]),
    weighted=st.booleans(),
    kept=st.floats(0.0, 1.0),
)
def test_weights_and_classes_equal_the_reference(
    n: int, v: int, chunk: int, cap: float | None, weighted: bool, kept: float
) -> None:
    classes = max(1, round(kept * v))
    weight_N = weights(n) if weighted else None
    results = []
    for function in (linear_cross_entropy, reference):
        x, weight, target = (t.detach() for t in problem(n, 6, v))
        target = torch.where(target == IGNORE, target, target % classes)
        if function is reference:
            x, weight = x.double(), weight.double()
        x, weight = x.requires_grad_(), weight.requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy, "head_chunk", lambda *_: chunk)
            loss = function(x, weight, target, softcap=cap, weight_N=weight_N, classes=classes)
        (3.0 * loss).backward()
        assert weight.grad is not None
        assert not weight.grad[classes:].any()
        results.append([t.float() for t in (loss.detach(), x.grad, weight.grad) if t is not None])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


def weights(n: int) -> torch.Tensor:
    """As of masks that hide one position in a thousand, or all, and of what is not learnt."""
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(n))
    return torch.where(drawn < 0.2, 0.0, 1 / (0.001 + 0.999 * drawn))


@pytest.mark.parametrize("largest", [0.5, 30.0, 1000.0])
def test_fp16_gradients_of_heavy_rows_stay_in_range(largest: float) -> None:
    """1024 × a weight of 1000 is beyond fp16's largest number."""
    x, weight, target = problem(64, 16, 40)
    target[:] = torch.arange(64) % 40
    weight_N = torch.rand(64, generator=torch.Generator().manual_seed(0)) * largest
    weight_N[7] = largest
    with torch.no_grad():
        x *= 0.3
    half = x.detach().half().requires_grad_()
    got_weight = weight.detach().clone().requires_grad_()
    loss = linear_cross_entropy(half, got_weight, target, weight_N=weight_N)
    (loss / 64).backward()
    expected = reference(x, weight, target, weight_N=weight_N)
    (expected / 64).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0.0)
    for got, wanted in ((half.grad, x.grad), (got_weight.grad, weight.grad)):
        assert got is not None
        assert wanted is not None
        assert ((got.float() - wanted).norm() / wanted.norm()).item() < 3e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_rows_have_no_loss(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(0, 4, dtype=dtype, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    loss = linear_cross_entropy(x, weight, none, weight_N=torch.zeros(0), classes=3)
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_without_gradients_nothing_but_the_loss_is_made() -> None:
    x, weight, target = problem(7, 5, 11)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss, reference(x, weight, target).detach())


def test_nan_reaches_the_loss_and_the_gradient() -> None:
    x, weight, target = problem(4, 3, 5)
    target[:] = 1
    with torch.no_grad():
        x[2, 0] = float("nan")
    loss = linear_cross_entropy(x, weight, target)
    loss.backward()
    assert loss.isnan()
    assert weight.grad is not None
    assert weight.grad.isnan().any()


def test_never_more_than_2_31_logits_at_once() -> None:
    from redline.planning.memory import head_chunk

    assert head_chunk(50304, 64 * 1024) * 50304 < 2**31
    assert head_chunk(1 << 40, 5) == 1


def test_a_gradient_in_the_logits_place_is_used_before_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, one buffer serves every chunk, first for logits and then for their gradient."""

    def overwriting(logits: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options.pop("fused")
        losses, gradient = in_place_softmax_loss.reference(logits, *rest, **options)
        assert gradient is not None
        return losses, logits.copy_(gradient)

    monkeypatch.setattr(cross_entropy, "softmax_loss", overwriting)
    monkeypatch.setattr(cross_entropy, "head_chunk", lambda *_: 7)
    x, weight, target = problem(30, 8, 50)
    linear_cross_entropy(x, weight, target, softcap=5.0).backward()
    expected_x, expected_weight, _ = problem(30, 8, 50)
    reference(expected_x, expected_weight, target, softcap=5.0).backward()
    torch.testing.assert_close(x.grad, expected_x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, expected_weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    """bf16 cannot represent loss scales and 1/tokens exactly: rounded, they would change all gradients alike."""
    ones = torch.ones(8, 16, dtype=dtype)
    factor = torch.tensor(1.0 / 3.0)
    scaled = cross_entropy.scaled(3.0 * ones, factor, dtype)
    assert scaled.dtype == dtype
    assert torch.equal(scaled, ones)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1000, 300])
def test_half_precision_on_a_gpu(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "head_chunk", lambda *_: chunk)
    x, weight, target = problem(1000, 64, 5000)
    with torch.no_grad():
        x *= 0.3
    got_x, got_w = (t.detach().cuda().requires_grad_() for t in (x, weight))
    linear_cross_entropy(got_x.to(dtype), got_w, target.cuda(), softcap=30.0).backward()
    reference(x, weight, target, softcap=30.0).backward()
    for got, expected in ((got_x.grad, x.grad), (got_w.grad, weight.grad)):
        assert got is not None
        assert expected is not None
        assert ((got.cpu() - expected).norm() / expected.norm()).item() < 2e-2
