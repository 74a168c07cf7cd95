"""The loss whose gradient is an fp8 operand, and the head whose matmuls are in fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.kernels.cross_entropy import IGNORE, linear_cross_entropy8, softmax_loss8
from redline.kernels.cross_entropy import reference_linear_cross_entropy as exact_loss
from redline.kernels.float8 import Scale

KERNELS = "cross_entropy"
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu")
FACTOR = 2.0**14
sizes = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def problem(n: int, vocab: int, device: str) -> tuple[torch.Tensor, torch.Tensor, Scale]:
    generator = torch.Generator().manual_seed(n * 1009 + vocab)
    logits = (3 * torch.randn(n, vocab, generator=generator)).bfloat16()
    target = torch.randint(0, vocab, (n,), generator=generator)
    target[torch.rand(n, generator=generator) < 0.2] = IGNORE
    factor = torch.tensor(FACTOR, device=device)
    return logits.to(device), target.to(device), Scale(factor, 1 / factor, None)


def exact(logits: torch.Tensor, target: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.double().requires_grad_()
    z = softcap * torch.tanh(x / softcap) if softcap else x
    losses = torch.nn.functional.cross_entropy(z, target, ignore_index=IGNORE, reduction="none")
    losses.sum().backward()
    assert x.grad is not None
    return losses.detach(), x.grad


@sizes
@given(n=st.integers(1, 40), vocab=st.integers(1, 300), softcap=st.sampled_from([None, 4.0]))
def test_any_size(kernels: Any, device: str, n: int, vocab: int, softcap: float | None) -> None:
    logits, target, scale = problem(n, vocab, device)
    expected, expected_gradient = exact(logits, target, softcap)
    losses, gradient = kernels.softmax_loss8(logits.clone(), target, scale, softcap=softcap)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient.row.dtype == torch.float8_e5m2
    assert torch.equal(gradient.row.view(torch.uint8).T, gradient.column.view(torch.uint8))
    actual = gradient.row.double() / FACTOR
    # e5m2 keeps two bits after the first, either of two neighbours; below 2⁻²⁸ its steps no longer shrink
    wanted = torch.arange(vocab, device=device) == target[:, None]
    torch.testing.assert_close(actual[~wanted], expected_gradient[~wanted], rtol=2**-2 + 1e-3, atol=2**-30)
    # one less than one is known to float32's last bits
    torch.testing.assert_close(actual[wanted], expected_gradient[wanted], rtol=2**-2 + 1e-3, atol=2**-20)


def test_what_many_rows_share_is_right_on_average(kernels: Any, device: str) -> None:
    """Rounded to nearest, a probability would be wrong by up to an eighth in each of them."""
    logits, _, scale = problem(1, 64, device)
    rows = logits.expand(1024, -1).contiguous()
    _, gradient = kernels.softmax_loss8(rows, torch.full((1024,), 3, device=device), scale)
    _, expected = exact(logits, torch.full((1,), 3, device=device), None)
    actual = gradient.row.double() / FACTOR
    torch.testing.assert_close(actual.mean(0), expected[0], rtol=0.004, atol=0.0)
    assert (actual.std(0) > 0.02 * expected[0].abs()).any()


def test_kernel_and_reference_use_the_same_dither(device: str) -> None:
    pytest.importorskip("triton", reason="the kernel needs triton")
    logits, target, scale = problem(150, 200, device)
    one, other = (
        form(logits.clone(), target, scale)[1].row for form in (softmax_loss8.triton, softmax_loss8.reference)
    )
    away = one.view(torch.uint8).int() - other.view(torch.uint8).int()
    assert away.abs().max() <= 1
    assert (away != 0).float().mean() < 0.001, "where the last bit of a float32 decides"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_make_their_row_nan(kernels: Any, device: str, value: float) -> None:
    logits, target, scale = problem(6, 50, device)
    target[2], target[3] = 7, IGNORE
    logits[2, 4] = logits[3, 4] = value
    losses, gradient = kernels.softmax_loss8(logits, target, scale)
    assert not losses[2].isfinite()
    assert gradient.row.float()[2].isnan().any()
    assert gradient.column.float()[:, 2].isnan().any()
    assert (gradient.row.float()[3] == 0).all(), "what is not scored says nothing"
    others = [0, 1, 4, 5]
    assert losses[others].isfinite().all()
    assert gradient.row.float()[others].isfinite().all()


def test_the_head_in_fp8_is_near_the_exact_one(device: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 96, generator=generator).bfloat16().to(device).requires_grad_()
    weight = (0.1 * torch.randn(160, 96, generator=generator)).to(device).requires_grad_()
    target = torch.randint(0, 160, (64,), generator=generator).to(device)
    target[::7] = IGNORE
    actual = linear_cross_entropy8(x, weight, target)
    own = torch.autograd.grad(actual / 64, (x, weight))
    float32 = x.detach().float().requires_grad_()
    expected = exact_loss(float32, weight, target)
    truth = torch.autograd.grad(expected / 64, (float32, weight))
    assert actual.item() == pytest.approx(expected.item(), rel=0.01)
    for gradient, true in zip(own, truth, strict=True):
        assert 1e-3 < float((gradient.float() - true).norm() / true.norm()) < 0.1
    assert not own[0][::7].any(), "what is not scored has no gradient"


def test_what_tokens_share_is_as_if_the_weight_were_exact(device: str) -> None:
    """Early in training all rows predict much the same; an error that they share would reach every layer."""
    generator = torch.Generator().manual_seed(6)
    x = (0.05 * torch.randn(512, 64, generator=generator)).bfloat16().to(device).requires_grad_()
    weight = (0.02 * torch.randn(256, 64, generator=generator)).to(device)
    target = torch.randint(0, 16, (512,), generator=generator).to(device)  # sixteen words are all there is
    (own,) = torch.autograd.grad(linear_cross_entropy8(x, weight, target), x)
    float32 = x.detach().float().requires_grad_()
    (true,) = torch.autograd.grad(exact_loss(float32, weight, target), float32)
    assert float((own.float().mean(0) - true.mean(0)).norm() / true.mean(0).norm()) < 0.01  # 0.025 without
