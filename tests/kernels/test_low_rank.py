"""The low-rank matmuls with dropout, against float64; the dropout mask is fair and the same on every device."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels import low_rank
from redline.kernels.low_rank import Dropout, keep_mask, keep_probability

KERNELS = "low_rank"
EIGHT = torch.float8_e4m3fn
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SEED = 0x2B5C_9E31_0F4A_7D63
sizes = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**64 - 1)
drops = st.one_of(st.none(), st.builds(Dropout, st.floats(0, 0.95), seeds))
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu", "multiplies_as_a_gpu")


@pytest.fixture
def fused() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels need triton")
    return importlib.import_module("redline.kernels.triton.low_rank")


def problem(n: int, width: int, rank: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, A and the gradient of the product. If x is in fp8, the other two are in bf16."""
    chance = torch.Generator().manual_seed(n + 31 * width + 997 * rank)
    shapes = ((n, width), (rank, width), (n, rank))
    x, a, grad = (torch.randn(*shape, generator=chance).to(device) for shape in shapes)
    other_dtype = torch.bfloat16 if dtype == EIGHT else dtype
    return x.to(dtype), a.to(other_dtype), grad.to(other_dtype)


def check(kernels: Any, x: Tensor, a: Tensor, grad: Tensor, dropout: Dropout | None, unscale: Tensor | None) -> None:
    """Compare the product and both gradients, within one rounding of the result plus the error of a float32 sum."""
    mask = torch.ones(x.shape, device=x.device) if dropout is None else keep_mask(*x.shape, dropout, x.device)
    factor = 1.0 if unscale is None else unscale.double()
    passed, wide_a, wide_grad = x.double() * mask * factor, a.double(), grad.double()
    before = x.clone()

    narrowed = kernels.project_down(x, a, dropout, unscale)
    assert narrowed.dtype == (torch.bfloat16 if x.dtype == EIGHT else x.dtype)
    within(narrowed, passed @ wide_a.T, passed.abs() @ wide_a.abs().T)

    of_a = kernels.project_down_weight_gradient(grad, x, dropout, unscale)
    assert of_a.dtype == torch.float32
    within(of_a, wide_grad.T @ passed, wide_grad.abs().T @ passed.abs())

    of_x, terms = wide_grad @ wide_a * mask, wide_grad.abs() @ wide_a.abs()
    spread = kernels.project_down_input_gradient(grad, a, dropout)
    assert spread.dtype == grad.dtype
    within(spread, of_x, terms)
    out = torch.ones(x.shape, device=x.device, dtype=grad.dtype)
    assert kernels.project_down_input_gradient(grad, a, dropout, out) is out
    within(out, 1.0 + of_x, 1.0 + terms)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))


def within(found: Tensor, exact: Tensor, terms: Tensor) -> None:
    assert found.shape == exact.shape
    allowed = ROUNDING[found.dtype] * exact.abs() + 2e-6 * terms + 1e-7
    assert ((found.double() - exact).abs() <= allowed).all()


@sizes
@given(n=st.integers(1, 150), width=st.integers(1, 300), rank=st.integers(1, 40), dropout=drops)
def test_any_size(kernels: Any, device: str, n: int, width: int, rank: int, dropout: Dropout | None) -> None:
    check(kernels, *problem(n, width, rank, device, torch.float32), dropout, None)


@pytest.mark.parametrize("dropout", [None, Dropout(0.1, SEED)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, EIGHT])
@pytest.mark.parametrize(("n", "width", "rank"), [(130, 256, 16), (65, 301, 48), (3, 7, 5)])
def test_half_precision_and_fp8(
    kernels: Any, device: str, n: int, width: int, rank: int, dtype: torch.dtype, dropout: Dropout | None
) -> None:
    unscale = torch.tensor(0.37, device=device) if dtype == EIGHT else None
    check(kernels, *problem(n, width, rank, device, dtype), dropout, unscale)


@pytest.mark.parametrize("rank", [1, 8, 64, 100, 129, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank(kernels: Any, device: str, rank: int, dtype: torch.dtype) -> None:
    check(kernels, *problem(70, 130, rank, device, dtype), Dropout(0.5, SEED), None)


@pytest.mark.parametrize("processors", [2, 40])
@pytest.mark.parametrize(("n", "width"), [(70, 600), (500, 70), (64, 128)])
def test_sums_of_several_programs(
    fused: Any, device: str, monkeypatch: pytest.MonkeyPatch, n: int, width: int, processors: int
) -> None:
    monkeypatch.setattr(fused, "sm_count", lambda device: processors)
    x, a, grad = problem(n, width, 9, device, torch.bfloat16)
    dropout, unscale = Dropout(0.3, SEED), torch.tensor(2.0, device=device)
    check(fused, x, a, grad, dropout, unscale)
    assert torch.equal(*(fused.project_down(x, a, dropout) for _ in range(2)))
    assert torch.equal(*(fused.project_down_weight_gradient(grad, x, dropout) for _ in range(2)))


def test_empty_inputs(kernels: Any, device: str) -> None:
    x, a, grad = problem(0, 20, 4, device, torch.float32)
    assert kernels.project_down(x, a, Dropout(0.5, 1)).shape == (0, 4)
    assert kernels.project_down_weight_gradient(grad, x, Dropout(0.5, 1)).eq(0).all()
    assert kernels.project_down_input_gradient(grad, a, Dropout(0.5, 1)).shape == (0, 20)


def test_no_write_out_of_bounds(fused: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Tensor, int]] = []

    def with_room(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        buffer = torch.full((count + 8192,), 7.0, device=device, dtype=dtype)
        made.append((buffer, count))
        return buffer[:count].view(shape)

    x, a, grad = problem(67, 133, 5, device, torch.float32)
    monkeypatch.setattr(fused.torch, "empty", with_room)
    for work in (
        lambda: fused.project_down(x, a, None),
        lambda: fused.project_down_weight_gradient(grad, x, None),
        lambda: fused.project_down_input_gradient(grad, a, None),
    ):
        work()
        assert all(bool((buffer[count:] == 7.0).all()) for buffer, count in made)
    assert len(made) == 3


@pytest.mark.parametrize("dtype", [torch.float32, EIGHT])
def test_operands_may_have_any_strides(kernels: Any, device: str, dtype: torch.dtype) -> None:
    x, a, grad = problem(80, 200, 20, device, dtype)
    dropout = Dropout(0.4, SEED)
    part_x, part_a, part_grad = x[3:70, 8:143], a[2:19, 8:143], grad[3:70, 2:19]
    results = [
        (
            kernels.project_down(one_x, one_a, dropout),
            kernels.project_down_weight_gradient(one_grad, one_x, dropout),
            kernels.project_down_input_gradient(one_grad, one_a, dropout),
        )
        for one_x, one_a, one_grad in (
            (part_x, part_a, part_grad),
            (part_x.contiguous(), part_a.contiguous(), part_grad.contiguous()),
            (part_x.T.contiguous().T, part_a.T.contiguous().T, part_grad.T.contiguous().T),
        )
    ]
    for other in results[1:]:
        assert all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(results[0], other, strict=True))
    buffer = torch.full((80, 200), 7.0, device=device, dtype=grad.dtype)
    kernels.project_down_input_gradient(part_grad, part_a, dropout, buffer[3:70, 8:143])
    torch.testing.assert_close(buffer[3:70, 8:143].float(), 7.0 + results[0][2].float(), rtol=2**-8, atol=2**-5)
    buffer[3:70, 8:143] = 7.0
    assert bool((buffer == 7.0).all())


def test_the_sum_is_rounded_once(kernels: Any, device: str) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.bfloat16)
    out = torch.full((1, 1), 2**-9 + 2**-16, device=device)  # a float32 gradient is added to as it is
    assert kernels.project_down_input_gradient(one, one, None, out).item() == 1 + 2**-9 + 2**-16
    buffer = torch.full((1, 2), -1.0, device=device, dtype=torch.bfloat16)
    tiny = torch.tensor([[1.0, 2**-9]], device=device, dtype=torch.bfloat16)
    assert (
        kernels.project_down_input_gradient(tiny, torch.ones(2, 2, device=device, dtype=torch.bfloat16), None, buffer)
        .eq(2**-9)
        .all()
    )


def test_all_codes_of_fp8(kernels: Any, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(EIGHT)
    found = kernels.project_down(codes[:, None], torch.ones(1, 1, device=device, dtype=torch.bfloat16), None)[:, 0]
    torch.testing.assert_close(found.float(), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((dtype, value) for dtype in (torch.float32, torch.bfloat16) for value in (torch.nan, torch.inf)),
        (EIGHT, torch.nan),
    ],
)
def test_nan_and_infinity_show_unless_they_are_dropped(
    kernels: Any, device: str, dtype: torch.dtype, value: float
) -> None:
    dropout = Dropout(0.5, SEED)
    mask = keep_mask(20, 30, dropout, torch.device(device))
    for passes in (True, False):
        row, column = (mask == passes).nonzero()[77].tolist()
        x, a, grad = problem(20, 30, 4, device, dtype)
        x[row, column] = value
        seen = ~kernels.project_down(x, a, dropout).isfinite()
        assert seen.any(1).nonzero().flatten().tolist() == ([row] if passes else [])
        seen = ~kernels.project_down_weight_gradient(grad, x, dropout).isfinite()
        assert seen.any(0).nonzero().flatten().tolist() == ([column] if passes else [])
        grad[row] = value
        spread = kernels.project_down_input_gradient(grad, a, dropout)
        assert torch.equal(~spread.isfinite(), mask & (torch.arange(20, device=device) == row)[:, None])
        assert spread[~mask].eq(0).all()


@sizes
@given(n=st.integers(1, 90), width=st.integers(1, 200), rank=st.integers(1, 20), dropout=drops)
def test_product_and_gradients_are_consistent(
    kernels: Any, device: str, n: int, width: int, rank: int, dropout: Dropout | None
) -> None:
    """<project_down(x), g> = <x, input_gradient(g)> = <A, weight_gradient(g, x)>."""
    x, a, grad = problem(n, width, rank, device, torch.float32)
    products = (
        kernels.project_down(x, a, dropout).double() * grad,
        kernels.project_down_input_gradient(grad, a, dropout).double() * x,
        kernels.project_down_weight_gradient(grad, x, dropout).double() * a,
    )
    size = float((x.abs().double() @ a.abs().T.double() * grad.abs()).sum())
    for product in products[1:]:
        assert abs(float(product.sum() - products[0].sum())) <= 1e-6 * size


@sizes
@given(n=st.integers(1, 200), width=st.integers(1, 260), dropout=st.builds(Dropout, st.floats(0, 1), seeds))
def test_kernels_draw_the_reference_mask(kernels: Any, device: str, n: int, width: int, dropout: Dropout) -> None:
    expected = keep_mask(n, width, dropout, torch.device(device)).float()
    ones, column, row = (torch.ones(shape, device=device) for shape in ((n, width), (n, 1), (1, width)))
    assert torch.equal(kernels.project_down_input_gradient(column, row, dropout), expected)
    assert torch.equal(kernels.project_down(ones, torch.eye(width, device=device), dropout), expected)
    assert torch.equal(kernels.project_down_weight_gradient(torch.eye(n, device=device), ones, dropout), expected)


def test_the_mask_never_changes() -> None:
    """A run that is resumed, on whatever device and version, drops what it would have dropped."""
    rows = ["".join(str(int(one)) for one in row) for row in keep_mask(3, 24, Dropout(0.5, SEED), torch.device("cpu"))]
    assert rows == ["101101001101001100100110", "101010111110001101111011", "100001110000110111110111"]


def correlation(one: Tensor, other: Tensor) -> float:
    """Return the correlation in standard deviations of that of independent values."""
    p, q = one.double().mean(), other.double().mean()
    spread = (p * (1 - p) * q * (1 - q) / one.numel()) ** 0.5
    return float(abs(((one.double() - p) * (other.double() - q)).mean()) / spread)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**62 - 1, SEED])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_mask_is_fair(seed: int, p: float) -> None:
    mask = keep_mask(1024, 1536, Dropout(p, seed), torch.device("cpu")).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(mask.mean() - keep_probability(p)) < 4 * deviation / mask.numel() ** 0.5
    for axis, most in ((0, 5.0), (1, 5.0)):
        sums = (mask.mean(axis) - keep_probability(p)) * mask.shape[axis] ** 0.5 / deviation
        assert sums.abs().max() < most
        assert abs(float(sums.square().mean()) - 1) < 0.2  # nor are they more even than chance
    for down, right in ((0, 1), (0, 2), (0, 3), (0, 128), (1, 0), (2, 0), (64, 0), (1, 1), (1, 2), (512, 768)):
        first, second = mask[: 1024 - down, : 1536 - right], mask[down:, right:]
        assert correlation(first, second) < 4.5, (down, right)


@pytest.mark.parametrize("seed", [0, 7, SEED])
def test_blocks_take_every_pattern(seed: int) -> None:
    """Chi-square of 4×4 neighbours, 65,536 patterns in 256 classes."""
    mask = keep_mask(2048, 2048, Dropout(0.5, seed), torch.device("cpu")).long()
    blocks = mask.view(512, 4, 512, 4).transpose(1, 2).reshape(-1, 16)
    for half in (blocks[:, :8], blocks[:, 8:], blocks[:, ::2], blocks[:, 1::2]):
        counts = torch.bincount(half @ (2 ** torch.arange(8)), minlength=256).double()
        expected = counts.sum() / 256
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 4.5 * 510**0.5


@pytest.mark.parametrize("other", [1, 2, 2**16, 2**31, 2**32, 2**33, 2**61])
def test_seeds_have_nothing_in_common(other: int) -> None:
    for seed in (0, SEED & (2**61 - 1)):
        one, two = (keep_mask(512, 512, Dropout(0.5, of), torch.device("cpu")) for of in (seed, seed ^ other))
        assert correlation(one, two) < 4.5
        assert abs((one.double() - 0.5) @ (two.double() - 0.5).T).max() * 2 < 6.5 * 512**0.5  # of any two rows


def test_rows_differ() -> None:
    mask = keep_mask(4096, 256, Dropout(0.5, 3), torch.device("cpu"))
    assert len({row.numpy().tobytes() for row in mask}) == 4096


@pytest.mark.parametrize(("p", "expected"), [(0.0, 1.0), (0.5, 0.5), (0.05, 1 - 3277 / 65536), (0.999999, 2**-16)])
def test_the_keep_probability_is_exact(p: float, expected: float) -> None:
    assert keep_probability(p) == expected
    mask = keep_mask(2048, 2048, Dropout(p, 9), torch.device("cpu"))
    assert abs(float(mask.double().mean()) - expected) < 1e-3
    assert bool(mask.any())


def test_on_a_cpu_the_reference_is_used() -> None:
    x, a, grad = problem(9, 20, 3, "cpu", torch.bfloat16)
    dropout = Dropout(0.5, 2)
    assert torch.equal(low_rank.project_down(x, a, dropout), low_rank.project_down.reference(x, a, dropout))
    found = low_rank.project_down_weight_gradient(grad, x, dropout)
    assert torch.equal(found, low_rank.project_down_weight_gradient.reference(grad, x, dropout))
    assert torch.equal(
        low_rank.project_down_input_gradient(grad, a, dropout),
        low_rank.project_down_input_gradient.reference(grad, a, dropout),
    )
