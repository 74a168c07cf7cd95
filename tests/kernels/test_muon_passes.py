"""Muon's passes before and after the orthogonalisation, against float64, for matrices anywhere in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from redline.jobs.objective import ParamGroup
from redline.kernels.muon import descend_, nesterov_
from redline.recipe.schema import Train
from redline.training import optim

KERNELS = "muon"
references = SimpleNamespace(nesterov_=nesterov_.reference, descend_=descend_.reference)
BETA, RATE, DECAY = 0.9, 0.05, 0.02
sizes = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def scattered(count: int, rows: int, columns: int, device: str, chance: torch.Generator) -> list[Tensor]:
    """Return matrices that are parts of larger tensors, at addresses that need not be multiples of 16 bytes."""
    parents = [torch.randn(rows + i + 2, columns, generator=chance).to(device) for i in range(count)]
    return [tensor.narrow(0, i + 1, rows) for i, tensor in enumerate(parents)]


def chance_for(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(number * 31**i for i, number in enumerate(numbers)))


def gate(device: str, bad: float = 0.0) -> tuple[Tensor, Tensor]:
    return torch.tensor(4.0, device=device), torch.tensor(bad, device=device)


def check_nesterov(kernels: Any, device: str, count: int, rows: int, columns: int) -> None:
    chance = chance_for(count, rows, columns)
    gradients = scattered(count, rows, columns, device, chance)
    momentum = torch.randn(count, rows, columns, generator=chance).to(device)
    exact = torch.stack(gradients).double() / 4.0
    moved = BETA * momentum.double() + (1 - BETA) * exact
    ahead = BETA * moved + (1 - BETA) * exact
    kept = [gradient.clone() for gradient in gradients]
    total, squares = kernels.nesterov_(gradients, momentum, *gate(device), BETA)
    assert total.shape == momentum.shape
    torch.testing.assert_close(momentum.double(), moved, rtol=1e-5, atol=1e-6)
    slack = 2**-7 if total.dtype == torch.bfloat16 else 1e-5  # the interpreter rounds bf16 towards zero
    torch.testing.assert_close(total.double(), ahead, rtol=slack, atol=1e-6)
    torch.testing.assert_close(squares.double(), ahead.square().sum((1, 2)), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))


def check_descend(kernels: Any, device: str, shape: tuple[int, int, int], scaled: bool, cautious: bool) -> None:
    count, rows, columns = shape
    chance = chance_for(*shape)
    weights = scattered(count, rows, columns, device, chance)
    update = torch.randn(shape, generator=chance).to(device).bfloat16()
    scales = torch.rand(count, rows, generator=chance).to(device) + 0.5 if scaled else None
    before, change = torch.stack(weights).double(), update.double()
    kept = torch.where(before * change >= 0, 1 - DECAY, 1.0) if cautious else 1 - DECAY
    if scales is not None:
        change = scales.double()[..., None] * change
    kernels.descend_(weights, update, scales, gate(device)[1], rate=RATE, decay=DECAY, cautious=cautious)
    torch.testing.assert_close(torch.stack(weights).double(), before * kept - RATE * change, rtol=1e-5, atol=1e-6)


@sizes
@given(count=st.integers(1, 4), rows=st.integers(1, 60), columns=st.integers(1, 90))
def test_momentum_and_sum_of_any_size(kernels: Any, device: str, count: int, rows: int, columns: int) -> None:
    check_nesterov(kernels, device, count, rows, columns)


@sizes
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 90)),
    scaled=st.booleans(),
    cautious=st.booleans(),
)
def test_a_step_of_any_size(
    kernels: Any, device: str, shape: tuple[int, int, int], scaled: bool, cautious: bool
) -> None:
    check_descend(kernels, device, shape, scaled, cautious)


@pytest.mark.parametrize(("rows", "columns"), [(128, 1024), (1024, 96), (40, 2688), (33, 129)])
def test_the_widths_of_real_models(kernels: Any, device: str, rows: int, columns: int) -> None:
    check_nesterov(kernels, device, 3, rows, columns)
    for scaled in (True, False):
        check_descend(kernels, device, (3, rows, columns), scaled, not scaled)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_a_closed_gate_changes_nothing(kernels: Any, device: str, value: float) -> None:
    chance = chance_for(3)
    gradients, weights = ([t.contiguous() for t in scattered(2, 20, 30, device, chance)] for _ in range(2))
    gradients[1][3, 4] = value
    momentum, before = torch.ones(2, 20, 30, device=device), torch.stack(weights)
    total, _ = kernels.nesterov_(gradients, momentum, *gate(device, 1.0), BETA)
    kernels.descend_(weights, total, None, gate(device, 1.0)[1], rate=RATE, decay=DECAY, cautious=False)
    assert torch.equal(momentum, torch.ones_like(momentum))
    assert torch.equal(torch.stack(weights), before)


def test_nan_and_infinity_stay_in_their_matrix(kernels: Any, device: str) -> None:
    gradients = scattered(3, 8, 12, device, chance_for(5))
    gradients[1][2, 3] = float("nan")
    total, squares = kernels.nesterov_(gradients, torch.zeros(3, 8, 12, device=device), *gate(device), BETA)
    assert total.isnan().nonzero().tolist() == [[1, 2, 3]]
    assert squares.isnan().tolist() == [False, True, False]


def test_gradients_may_have_any_strides(kernels: Any, device: str) -> None:
    plain = [torch.randn(6, 9, generator=chance_for(7)).to(device) for _ in range(2)]
    turned = [gradient.mT.contiguous().mT for gradient in plain]
    results = [kernels.nesterov_(g, torch.zeros(2, 6, 9, device=device), *gate(device), BETA) for g in (plain, turned)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("casts_as_on_a_gpu")
@pytest.mark.parametrize("optimizer", ["muon", "normuon"])
def test_they_train_as_the_references_do(
    kernels: Any, device: str, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Train a merged parameter for several steps, one of them bad, all orthogonalised in bf16."""
    chance = chance_for(8)
    start, grads = torch.randn(20, 60, generator=chance), torch.randn(4, 20, 60, generator=chance)
    train = Train(lr=1e-3, optimizer=optimizer, cautious=True, weight_decay=0.5)
    ends = []
    for functions in (references, kernels):

        def rounded(*arguments: Any, nesterov_: Any = functions.nesterov_) -> tuple[Tensor, Tensor]:
            total, squares = nesterov_(*arguments)
            return total.bfloat16(), squares

        monkeypatch.setattr(optim, "nesterov_", rounded)
        monkeypatch.setattr(optim, "descend_", functions.descend_)
        weight = nn.Parameter(start.clone().to(device))
        ours = optim.Muon([ParamGroup("matrix", {"qkv": weight}, {"qkv": (12, 8)})], train)
        for step, grad in enumerate(grads):
            weight.grad = grad.clone().to(device)
            ours.step(1.0, gate(device, float(step == 2)), step)
        ends.append(weight.detach().cpu() - start)
    assert (ends[0] - ends[1]).norm() < 0.03 * ends[0].norm()
