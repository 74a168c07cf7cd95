"""What a batch holds for attention within documents: their starts, and the length of the longest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.data.loader import cu_seqlens
from redline.jobs.causal_lm.objective import CausalLM
from redline.kernels.attention import MaskSpec
from redline.training.step import to_device


def objective(*, kernels: str = "fused", compiled: bool = True, graph: bool = False) -> Any:
    """An objective as on a GPU, where flash attention keeps documents apart."""
    made = CausalLM.__new__(CausalLM)
    made.recipe = SimpleNamespace(  # type: ignore[assignment]
        train=SimpleNamespace(compile=compiled, graph=graph), model=SimpleNamespace(kernels=kernels, dropout=0.0)
    )
    made.attention = SimpleNamespace(varlen=True, backend="flash")  # type: ignore[assignment]
    made.mask, made.device, made.adapter = MaskSpec(documents=True), torch.device("cuda"), None
    return made


def rows(lengths: list[list[int]]) -> np.ndarray:
    return np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]).astype(np.int32)


def laid_out(made: Any, documents: np.ndarray) -> Any:
    tokens = np.zeros(documents.shape, dtype=np.int64)
    return made.laid_out(tokens, tokens, documents)


@given(st.integers(1, 5), st.integers(1, 300), st.floats(0, 0.5), st.integers(0, 99))
def test_starts_and_longest_cover_every_document(count: int, length: int, share: float, seed: int) -> None:
    begins = np.random.default_rng(seed).random((count, length)) < share
    documents = np.cumsum(begins, 1, dtype=np.int32)
    batch = laid_out(objective(), documents)
    if "cu_seqlens" not in batch:
        assert (documents == documents[:, :1]).all(), "only rows of one document need no starts"
        return
    starts, expected = batch["cu_seqlens"].numpy(), cu_seqlens(documents)
    assert (starts[: len(expected)] == expected).all()
    assert (starts[len(expected) :] == documents.size).all(), "padding describes empty documents"
    assert len(expected) <= len(starts) <= max(64, 2 * len(expected))
    longest = np.diff(expected).max()
    assert longest <= int(batch["max_seqlen"]) <= min(length, 2 * longest)


def test_a_compiled_step_gets_no_max_seqlen_and_few_shapes() -> None:
    made = objective(kernels="torch")
    batches = [laid_out(made, rows([[4, size, 124 - size]] * 16)) for size in range(1, 100, 7)]
    assert not any("max_seqlen" in batch for batch in batches)
    assert len({len(batch["cu_seqlens"]) for batch in batches}) == 1
    assert "max_seqlen" in laid_out(objective(kernels="torch", compiled=False), rows([[4, 60, 64]]))


def test_a_cuda_graph_gets_one_shape() -> None:
    made = objective(graph=True)
    batches = [laid_out(made, rows(lengths)) for lengths in ([[128]], [[1] * 128], [[64, 64]])]
    assert {tuple(batch["cu_seqlens"].shape) for batch in batches} == {(256,)}
    assert not any("max_seqlen" in batch for batch in batches)


def test_a_cpu_needs_no_uniform_layout() -> None:
    made = objective(graph=True)
    made.device = torch.device("cpu")
    assert not made.uniform_layout


def test_max_seqlen_stays_on_the_host() -> None:
    batch = laid_out(objective(), rows([[4, 60, 64]]))
    moved = to_device(batch, torch.device("meta"))
    assert moved["cu_seqlens"].device.type == "meta"
    assert int(moved["max_seqlen"]) == 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_does_not_depend_on_what_is_passed(heads: int) -> None:
    from redline.kernels.attention import Attention

    documents = rows([[100, 28, 300, 84], [1, 255, 256, 0]])
    batch = {name: tensor.cuda() for name, tensor in laid_out(objective(), documents).items()}
    attention = Attention("flash", MaskSpec(documents=True), "cuda", grouped=heads != 4)
    found = []
    for told in ({}, {"cu_seqlens": batch["cu_seqlens"], "max_seqlen": int(batch["max_seqlen"])}):
        q, k, v = (
            torch.randn(2, H, 512, 64, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda"))
            for H in (4, heads, heads)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, attention.bind(512, batch["documents"], **told))
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
