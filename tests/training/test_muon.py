"""Muon and NorMuon against their formulas, and orthogonalisation against the SVD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from redline.jobs.objective import ParamGroup, role_groups
from redline.kernels.attention import Attention, MaskSpec
from redline.models.decoder import Decoder
from redline.planning.memory import moment_bytes
from redline.planning.shapes import DecoderShape
from redline.planning.speed import _hidden_matrices, decoder_work
from redline.recipe.schema import Train
from redline.training.optim import (
    NORM_MARGIN,
    POLAR_EXPRESS,
    SMALLEST_SINGULAR_VALUE,
    Muon,
    Optimizer,
    momentum_at,
    orthogonalize,
)

GOOD, BAD, ONE = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0)
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
SHAPE = DecoderShape(2, 32, 4, 2, 8, 48, 64)


def options(**changes: Any) -> Train:
    return Train(lr=3e-3, **{"weight_decay": 0.1, "optimizer": "muon", **changes})


def one_matrix(weight: nn.Parameter, **changes: Any) -> Muon:
    return Muon([ParamGroup("matrix", {"w": weight}, {"w": (weight.shape[0],)})], options(**changes))


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    return orthogonalize(matrices, matrices.float().square().sum((-2, -1)), POLAR_EXPRESS[steps])


def keller_jordan(x: Tensor) -> Tensor:
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for a, b, c in KELLER_JORDAN:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# --- orthogonalisation


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return the best odd quintic approximation of 1 on [low, high], by the Remez exchange."""
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(100):
        x = np.array([low, *inner, high])
        a, b, c, _ = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


@pytest.mark.parametrize(("count", "ends_above"), [(3, 0.72), (4, 0.79), (5, 0.87)])
def test_the_coefficients_are_polar_express(count: int, ends_above: float) -> None:
    low, high, powers = SMALLEST_SINGULAR_VALUE[count], 1.0, np.array([1, 3, 5])
    for number, coefficients in enumerate(POLAR_EXPRESS[count]):
        quintic = best_quintic(max(low, 0.0241 * high), high)
        ends = [(quintic * end**powers).sum() for end in (low, high)]
        if low < 0.0241 * high:
            quintic, ends = quintic * 2 / sum(ends), [2 * end / sum(ends) for end in ends]
        low, high = ends[0], 2 - ends[0]
        shrunk = quintic / (NORM_MARGIN if number < count - 1 else 1.0) ** powers
        np.testing.assert_allclose(coefficients, shrunk, rtol=1e-6)
    assert len(POLAR_EXPRESS[count]) == count
    assert low > ends_above, "what began as the smallest that is reached"


@pytest.mark.parametrize(("count", "off"), [(3, 0.30), (4, 0.23), (5, 0.15)])
def test_the_smallest_singular_value_ends_near_one(count: int, off: float) -> None:
    """Checks singular values from 1 down to SMALLEST_SINGULAR_VALUE through the actual matmuls."""
    chance = torch.Generator().manual_seed(count)
    u, v = (torch.linalg.qr(torch.randn(1, 64, 64, generator=chance)).Q for _ in range(2))
    x = u * torch.logspace(0, np.log10(SMALLEST_SINGULAR_VALUE[count] * NORM_MARGIN), 64) @ v

    def largest_error(quintics: Any) -> float:
        return float((torch.linalg.svdvals(orthogonalize(x, torch.ones(1), quintics)) - 1).abs().max())

    assert largest_error(POLAR_EXPRESS[count]) < off
    assert largest_error(POLAR_EXPRESS[count][:-1]) > 2 * off


def random(m: int, n: int, chance: torch.Generator) -> Tensor:
    return torch.randn(3, m, n, generator=chance)


def ill_conditioned(m: int, n: int, chance: torch.Generator) -> Tensor:
    u, _, v = torch.linalg.svd(random(m, n, chance), full_matrices=False)
    return u * torch.logspace(0, -3, m) @ v


def low_rank_and_noise(m: int, n: int, chance: torch.Generator) -> Tensor:
    return torch.randn(3, m, 6, generator=chance) @ torch.randn(3, 6, n, generator=chance) + 0.1 * random(m, n, chance)


@pytest.mark.parametrize("kind", [random, ill_conditioned, low_rank_and_noise])
@pytest.mark.parametrize(("m", "n"), [(96, 96), (96, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_end_closer_to_one_than_keller_jordans(
    kind: Callable[..., Tensor], m: int, n: int, dtype: torch.dtype
) -> None:
    matrices = kind(m, n, torch.Generator().manual_seed(m + n)).to(dtype)
    off = [
        (torch.linalg.svdvals(x.float()) - 1).square().mean().sqrt()
        for x in (orthogonal(matrices), keller_jordan(matrices))
    ]
    assert off[0] < 0.75 * off[1]


@pytest.mark.parametrize(
    "shape", [(8, 8), (16, 64), (64, 16), (1, 32), (32, 1), (128, 48), (96, 100), (256, 256), (7, 300)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_end_near_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(sum(shape))
    for size in (1e-8, 1.0, 1e4):
        matrices = (torch.randn(3, *shape, generator=chance) * size).to(dtype)
        values = torch.linalg.svdvals(orthogonal(matrices).float())
        assert values.max() <= 1.15
        assert (values > 0.85).float().mean() > 0.9
        if shape[0] != shape[1]:  # a square random matrix may be almost singular
            assert values.min() >= 0.85


def test_singular_vectors_stay() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonal(matrix[None])[0] * (u @ v)).sum() / 12 > 0.85
    assert orthogonal(torch.zeros(1, 4, 6)).abs().max() == 0


def test_a_batch_equals_one_by_one() -> None:
    matrices = torch.randn(5, 24, 16, generator=torch.Generator().manual_seed(2))
    single = torch.stack([orthogonal(m[None])[0] for m in matrices])
    torch.testing.assert_close(orthogonal(matrices), single, rtol=1e-4, atol=1e-5)


# --- the update


@pytest.mark.parametrize("optimizer", ["muon", "normuon"])
def test_merged_matrices_are_updated_separately(optimizer: str) -> None:
    chance = torch.Generator().manual_seed(4)
    rows = (12, 4, 4)
    whole = nn.Parameter(torch.randn(sum(rows), 10, generator=chance))
    parts = [nn.Parameter(p.clone()) for p in whole.detach().split(rows)]
    merged = Muon([ParamGroup("matrix", {"qkv": whole}, {"qkv": rows})], options(optimizer=optimizer))
    named = {str(i): p for i, p in enumerate(parts)}
    apart = Muon(
        [ParamGroup("matrix", {n: p}, {n: (p.shape[0],)}) for n, p in named.items()], options(optimizer=optimizer)
    )
    for step in range(4):
        whole.grad = torch.randn(sum(rows), 10, generator=chance)
        for part, grad in zip(parts, whole.grad.split(rows), strict=True):
            part.grad = grad.clone()
        merged.step(1.0, (ONE, GOOD), step)
        apart.step(1.0, (ONE, GOOD), step)
        torch.testing.assert_close(whole.detach(), torch.cat([part.detach() for part in parts]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["muon", "normuon"])
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("steps", [4, 5])
def test_muon_follows_its_formula(optimizer: str, cautious: bool, steps: int) -> None:
    chance = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn(6, 3, generator=chance))
    keys = {"muon_momentum": 0.9, "muon_lr": 0.1, "muon_beta2": 0.8, "muon_momentum_warmup": 2}
    muon = one_matrix(weight, optimizer=optimizer, cautious=cautious, muon_steps=steps, **keys)
    expected, momentum, second = weight.detach().clone(), torch.zeros(6, 3), torch.zeros(6, 1)
    for step in range(4):
        grad = torch.randn(6, 3, generator=chance)
        weight.grad = 4 * grad
        muon.step(0.5, (torch.tensor(4.0), GOOD), step)
        beta = (0.85, 0.875, 0.9, 0.9)[step]
        momentum = beta * momentum + (1 - beta) * grad
        update = orthogonal(((1 - beta) * grad + beta * momentum)[None], steps)[0]
        decays = (update * expected > 0).float() if cautious else 1.0
        if optimizer == "normuon":
            second = 0.8 * second + 0.2 * update.square().mean(1, keepdim=True)
            evened = update / second.sqrt()
            update = evened * update.norm() / evened.norm()
        expected = expected - 0.05 * 0.1 * decays * expected - 0.05 * 2**0.5 * update
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_normuon_evens_out_rows_and_keeps_the_norm() -> None:
    """A matrix of low rank has rows of all lengths after orthogonalisation."""
    chance = torch.Generator().manual_seed(9)
    steps = {}
    for optimizer in ("muon", "normuon"):
        weight = nn.Parameter(torch.zeros(24, 24))
        grad = torch.randn(24, 4, generator=chance.manual_seed(9)) @ torch.randn(4, 24, generator=chance)
        weight.grad = grad * torch.logspace(0, -2, 24)[:, None]
        one_matrix(weight, optimizer=optimizer).step(1.0, (ONE, GOOD), 0)
        steps[optimizer] = weight.detach()
    assert steps["normuon"].norm() == pytest.approx(steps["muon"].norm().item(), rel=1e-4)
    spread = {name: step.norm(dim=1).std() / step.norm(dim=1).mean() for name, step in steps.items()}
    assert spread["normuon"] < 1e-3 < 0.5 < spread["muon"]


@pytest.mark.parametrize("optimizer", ["muon", "normuon"])
def test_without_a_gradient_nothing_but_decay_happens(optimizer: str) -> None:
    """With zero-initialised weights, the weights before them have no gradient in the first step."""
    weight = nn.Parameter(torch.ones(5, 7))
    muon = one_matrix(weight, optimizer=optimizer, muon_lr=0.5)
    weight.grad = torch.zeros(5, 7)
    muon.step(1.0, (ONE, GOOD), 0)
    torch.testing.assert_close(weight.detach(), torch.full((5, 7), 1 - 0.5 * 0.1))
    weight.grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    muon.step(1.0, (ONE, GOOD), 1)
    assert weight.isfinite().all()


def test_momentum_rises_linearly() -> None:
    assert [momentum_at(step, 0.95, 4) for step in range(6)] == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95])
    assert momentum_at(0, 0.95, 0) == 0.95


# --- within a model


def decoder(**changes: Any) -> Decoder:
    return Decoder(SHAPE, attention=Attention("dense", MaskSpec(), "cpu"), **changes)


def test_muon_updates_only_hidden_matrices() -> None:
    model = decoder()
    ours = Optimizer(role_groups(model), options())
    assert ours.muon is not None
    assert ours.adam is not None
    hidden = {name.split(".momentum")[0] for name in ours.muon.tensors()}
    assert hidden == {f"blocks.{n}" for n, p in model.blocks.named_parameters() if p.dim() == 2}
    rest = {name.removesuffix(".exp_avg") for name in ours.adam.tensors() if name.endswith(".exp_avg")}
    assert hidden | rest == {name for name, _ in model.named_parameters()}
    assert Optimizer(role_groups(model), options(optimizer="adamw")).muon is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_the_plan_counts_the_state(optimizer: str) -> None:
    tensors = Optimizer(role_groups(decoder()), options(optimizer=optimizer)).tensors()
    counted = sum(4 * tensor.numel() for name, tensor in tensors.items() if not name.endswith(".step"))
    assert counted == moment_bytes(SHAPE, optimizer)


def test_the_plan_counts_the_matrices_of_a_block() -> None:
    muon = Optimizer(role_groups(decoder()), options()).muon
    assert muon is not None
    found = [tuple(shape) for shape, batch in muon.batches.items() for _ in batch]
    assert sorted(found) == sorted(_hidden_matrices(SHAPE) * SHAPE.layers)
    assert sum(m * n for m, n in _hidden_matrices(SHAPE)) == SHAPE.layer_matmul_parameters


def test_the_plan_counts_the_bytes_of_an_update() -> None:
    def update(optimizer: str, **more: int) -> float:
        how = {"checkpointing": "none", "bytes_per_value": 2, "optimizer": optimizer, "ema": False, **more}
        return decoder_work(shape, 1024, **how).update  # type: ignore[arg-type]

    shape = DecoderShape(1, 64, 1, 1, 64, 64, 64, mlp="relu2")  # square matrices
    hidden = shape.layer_matmul_parameters
    assert update("muon") == 32 * (shape.parameters - hidden) + 102 * hidden
    assert update("muon") - update("muon", muon_steps=4) == 14 * hidden
    assert update("normuon") - update("muon") == 2 * hidden
    assert update("adamw") == 32 * shape.parameters


def test_zero_initialisation_changes_nothing_else() -> None:
    plain, zero = decoder(), decoder()
    plain.initialise(torch.Generator().manual_seed(1))
    zero.initialise(torch.Generator().manual_seed(1), "zero")
    adds = 0
    for (name, a), (_, b) in zip(plain.named_parameters(), zero.named_parameters(), strict=True):
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            adds += 1
            assert a.abs().max() > 0
            assert b.abs().max() == 0
        else:
            assert torch.equal(a, b)
    assert adds == 2 * SHAPE.layers
