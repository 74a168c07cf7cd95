"""Muon's symmetric products against float64: any size and strides, exactly symmetric, deterministic."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels.muon import gram, square
from redline.planning.shapes import DecoderShape
from redline.planning.speed import SYMMETRIC_TILE, decoder_work
from redline.training import optim

KERNELS = "muon"
ROUNDING = 2**-8
sizes = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu", "multiplies_as_a_gpu")


@pytest.fixture
def fused() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels need triton")
    return importlib.import_module("redline.kernels.triton.muon")


def matrices(count: int, rows: int, columns: int, device: str) -> Tensor:
    chance = torch.Generator().manual_seed(count + 31 * rows + 997 * columns)
    return (torch.randn(count, rows, columns, generator=chance) / min(rows, columns) ** 0.5).bfloat16().to(device)


def symmetric(count: int, size: int, device: str) -> Tensor:
    half = matrices(count, size, size, device).triu()
    return half + half.triu(1).mT


def check(result: Tensor, product: Tensor, diagonal: float) -> None:
    """Compare within the rounding of the product, of the addend and of their sum."""
    exact = product.clone()
    exact.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    assert result.dtype == torch.bfloat16
    assert result.shape == exact.shape
    addend = abs(diagonal) * torch.eye(exact.shape[-1], device=exact.device)
    allowed = ROUNDING * (exact.abs() + product.abs() + addend) + 1e-4
    assert ((result.double() - exact).abs() <= allowed).all()


def check_gram(kernels: Any, x: Tensor, tall: bool, **how: Any) -> Tensor:
    result: Tensor = kernels.gram(x, tall=tall, diagonal=-2.5, **how)
    check(result, x.double().mT @ x.double() if tall else x.double() @ x.double().mT, -2.5)
    return result


def check_square(kernels: Any, g: Tensor, **how: Any) -> Tensor:
    result: Tensor = kernels.square(g, factor=0.52, diagonal=1.75, **how)
    check(result, 0.52 * g.double() @ g.double(), 1.75)
    return result


@sizes
@given(count=st.integers(1, 3), rows=st.integers(1, 150), columns=st.integers(1, 150), tall=st.booleans())
def test_gram_matrices_of_any_size(kernels: Any, device: str, count: int, rows: int, columns: int, tall: bool) -> None:
    check_gram(kernels, matrices(count, rows, columns, device), tall)


@sizes
@given(count=st.integers(1, 3), size=st.integers(1, 200))
def test_squares_of_any_size(kernels: Any, device: str, count: int, size: int) -> None:
    check_square(kernels, symmetric(count, size, device))


@pytest.mark.parametrize(("rows", "columns", "tall"), [(256, 1024, False), (2688, 128, True), (129, 2688, False)])
def test_the_depths_of_real_models(kernels: Any, device: str, rows: int, columns: int, tall: bool) -> None:
    check_gram(kernels, matrices(1, rows, columns, device), tall)


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("size", [145, 96, 16])
def test_every_tile_is_computed_and_mirrored(fused: Any, device: str, span: int, group: int, size: int) -> None:
    tile = fused.Tile(side=16, depth=32, warps=4, stages=2, span=span, group=group)
    result = check_gram(fused, matrices(1, size, 32, device), False, tile=tile)
    assert torch.equal(result, result.mT)


@pytest.mark.parametrize("span", [1, 2])
def test_batches_of_tiles(fused: Any, device: str, span: int) -> None:
    tile = fused.Tile(side=32, depth=32, warps=4, stages=2, span=span)
    check_gram(fused, matrices(3, 64, 96, device), True, tile=tile)
    check_square(fused, symmetric(3, 70, device), tile=tile)


@pytest.mark.parametrize("size", [300, 256, 17])
def test_results_are_exactly_symmetric_and_always_the_same(fused: Any, device: str, size: int) -> None:
    x = matrices(2, size, 200, device)
    results = [fused.gram(x, tall=False, diagonal=0.3) for _ in range(2)]
    results += [fused.square(result, factor=1.5, diagonal=-0.7) for result in results]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert all(torch.equal(result, result.mT) for result in results)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_matrix(kernels: Any, device: str, value: float) -> None:
    x = matrices(3, 40, 70, device)
    x[1, 2, 3] = value
    for tall in (False, True):
        actual = kernels.gram(x, tall=tall, diagonal=1.0)
        assert actual.isfinite().all((1, 2)).tolist() == [True, False, True]
        assert not actual[1, 3 if tall else 2].isfinite().any()
        squares = kernels.square(actual, factor=1.0, diagonal=1.0)
        assert squares.isfinite().all((1, 2)).tolist() == [True, False, True]


def test_the_addend_joins_before_rounding(fused: Any, device: str) -> None:
    x = torch.tensor([[[1.0, 2**-5]]], device=device, dtype=torch.bfloat16)
    assert fused.gram(x, tall=False, diagonal=-1.0).item() == 2**-10
    assert fused.square(x[..., :1], factor=1 + 2**-10, diagonal=-1.0).item() == 2**-10


def test_operands_may_have_any_strides(kernels: Any, device: str) -> None:
    whole = matrices(4, 50, 72, device)
    part = whole[1:3, 3:40, 8:61]
    for tall in (False, True):
        plain = kernels.gram(part.contiguous(), tall=tall, diagonal=0.5)
        for other in (part, part.mT.contiguous().mT):
            torch.testing.assert_close(kernels.gram(other, tall=tall, diagonal=0.5), plain)


@pytest.mark.parametrize("shape", [(2, 40, 70), (2, 70, 40), (1, 150, 150)])
def test_orthogonalised_matrices_are_orthogonal(
    kernels: Any, device: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(optim, "gram", kernels.gram)
    monkeypatch.setattr(optim, "square", kernels.square)
    x = matrices(*shape, device)
    actual = optim.orthogonalize(x, x.float().square().sum((1, 2)))
    u, values, v = torch.linalg.svd(x.double(), full_matrices=False)
    assert torch.linalg.svdvals(actual.double()).sub(1)[values / values[:, :1] > 0.05].abs().max() < 0.2
    assert torch.nn.functional.cosine_similarity(actual.double().flatten(1), (u @ v).flatten(1)).min() > 0.98


def test_on_a_cpu_the_reference_is_used() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = matrices(2, 20, 30, "cpu").to(dtype)
        actual = gram(x, tall=False, diagonal=2.0)
        assert torch.equal(actual, gram.reference(x, tall=False, diagonal=2.0))
        squares = square(actual, factor=3.0, diagonal=1.0)
        assert torch.equal(squares, square.reference(actual, factor=3.0, diagonal=1.0))
        assert squares.dtype == dtype


def test_the_plan_counts_the_computed_tiles(fused: Any) -> None:
    assert (fused.TILE.side, fused.TILE.span) == (SYMMETRIC_TILE, 1)
    shape = DecoderShape(1, 1024, 16, 16, 64, 2560, 64, mlp="relu2")  # four square matrices and two of 1024×2560
    how: dict[str, Any] = {"checkpointing": "none", "bytes_per_value": 2, "optimizer": "muon", "ema": False}
    tile, made, whole = 2 * 128**3, 8 * 9 // 2, 8 * 8  # FLOPs of one tile by one; tiles of a Gram matrix
    square, wide = made * 8 + made * 8 + whole * 8, made * 20 + made * 8 + 8 * 20 * 8
    assert decoder_work(shape, 1024, **how).update_flops == 5 * tile * (4 * square + 2 * wide)
    assert decoder_work(shape, 1024, muon_steps=4, **how).update_flops == 4 * tile * (4 * square + 2 * wide)


def test_fewer_stages_where_shared_memory_is_small(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 101_376}))
    monkeypatch.setattr(fused, "driver", SimpleNamespace(active=card))
    fitting = fused._with_fewer_stages.__wrapped__
    stages = [fitting(fused.Tile(stages=4, span=span), torch.device("cuda", 0), 2).stages for span in (1, 2)]
    assert stages == [3, 2]
