"""A rank's part of the rows: its positions, its mask over the keys of all ranks, and the tables of its documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.data.loader import cu_seqlens
from redline.errors import UserError
from redline.kernels import attention as module
from redline.kernels.attention import Attention, MaskSpec, part_candidates, select
from redline.kernels.context import ContextGroup, Part, pad_tables, varlen_tables
from redline.planning.context import Split
from redline.planning.layout import uniform

CUDA = torch.cuda.is_available()
MASKS = {
    "causal": (MaskSpec(), (48,)),
    "documents": (MaskSpec(documents=True), (48,)),
    "blocks": (MaskSpec.of_layout(uniform(24, 4)), (24, 24)),
    "one block": (MaskSpec.of_layout(uniform(48, 48)), (48,)),
}
B, H, KV, K = 2, 4, 2, 16


@given(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_ranks_share_every_row_and_its_causal_work_equally(ranks: int, sizes: list[int]) -> None:
    split = Split(tuple(2 * ranks * size for size in sizes), ranks)
    parts = [split.positions(rank) for rank in range(ranks)]
    assert sorted(position for part in parts for position in part) == list(range(split.length))
    assert {len(part) for part in parts} == {split.share}
    start = 0
    for length in split.copies:  # a position sees those before it in its copy
        work = {sum(p - start for p in part if start <= p < start + length) for part in parts}
        assert len(work) == 1
        start += length


def test_the_second_name_of_each_position() -> None:
    part = Part(Split((8, 16), 2), ContextGroup(1, 2, None), torch.device("cpu"))
    assert part.columns.tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]
    flat = np.array([0, 2, 5, 12, 24, 24 + 19])  # of two rows
    mine, places = part.scored(flat)
    assert flat[mine].tolist() == [2, 5, 12, 43]
    assert places.tolist() == [0, 3, 4, 12 + 11]


def documents() -> torch.Tensor:
    starts = torch.rand(B, 48, generator=torch.Generator().manual_seed(1)) < 0.12
    return starts.int().cumsum(1).int()


def bound_part(attention: Attention, part: Part, ids: torch.Tensor | None) -> Any:
    """Bind as a job does: with tables where the back-end takes documents of any length."""
    tables = []
    if attention.varlen:
        starts = np.arange(B + 1) * part.length if ids is None else cu_seqlens(ids.cpu().numpy())
        made = [varlen_tables(starts, B, part.length, chunk) for chunk in part.chunks]
        padded = [pad_tables(pair, 70) for pair in made]
        device = part.positions_T.device
        tables = [(*(torch.from_numpy(table).to(device) for table in pair), part.length) for pair in padded]
    return attention.bind_part(part, ids, tables)


def assert_parts_equal_the_whole(backend: str, kind: str, ranks: int, device: str, *, backward: bool = True) -> None:
    spec, copies = MASKS[kind]
    dtype, tolerance = (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 1e-5)
    ids = documents().to(device) if spec.documents else None
    generator, wide = torch.Generator().manual_seed(0), 64 if device == "cuda" else K
    shapes = [(B, heads, 48, wide) for heads in (H, KV, KV, H)]
    *values, upstream = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    leaves = q, k, v = [x.clone().float().requires_grad_() for x in values]
    whole = Attention("dense", spec, device, grouped=True)
    expected = whole(q, k, v, whole.bind(48, ids))
    expected.backward(upstream.float())
    attention = Attention(backend, spec, device, grouped=device == "cuda", in_parts=True)
    parts = [x.clone().requires_grad_(backward) for x in values]
    for rank in range(ranks):
        part = Part(Split(copies, ranks), ContextGroup(rank, ranks, None), torch.device(device))
        part.whole = lambda _k, _v: (parts[1], parts[2])  # type: ignore[method-assign]
        columns = part.positions_T
        local = [x[:, :, columns] for x in parts]
        out = attention(*local, bound_part(attention, part, ids))
        assert (out.float() - expected[:, :, columns]).norm() <= tolerance * expected[:, :, columns].norm()
        if backward:
            out.backward(upstream[:, :, columns])
    if backward:
        for got, leaf in zip(parts, leaves, strict=True):
            assert got.grad is not None
            assert leaf.grad is not None
            assert (got.grad.float() - leaf.grad).norm() <= tolerance * leaf.grad.norm()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", ["dense", "matmul", "flash"])
def test_the_parts_compute_what_the_whole_row_does(backend: str, kind: str, ranks: int) -> None:
    assert_parts_equal_the_whole(backend, kind, ranks, "cpu")


@pytest.mark.parametrize("kind", MASKS)
def test_the_block_masks_of_flex(kind: str) -> None:
    """Without its backward, which flex does not have on a CPU."""
    assert_parts_equal_the_whole("flex", kind, 2, "cpu", backward=False)


def varlen_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_keys: Any, longest: int, grouped: bool, cu_queries: Any = None
) -> torch.Tensor:
    """Compute what these kernels do, document by document: the last query is aligned with the last key."""
    out = torch.zeros_like(q)
    ends = zip(
        cu_queries.tolist()[:-1], cu_queries.tolist()[1:], cu_keys.tolist()[:-1], cu_keys.tolist()[1:], strict=True
    )
    for first, last, begin, end in ends:
        assert last - first <= end - begin, "a document has at least as many keys as queries"
        scores = torch.einsum("qhk,shk->hqs", q[first:last], k[begin:end]) / q.shape[-1] ** 0.5
        hidden = (
            torch.ones(last - first, end - begin, dtype=torch.bool).tril(end - begin - (last - first)).logical_not()
        )
        out[first:last] = torch.einsum("hqs,shk->qhk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[begin:end])
    return out


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_tables_of_documents_on_a_gpu(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, with a reference in place of its kernel."""
    monkeypatch.setattr(module, "varlen_attention", varlen_reference)
    monkeypatch.setattr(module, "supports_gqa", lambda backend: False)
    plain = Attention.__init__

    def as_on_a_gpu(self: Attention, backend: str, spec: MaskSpec, device: str = "cpu", **options: Any) -> None:
        plain(self, backend, spec, "cuda" if backend == "flash" else device, **options)

    monkeypatch.setattr(Attention, "__init__", as_on_a_gpu)
    assert_parts_equal_the_whole("flash", kind, ranks, "cpu")


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_tables_cover_every_query_once(rows: int, ranks: int, size: int, data: st.DataObject) -> None:
    length = 2 * ranks * size
    ids = np.array(
        data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    )
    starts = cu_seqlens(ids.astype(np.int32).cumsum(1).astype(np.int32))
    for rank in range(ranks):
        for first, end in Split((length,), ranks).chunks(rank):
            queries, keys = varlen_tables(starts, rows, length, (first, end))
            assert queries[0] == keys[0] == 0
            assert queries[-1] == rows * (end - first)
            assert keys[-1] == rows * length
            assert (np.diff(queries) >= 0).all()
            assert (np.diff(queries) <= np.diff(keys)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("backend", "kind"),
    [("flash", "causal"), ("flash", "documents"), *(("flex", kind) for kind in MASKS), ("efficient", "documents")],
)
def test_the_parts_on_a_gpu(backend: str, kind: str, ranks: int) -> None:
    if not CUDA:
        pytest.skip("needs an NVIDIA GPU")
    assert_parts_equal_the_whole(backend, kind, ranks, "cuda")


def test_back_ends_that_take_a_part() -> None:
    for spec, able in ((MaskSpec(), "flash"), (MaskSpec(documents=True), "flash"), (MASKS["blocks"][0], "flex")):
        how = {"device": "cuda", "dtype": torch.bfloat16, "shape": (1, 8, 4096, 128)}
        assert select("auto", spec, **how, context_backend="gather").backend == able
        with pytest.raises(UserError, match="cudnn"):
            select("cudnn", spec, **how, context_backend="gather")
    assert select("auto", MaskSpec(), **how, context_backend="ring").backend == "flash"
    assert select("auto", MaskSpec(), device="cpu", dtype=torch.float32, shape=(1, 2, 64, 16), context_backend="gather")
    with pytest.raises(UserError, match="needs a GPU"):
        select("auto", MaskSpec(), device="cpu", dtype=torch.float32, shape=(1, 2, 64, 16), context_backend="ring")
    with pytest.raises(UserError, match="causal"):
        select("auto", MaskSpec(documents=True), **how, context_backend="ring")
    assert not part_candidates(MaskSpec(), "cuda", torch.bfloat16, 64, "gather")["flex"]
