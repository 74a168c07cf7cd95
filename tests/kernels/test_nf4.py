"""NF4 equals bitsandbytes bit for bit, and the kernel equals the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.errors import UserError
from redline.kernels import nf4
from redline.kernels.nf4 import (
    NF4,
    dense_nf4,
    dequantise_into,
    dequantise_nf4,
    largest_magnitude,
    quantise_nf4,
)
from redline.planning.shapes import nf4_bytes

KERNELS = "nf4"
pytestmark = pytest.mark.usefixtures("casts_as_on_a_gpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
sizes = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes, doubly = st.sampled_from(DTYPES), st.booleans()


def weight(rows: int, columns: int, device: str, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    return (spread * torch.randn(rows, columns, generator=generator)).to(device, dtype)


def bitsandbytes() -> Any:
    pytest.importorskip("bitsandbytes", reason="compared with bitsandbytes")
    import bitsandbytes.functional

    return bitsandbytes.functional


def same_as_bitsandbytes(w: Tensor, double: bool) -> NF4:
    theirs = bitsandbytes()
    codes, state = theirs.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
    matrix = quantise_nf4(w, double=double)
    assert matrix.shape == tuple(w.shape)
    if w.is_cuda and w.dtype == torch.float32:  # as the module says
        assert (matrix.codes != codes.view(-1)).sum() <= 1 + w.numel() // 1_000_000
        codes = matrix.codes.view(codes.shape)
    assert torch.equal(matrix.codes, codes.view(-1))
    assert torch.equal(matrix.scales, state.absmax)
    assert matrix.scales.dtype == (torch.uint8 if double else torch.float32)
    if double:
        assert matrix.nested is not None
        for mine, other in zip(matrix.nested, (state.state2.code, state.state2.absmax, state.offset), strict=True):
            assert torch.equal(mine, other)
    # as one row: with AVX-512 bitsandbytes takes other blocks' scales where a row is no multiple of 64 but of 16
    state.shape = torch.Size((1, w.numel()))
    with torch.compiler.set_stance("force_eager"):  # it would compile its own for each new size
        expected = theirs.dequantize_4bit(codes if codes.shape[0] > 1 else codes.view(-1), state)
    assert torch.equal(dequantise_nf4(matrix, w.dtype), expected.view(w.shape))
    return matrix


@sizes
@given(rows=st.integers(1, 70), columns=st.integers(1, 300), dtype=dtypes, double=doubly)
def test_quantised_as_bitsandbytes_does(device: str, rows: int, columns: int, dtype: torch.dtype, double: bool) -> None:
    same_as_bitsandbytes(weight(rows, columns, device, dtype, 0.02), double)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(576, 1536), (192, 576), (2049, 2048)])  # the last in two pieces
def test_matrices_of_real_models(device: str, rows: int, columns: int, dtype: torch.dtype, double: bool) -> None:
    w = weight(rows, columns, device, dtype, 0.05) * torch.linspace(0.1, 3, rows, device=device)[:, None].to(dtype)
    same_as_bitsandbytes(w, double)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(40, 64), (3, 130), (1, 7)])
def test_blocks_of_zeros(device: str, rows: int, columns: int, double: bool) -> None:
    same_as_bitsandbytes(torch.zeros(rows, columns, device=device), double)
    w = weight(rows, columns, device)
    w.view(-1)[: w.numel() // 2] = 0
    matrix = same_as_bitsandbytes(w, double)
    if device == "cpu":
        assert not dequantise_nf4(matrix, torch.float32).view(-1)[: w.numel() // 2].any()


@pytest.mark.parametrize("double", [False, True])
def test_values_on_and_beside_the_thresholds(double: bool) -> None:
    device = "cpu"
    levels = nf4.levels(torch.device(device))
    halfway = (levels[:-1] + levels[1:]) / 2
    beside = [(halfway.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)]
    ends = torch.tensor([1.0, -1.0, 0.5], device=device)
    rows = torch.stack([torch.cat((x, levels, ends, x, x[:15])) for x in beside])
    assert rows.shape[1] == 64
    matrix = same_as_bitsandbytes(torch.cat((rows, 3 * rows, 0.07 * rows)), double)
    codes = matrix.codes.view(-1, 32)[2, :7]
    on = torch.stack((codes >> 4, codes & 15), 1).view(-1)
    assert on.tolist() == list(range(14))  # a value on a threshold takes the lower code


def test_thresholds_in_a_block_that_is_not_full() -> None:
    levels = nf4.levels(torch.device("cpu"))
    halfway = (levels[:-1] + levels[1:]) / 2
    for factor in torch.linspace(0.03, 3, 150).tolist():
        same_as_bitsandbytes(factor * torch.cat((halfway, levels))[None], False)


def test_equal_scales_leave_nothing_to_quantise(device: str) -> None:
    matrix = same_as_bitsandbytes(torch.ones(8, 64, device=device), True)
    assert torch.equal(dequantise_nf4(matrix, torch.float32), torch.ones(8, 64, device=device))


def test_the_code_of_a_scale_on_a_gpu_is_found_by_halves() -> None:
    """bitsandbytes' search there, step by step, at every level, halfway between them, and beside."""
    table = nf4.dynamic_levels(torch.device("cpu"))
    halfway = (table[:-1] + table[1:]) / 2
    points = [halfway, table, torch.tensor([-1.0, 1.0, 0.0])]
    points += [(halfway.view(torch.int32) + ulps).view(torch.float32) for ulps in (-1, 1)]
    x = torch.cat(points)
    assert nf4.nearest_code(x).tolist() == [searched(value, table.tolist()) for value in x.tolist()]


def searched(x: float, table: list[float]) -> int:
    low, place, high = 0, 127, 255
    for step in (64, 32, 16, 8, 4, 2, 1):
        if x > table[place]:
            low, place = place, place + step
        else:
            high, place = place, place - step
    mean = lambda a, b: float((torch.tensor(a) + torch.tensor(b)) * 0.5)  # noqa: E731
    if x > table[place]:
        return high if x > mean(table[high], table[place]) else place
    return low if x < mean(table[low], table[place]) else place


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("double", [False, True])
def test_nan_and_infinity_are_refused(device: str, value: float, double: bool) -> None:
    w = weight(5, 70, device)
    w[4, 69] = value
    with pytest.raises(UserError, match="not finite"):
        quantise_nf4(w, double=double)


def test_other_types_are_refused(device: str) -> None:
    with pytest.raises(UserError, match="float64"):
        quantise_nf4(weight(2, 64, device).double())


@sizes
@given(rows=st.integers(1, 40), columns=st.integers(1, 300), dtype=dtypes, double=doubly)
def test_the_kernel_writes_the_values_of_the_reference(
    device: str, kernels: Any, rows: int, columns: int, dtype: torch.dtype, double: bool
) -> None:
    matrix = quantise_nf4(weight(rows, columns, device), double=double)
    expected = block_by_block(matrix).to(dtype)
    out = torch.full((rows, columns), 7.0, dtype=dtype, device=device)
    assert kernels.dequantise_into(matrix, out) is out
    assert torch.equal(out, expected)


@sizes
@given(rows=st.integers(1, 40), columns=st.integers(1, 300), exponent=st.integers(-3, 6), double=doubly)
def test_the_kernel_writes_fp8_by_a_factor(
    device: str, kernels: Any, rows: int, columns: int, exponent: int, double: bool
) -> None:
    matrix = quantise_nf4(weight(rows, columns, device), double=double)
    factor = torch.tensor(2.0**exponent, device=device)
    expected = (block_by_block(matrix) * factor).to(torch.float8_e4m3fn)
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    kernels.dequantise_into(matrix, out, factor)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    alone = dequantise_nf4(matrix, torch.float8_e4m3fn, factor=factor)
    assert torch.equal(alone.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("double", [False, True])
def test_no_value_is_larger_than_said(device: str, double: bool) -> None:
    matrix = quantise_nf4(weight(40, 300, device), double=double)
    assert largest_magnitude(matrix) == dequantise_nf4(matrix, torch.float32).abs().amax()


@pytest.mark.parametrize("double", [False, True])
def test_a_compiler_sees_one_operation(device: str, double: bool) -> None:
    """If it traced into the kernel, it would make constants of the tables."""
    parts = [quantise_nf4(weight(rows, 96, device), double=double) for rows in (8, 24)]
    graphs = []

    def keep_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: x @ dense_nf4(parts, torch.float32).T, backend=keep_graph, fullgraph=True)
    x = torch.randn(5, 96, device=device)
    assert torch.equal(compiled(x), x @ dense_nf4(parts, torch.float32).T)
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [str(target) for target in called if "nf4" in str(target)] == ["redline.dense_nf4.default"]
    assert [node.name for node in graphs[0].graph.nodes if node.op == "get_attr"] == []
    assert torch.tensor not in called


def block_by_block(matrix: NF4) -> Tensor:
    both = torch.stack((matrix.codes >> 4, matrix.codes & 15), 1).view(-1).long()
    n = both.numel() - (matrix.shape[0] * matrix.shape[1]) % 2
    scales = matrix.scales
    if matrix.nested is not None:
        table, largest, mean = matrix.nested
        place = torch.arange(scales.numel(), device=scales.device) // 256
        scales = (table[scales.long()] * largest[place]) + mean
    block = torch.arange(n, device=scales.device) // 64
    return (nf4.levels(scales.device)[both[:n]] * scales[block]).view(matrix.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 37), (40, 128), (1, 1), (300, 576)])
def test_written_into_a_slice(
    device: str, kernels: Any, rows: int, columns: int, dtype: torch.dtype, double: bool
) -> None:
    """Write to rows or columns of a larger matrix; the rest of it stays as it is."""
    matrix = quantise_nf4(weight(rows, columns, device), double=double)
    expected = block_by_block(matrix).to(dtype)
    for place in ((slice(2, 2 + rows), slice(None)), (slice(2, 2 + rows), slice(0, columns))):
        width = columns if place[1] == slice(None) else columns + 5
        buffer = torch.full((rows + 3, width), 7.0, dtype=dtype, device=device)
        kernels.dequantise_into(matrix, buffer[place])
        assert torch.equal(buffer[place], expected)
        buffer[place] = 7.0
        assert bool((buffer == 7.0).all())


def test_broken_scales_are_seen(device: str, kernels: Any) -> None:
    matrix = quantise_nf4(weight(4, 64, device), double=False)
    matrix.scales[2] = float("nan")
    out = kernels.dequantise_into(matrix, torch.empty(4, 64, dtype=torch.bfloat16, device=device))
    assert out.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("double", [False, True])
def test_bytes_as_planned(device: str, double: bool) -> None:
    matrix = quantise_nf4(weight(2048, 512, device), double=double)
    held = [matrix.codes, matrix.scales, *(matrix.nested or ())[1:2]]
    assert sum(x.numel() * x.element_size() for x in held) == nf4_bytes(2048 * 512, double)


def test_moved_without_loss(device: str) -> None:
    matrix = quantise_nf4(weight(9, 64, device))
    moved = matrix.to(torch.device("cpu"))
    out = torch.empty(9, 64)
    assert torch.equal(dequantise_into.reference(moved, out), dequantise_nf4(matrix, out.dtype).cpu())
