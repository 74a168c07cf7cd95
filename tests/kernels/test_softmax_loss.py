"""The softmax loss and its gradient against float64, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.kernels import cross_entropy as module
from redline.kernels.cross_entropy import IGNORE, in_place_softmax_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOFTCAPS = [None, 4.0]
Loss = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
reference = in_place_softmax_loss.reference


def triton_loss(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    pytest.importorskip("triton", reason="the kernel needs triton")
    return in_place_softmax_loss.triton(*arguments, **options)


@pytest.fixture(params=[reference, triton_loss], ids=["torch", "triton"])
def loss(request: pytest.FixtureRequest) -> Loss:
    function: Loss = request.param
    return function


def problem(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.2] = IGNORE
    return logits.to(DEVICE), target.to(DEVICE)


def exact(
    logits: torch.Tensor,
    target: torch.Tensor,
    softcap: float | None,
    scale: float,
    weight: torch.Tensor | None = None,
    classes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.double().requires_grad_()
    z = x[:, :classes]
    z = softcap * torch.tanh(z / softcap) if softcap else z
    losses = torch.nn.functional.cross_entropy(z, target, ignore_index=IGNORE, reduction="none")
    losses = losses if weight is None else losses * weight
    (scale * losses.sum()).backward()
    assert x.grad is not None
    return losses.detach(), x.grad


def check(loss: Loss, rows: int, vocab: int, softcap: float | None, scale: float) -> None:
    logits, target = problem(rows, vocab)
    expected, expected_gradient = exact(logits, target, softcap, scale)
    losses, gradient = loss(logits.clone(), target, softcap=softcap, scale=scale)
    assert gradient is not None
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=3e-5, atol=1e-6 * scale)  # a sum of 50,304


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(1, 300),
    softcap=st.sampled_from(SOFTCAPS),
    scale=st.sampled_from([1.0, 1024.0]),
)
def test_any_size_equals_float64(rows: int, vocab: int, softcap: float | None, scale: float) -> None:
    check(triton_loss, rows, vocab, softcap, scale)
    check(reference, rows, vocab, softcap, scale)


@pytest.mark.parametrize("vocab", [8191, 8192, 8193, 20001, 50304])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_rows_of_several_blocks(loss: Loss, vocab: int, softcap: float | None) -> None:
    check(loss, 3, vocab, softcap, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_end(loss: Loss, dtype: torch.dtype) -> None:
    logits, target = problem(6, 777, dtype)
    expected, expected_gradient = exact(logits, target, None, 1.0)
    losses, gradient = loss(logits.clone(), target)
    assert gradient is not None
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)
    # the interpreter cuts bf16 off instead of rounding it
    error = torch.finfo(dtype).eps * (1.0 if loss is triton_loss and DEVICE == "cpu" else 0.55)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=error, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(2, 300),
    kept=st.floats(0.0, 1.0),
    softcap=st.sampled_from(SOFTCAPS),
    scale=st.sampled_from([1.0, 1024.0]),
    weighted=st.booleans(),
)
def test_weights_and_classes_equal_float64(
    rows: int, vocab: int, kept: float, softcap: float | None, scale: float, weighted: bool
) -> None:
    """Weights from none to a thousand, as of masks that hide little; columns behind the classes hold no numbers."""
    classes = max(1, round(kept * vocab))
    logits, target = problem(rows, vocab)
    target = torch.where(target == IGNORE, target, target % classes)
    weight = torch.tensor([0.0, 1000.0, 1.0, 3.7, 0.01], device=DEVICE)[:rows] if weighted else None
    expected, expected_gradient = exact(logits, target, softcap, scale, weight, classes)
    logits[:, classes:] = math.nan
    most = 1.0 if weight is None else max(1.0, float(weight.max()))
    for loss in (triton_loss, reference, functional):
        losses, gradient = loss(logits.clone(), target, softcap=softcap, scale=scale, weight_N=weight, classes=classes)
        assert gradient is not None
        assert gradient.shape == logits.shape
        assert not gradient[:, classes:].any()
        torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6 * most)
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6 * scale * most)


def functional(
    logits: torch.Tensor, target: torch.Tensor, *, softcap: float | None, scale: float, weight_N: Any, classes: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return module._functional_softmax_loss(logits, target, softcap, scale, weight_N, classes)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("classes", [8191, 8192, 8193, 8999])
def test_classes_end_in_any_block(loss: Loss, softcap: float | None, classes: int) -> None:
    logits, target = problem(3, 20001)
    target[:] = torch.tensor([5, classes - 1, IGNORE])
    expected, expected_gradient = exact(logits, target, softcap, 1.0, None, classes)
    losses, gradient = loss(logits.clone(), target, softcap=softcap, classes=classes)
    assert gradient is not None
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)
    silent, none = loss(logits.clone(), target, softcap=softcap, classes=classes, with_gradient=False)
    assert none is None
    assert torch.equal(silent, losses)


def test_weights_of_one_and_all_classes_change_no_bit(loss: Loss) -> None:
    for softcap in SOFTCAPS:
        logits, target = problem(6, 777)
        plain = loss(logits.clone(), target, softcap=softcap, scale=1024.0)
        ones = torch.ones(6, device=DEVICE)
        for more in ({"weight_N": ones}, {"classes": 777}, {"weight_N": ones, "classes": 777}):
            for got, expected in zip(
                loss(logits.clone(), target, softcap=softcap, scale=1024.0, **more), plain, strict=True
            ):
                assert torch.equal(got, expected)


def test_an_ignored_row_has_no_gradient_whatever_it_weighs(loss: Loss) -> None:
    logits, target = problem(2, 50)
    target[0], target[1] = IGNORE, 3
    weight = torch.tensor([math.inf, 2.0], device=DEVICE)
    losses, gradient = loss(logits, target, weight_N=weight)
    assert gradient is not None
    assert losses[0] == 0
    assert not gradient[0].any()


def test_a_target_beyond_the_classes_gives_nan() -> None:
    logits, target = problem(3, 40)
    target[:] = torch.tensor([2, 30, 39])
    losses, _ = triton_loss(logits.clone(), target, classes=30)
    assert losses.isnan().tolist() == [False, True, True]
    if DEVICE == "cpu":  # on a GPU it ends the process
        with pytest.raises((IndexError, RuntimeError)):
            reference(logits, target, classes=30)


def test_the_gradient_takes_the_logits_place() -> None:
    logits, target = problem(4, 50)
    _, gradient = triton_loss(logits, target)
    assert gradient is logits


def test_without_a_gradient_the_logits_stay(loss: Loss) -> None:
    logits, target = problem(4, 50)
    before = logits.clone()
    losses, gradient = loss(logits, target, with_gradient=False)
    assert gradient is None
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses.double(), exact(logits, target, None, 1.0)[0], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 8500])
def test_a_bad_logit_spoils_its_row_and_no_other(loss: Loss, bad: float, column: int) -> None:
    logits, target = problem(3, 9000)
    target[:] = 5
    logits[1, column] = bad
    losses, gradient = loss(logits, target)
    assert gradient is not None
    assert losses.isfinite().tolist() == [True, False, True]
    assert gradient[1].isnan().any()
    assert gradient[::2].isfinite().all()


def test_an_ignored_row_has_no_gradient_whatever_it_holds(loss: Loss) -> None:
    logits, target = problem(2, 9000)
    target[0], target[1] = IGNORE, 3
    logits[0] = math.nan
    losses, gradient = loss(logits, target)
    assert gradient is not None
    assert losses[0] == 0
    assert not gradient[0].any()
    assert losses[1].isfinite()


def test_entries_that_cannot_be_chosen_have_no_share(loss: Loss) -> None:
    """Logits of −inf, even in the whole first block, whose maximum must not be subtracted."""
    logits, target = problem(1, 9000)
    target[0] = 8999
    logits[0, :8500] = -math.inf
    expected, expected_gradient = exact(logits, target, None, 1.0)
    losses, gradient = loss(logits.clone(), target)
    assert gradient is not None
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


def test_a_target_outside_the_vocabulary_is_a_nan() -> None:
    logits, target = problem(3, 40)
    target[:] = torch.tensor([2, 40, -7])
    losses, _ = triton_loss(logits, target)
    assert losses.isnan().tolist() == [False, True, True]


def test_logits_may_be_a_part_of_a_larger_buffer(loss: Loss) -> None:
    logits, target = problem(5, 64)
    buffer = torch.full((5, 80), 7.0, device=DEVICE)
    buffer[:, :64] = logits
    losses, _ = loss(buffer[:, :64], target)
    torch.testing.assert_close(losses.double(), exact(logits, target, None, 1.0)[0], rtol=1e-6, atol=2e-6)
    assert (buffer[:, 64:] == 7.0).all()


def test_on_a_cpu_it_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_softmax_loss, "reference", lambda *_, **__: ("torch", None))
    assert module.softmax_loss(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)) == ("torch", None)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_form_for_the_compiler_is_the_same(softcap: float | None) -> None:
    logits, target = problem(9, 33)
    target[3] = module.IGNORE
    losses, gradient = module._functional_softmax_loss(logits, target, softcap, 2.0)
    expected, expected_gradient = reference(logits.clone(), target, softcap=softcap, scale=2.0)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("vocab", [50304, 50257, 131072])
def test_a_real_chunk_on_a_gpu(vocab: int) -> None:
    logits, target = problem(257, vocab, torch.bfloat16)
    expected, expected_gradient = exact(logits, target, 30.0, 1.0)
    losses, gradient = module.softmax_loss(logits.clone(), target, softcap=30.0, fused=True)
    assert gradient is not None
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=5e-3, atol=1e-6)
