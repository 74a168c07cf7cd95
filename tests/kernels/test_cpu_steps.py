"""Operations that plain layers compute by hand on a CPU: values and gradients are those of autograd in float64."""

from __future__ import annotations

import pytest
import torch

from redline.kernels.attention import by_matmuls
from redline.kernels.cross_entropy import IGNORE, linear_cross_entropy, softmax_loss
from redline.models.decoder import RMSNorm, rms_norm, rotary_table, rotate, split_norm_rotate
from redline.training.optim import orthogonalize

PRECISIONS = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def check(found: list[torch.Tensor], exact: list[torch.Tensor], tolerance: float) -> None:
    for one, reference in zip(found, exact, strict=True):
        assert one.shape == reference.shape
        assert relative(one, reference) < tolerance


def leaf(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, weight, grad = leaf(3, 5, 48, seed=1, dtype=dtype), leaf(48, seed=2, dtype=torch.float32), torch.randn(3, 5, 48)
    before = x.detach().clone()
    y = rms_norm(x, weight, 1e-5)
    found = [y, *torch.autograd.grad(y, (x, weight), grad.to(dtype))]
    wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    reference = exact_norm(wide, wide_weight, 1e-5)
    exact = [reference, *torch.autograd.grad(reference, (wide, wide_weight), grad.to(dtype).double())]
    check(found, exact, tolerance)
    assert torch.equal(x, before)


def test_the_layer_uses_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RMSNorm(8, 1e-5)
    torch.nn.init.ones_(layer.weight)
    monkeypatch.setattr("redline.models.decoder.rms_norm", lambda *_: "by hand")
    assert layer(torch.randn(2, 8)) == "by hand"


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_split_norm_rotate(dtype: torch.dtype, tolerance: float, kv_heads: int) -> None:
    B, T, H, K, eps = 2, 7, 4, 12, 1e-5
    cos, sin = rotary_table(T, K, 1e4)
    qkv = leaf(B, T, H + 2 * kv_heads, K, seed=3, dtype=dtype)
    weights = [leaf(K, seed=seed, dtype=torch.float32) for seed in (4, 5)]
    before = qkv.detach().clone()
    outputs = split_norm_rotate(qkv, *weights, cos, sin, H, eps)
    grads = [torch.randn(out.shape) for out in outputs]
    found = [*outputs, *torch.autograd.grad(outputs, (qkv, *weights), [g.to(dtype) for g in grads])]
    wide, *wide_weights = (t.detach().double().requires_grad_() for t in (qkv, *weights))
    q, k, v = (x.transpose(1, 2) for x in wide.split((H, kv_heads, kv_heads), 2))

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a, b = exact_norm(x, weight, eps).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    references = turned(q, wide_weights[0]), turned(k, wide_weights[1]), v
    exact_grads = torch.autograd.grad(references, (wide, *wide_weights), [g.to(dtype).double() for g in grads])
    check(found, [*references, *exact_grads], tolerance)
    assert torch.equal(qkv, before)
    assert all(out.is_contiguous() for out in outputs)
    torch.testing.assert_close(rotate(v, cos, sin).shape, v.shape)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_causal_attention_by_matmuls(dtype: torch.dtype, tolerance: float, length: int) -> None:
    q, k, v = (leaf(2, 3, length, 16, seed=seed, dtype=dtype) for seed in (6, 7, 8))
    grad = torch.randn(2, 3, length, 16)
    out = by_matmuls(q, k, v, None, causal=True)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    reference = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    exact = [reference, *torch.autograd.grad(reference, wide, grad.to(dtype).double())]
    if length == 1:  # one key has all the weight, so that queries and keys have no gradient
        found, exact = [found[0], found[3]], [exact[0], exact[3]]
    check(found, exact, tolerance)


@pytest.mark.parametrize("rows", [1, 128, 300])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [None, 40])
def test_the_loss_in_parts_is_the_loss(rows: int, weighted: bool, classes: int | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = 5 * torch.randn(rows, 64, generator=generator)
    target = torch.randint(0, 40, (rows,), generator=generator)
    target[rows // 2] = IGNORE
    logits[rows // 2] = float("nan")
    weight = torch.rand(rows, generator=generator) if weighted else None
    losses, gradient = softmax_loss(logits.clone(), target, weight_N=weight, classes=classes, scale=2.0)
    wide = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide[:, :classes], target, reduction="none", ignore_index=IGNORE)
    exact = exact.nan_to_num() if weight is None else exact.nan_to_num() * weight.masked_fill(target == IGNORE, 0)
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    assert gradient is not None
    torch.testing.assert_close(gradient.double(), 2.0 * slope.nan_to_num(), rtol=1e-5, atol=1e-6)


def test_a_target_whose_probability_underflows_has_its_loss() -> None:
    logits = torch.tensor([[0.0, 200.0, 0.0]])
    losses, _ = softmax_loss(logits.clone(), torch.tensor([0]))
    torch.testing.assert_close(losses, torch.tensor([200.0]))


@pytest.mark.parametrize("shape", [(2, 48, 48), (2, 96, 32), (2, 32, 96)])
def test_orthogonalisation_in_bf16_is_that_in_float32(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    squares = x.square().sum((1, 2))
    wide, narrow = orthogonalize(x, squares), orthogonalize(x.bfloat16(), squares)
    assert relative(narrow, wide.double()) < 0.1  # small singular values, which the steps enlarge, are rounded most


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    """A run may be resumed with another number of threads, for example beside another program."""
    x, weight = leaf(96, 64, seed=1, dtype=torch.bfloat16), leaf(256, 64, seed=2, dtype=torch.float32)
    target = torch.arange(96) % 256
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            normed = rms_norm(x, torch.ones(64), 1e-5)
            loss = linear_cross_entropy(normed, weight, target)
            matrices = [t.view(-1, 32, 64).float() for t in (x.detach(), weight.detach())]
            updates = [orthogonalize(m, m.square().sum((1, 2))) for m in matrices]
            found.append([loss, *torch.autograd.grad(loss, (x, weight)), *updates])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
