"""The low-rank kernels as a GPU compiles them, at the sizes of real models, against float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.kernels import low_rank
from redline.kernels.low_rank import Dropout, keep_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
EIGHT = torch.float8_e4m3fn
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DROPPED = Dropout(0.1, 0x2B5C_9E31_0F4A_7D63)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randoms(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_rounded(found: Tensor, wanted: Tensor, terms: int) -> None:
    """Compare sums of `terms` terms of size one. The tensor cores truncate sums, the reference rounds them."""
    torch.testing.assert_close(found.float(), wanted, rtol=1.01 * ROUNDING[found.dtype], atol=1e-4 * terms**0.5)


def check(n: int, width: int, rank: int, dtype: torch.dtype, dropout: Dropout | None) -> None:
    wide = torch.bfloat16 if dtype == EIGHT else dtype
    x = randoms(n, width + 16, dtype=dtype)[:, :width]
    a, grad = randoms(rank, width, dtype=wide), randoms(n, rank + 8, dtype=wide)[:, :rank]
    unscale = torch.tensor(0.37, device="cuda") if dtype == EIGHT else None
    exact = x.float()

    narrowed = low_rank.project_down(x, a, dropout, unscale)
    assert_rounded(narrowed, low_rank.project_down.reference(exact, a, dropout, unscale), width)
    of_a = low_rank.project_down_weight_gradient(grad, x, dropout, unscale)
    assert_rounded(of_a, low_rank.project_down_weight_gradient.reference(grad, exact, dropout, unscale), n)
    assert torch.equal(narrowed, low_rank.project_down(x, a, dropout, unscale))
    assert torch.equal(of_a, low_rank.project_down_weight_gradient(grad, x, dropout, unscale))

    wanted = low_rank.project_down_input_gradient.reference(grad.float(), a, dropout)
    assert_rounded(low_rank.project_down_input_gradient(grad, a, dropout), wanted, rank)
    out = randoms(n, width, dtype=wide)
    wanted += out
    assert low_rank.project_down_input_gradient(grad, a, dropout, out) is out
    assert_rounded(out, wanted, rank)


@pytest.mark.parametrize("dropout", [None, DROPPED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, EIGHT])
@pytest.mark.parametrize(
    ("n", "width", "rank"),
    [(2048, 4096, 16), (4096, 1024, 48), (1000, 896, 8), (333, 769, 9), (65, 130, 256), (1, 1, 1)],
)
def test_low_rank(n: int, width: int, rank: int, dtype: torch.dtype, dropout: Dropout | None) -> None:
    check(n, width, rank, dtype, dropout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, EIGHT])
def test_the_widest_of_8b(dtype: torch.dtype) -> None:
    check(16384, 14336, 32, dtype, DROPPED)


@pytest.mark.parametrize(("n", "width"), [(256, 256), (131, 255), (1, 1)])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.999])
def test_the_mask_is_the_one_of_a_cpu(n: int, width: int, p: float) -> None:
    dropout = Dropout(p, 2**62 - 9)
    wanted = keep_mask(n, width, dropout, torch.device("cpu")).cuda()
    assert torch.equal(keep_mask(n, width, dropout, torch.device("cuda")), wanted)
    for dtype in (torch.float32, torch.bfloat16):
        ones, column, row = (
            torch.ones(shape, device="cuda", dtype=dtype) for shape in ((n, width), (n, 1), (1, width))
        )
        assert torch.equal(low_rank.project_down_input_gradient(column, row, dropout).bool(), wanted)
        across, down = (torch.eye(size, device="cuda", dtype=dtype) for size in (width, n))
        assert torch.equal(low_rank.project_down(ones, across, dropout).bool(), wanted)
        assert torch.equal(low_rank.project_down_weight_gradient(down, ones, dropout).bool(), wanted)


def test_all_codes_of_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(EIGHT)
    found = low_rank.project_down(codes[:, None], torch.ones(1, 1, device="cuda", dtype=torch.bfloat16), None)[:, 0]
    torch.testing.assert_close(found.float(), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_show_unless_they_are_dropped(value: float) -> None:
    mask = keep_mask(200, 384, DROPPED, torch.device("cuda"))
    for passes in (True, False):
        row, column = (mask == passes).nonzero()[777].tolist()
        x, a, grad = (randoms(*shape, dtype=torch.bfloat16) for shape in ((200, 384), (16, 384), (200, 16)))
        x[row, column] = value
        seen = ~low_rank.project_down(x, a, DROPPED).isfinite()
        assert seen.any(1).nonzero().flatten().tolist() == ([row] if passes else [])
        seen = ~low_rank.project_down_weight_gradient(grad, x, DROPPED).isfinite()
        assert seen.any(0).nonzero().flatten().tolist() == ([column] if passes else [])


def test_offsets_beyond_32_bits() -> None:
    n, width, rank = 540_000, 4096, 16  # n·width is past 2^31
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x, a, grad = (randoms(*shape, dtype=torch.bfloat16) for shape in ((9, width), (rank, width), (n, rank)))
    x = x.repeat(n // 9, 1)
    a[:, 16:], grad[:-9] = 0.0, 0.0  # so that the last rows and the first columns decide
    mask = keep_mask(n, 16, DROPPED, x.device)[-9:]
    passed, last, first = torch.where(mask, x[-9:, :16].float(), 0.0), grad[-9:].float(), a[:, :16].float()
    assert_rounded(low_rank.project_down(x, a, DROPPED)[-9:], passed @ first.T, 64)
    assert_rounded(low_rank.project_down_weight_gradient(grad, x, DROPPED)[:, :16], last.T @ passed, 64)
    wanted = x[-9:, :16].float() + torch.where(mask, last @ first, 0.0)
    assert_rounded(low_rank.project_down_input_gradient(grad, a, DROPPED, x)[-9:, :16], wanted, 64)
