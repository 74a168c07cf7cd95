"""Fused blocks, whose backward is written by hand, compute what plain blocks compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import RecipeError
from redline.hardware.machine import named_gpu
from redline.kernels.attention import Attention, MaskSpec
from redline.models.decoder import Decoder
from redline.planning.shapes import DecoderShape
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve

SHAPE = DecoderShape(layers=3, d_model=48, heads=4, kv_heads=2, head_dim=12, d_ff=40, vocab=64)


def pair(shape: DecoderShape, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Decoder, Decoder]:
    """The same weights, plain and fused; the norms' weights are not all one."""
    spec = MaskSpec(causal=True, documents=options.pop("documents", False))
    models = []
    for kernels in ("torch", "fused"):
        model = Decoder(shape, attention=Attention("dense", spec), dtype=dtype, kernels=kernels, **options)
        model.initialise(torch.Generator().manual_seed(3))
        noise = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
        models.append(model.double() if dtype == torch.float64 else model)
    return models[0], models[1]


def outputs(model: Decoder, tokens: torch.Tensor, documents: torch.Tensor | None = None) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    hidden = model(tokens, model.attention.bind(tokens.shape[1], documents))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (hidden.double() * weights).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters()}


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    half=st.integers(1, 5),
    width=st.integers(4, 40),  # a norm over one value has no gradient but noise
    d_ff=st.integers(1, 33),
    length=st.integers(1, 17),
    batch=st.integers(1, 3),
    mlp=st.sampled_from(["swiglu", "relu2"]),
    qk_norm=st.booleans(),
    qkv_bias=st.booleans(),
    tables=st.integers(0, 2),
    skips=st.sampled_from(["none", "x0", "unet"]),
)
def test_values_and_gradients_are_the_plain_ones(
    layers: int,
    kv_heads: int,
    groups: int,
    half: int,
    width: int,
    d_ff: int,
    length: int,
    batch: int,
    mlp: str,
    qk_norm: bool,
    qkv_bias: bool,
    tables: int,
    skips: str,
) -> None:
    parts = {"qk_norm": qk_norm, "qkv_bias": qkv_bias, "value_embeddings": min(tables, layers // 2), "skips": skips}
    shape = DecoderShape(layers, width, kv_heads * groups, kv_heads, 2 * half, d_ff, 64, mlp, **parts)
    tokens = torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(length))
    (expected, gradients), (actual, own) = (outputs(model, tokens) for model in pair(shape))
    # norms compute in float32 on both sides, whatever the model's precision
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max()) + 1e-6
        near = 1e-3 if name == "skip_weights" else 1e-4  # a skip's is one sum over all, of which little may be left
        torch.testing.assert_close(own[name] / scale, gradient / scale, rtol=near, atol=near, msg=name)


def test_documents_are_kept_apart() -> None:
    documents = (torch.arange(12) // 5)[None].expand(2, 12)
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    plain, fused = pair(SHAPE, documents=True)
    assert torch.allclose(outputs(plain, tokens, documents)[0], outputs(fused, tokens, documents)[0], atol=1e-5)


def test_in_bf16_the_error_is_no_larger_than_that_of_plain_torch() -> None:
    tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(2))
    truth = outputs(pair(SHAPE)[0], tokens)[1]
    plain, fused = (outputs(model, tokens)[1] for model in pair(SHAPE, torch.bfloat16))

    def error(actual: dict[str, Any]) -> float:
        parts = [(actual[n].double() - g).norm() / g.norm() for n, g in truth.items()]
        return float(torch.stack(parts).max())

    assert error(fused) < 1.3 * error(plain) + 1e-3


def test_a_nan_reaches_every_gradient_before_it() -> None:
    _, fused = pair(SHAPE, torch.float32)
    fused.blocks[-1].mlp.down.weight.data[0, 0] = float("nan")  # type: ignore[union-attr]
    gradients = outputs(fused, torch.zeros(1, 4, dtype=torch.long))[1]
    assert not torch.isfinite(gradients["embedding.weight"]).all()


def test_without_gradients_nothing_is_kept() -> None:
    plain, fused = pair(SHAPE, torch.float32)
    tokens = torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        hidden = fused(tokens, fused.attention.bind(8))
    assert hidden.grad_fn is None
    torch.testing.assert_close(hidden, plain(tokens, plain.attention.bind(8)), rtol=1e-4, atol=1e-5)


def test_an_unsupported_backend_is_refused_with_the_reason() -> None:
    assert SHAPE.not_fused(dropout=0.0, checkpointing="none") == ""
    assert replace(SHAPE, qk_norm=True, mlp="relu2").not_fused(dropout=0.0, checkpointing="none") == ""
    assert "grad_checkpointing" in SHAPE.not_fused(dropout=0.0, checkpointing="full")
    facts = DataFacts(50257, 10**10, 10**6, "", "gpt2", "")
    recipe = load("pretrain-350m", ["model.kernels=fused", "model.dropout=0.1"]).recipe
    with pytest.raises(RecipeError, match=r"model\.kernels: .*model\.dropout"):
        resolve(recipe, named_gpu("h100"), facts)


@pytest.mark.parametrize("model", [("model.qk_norm=false",), ("model.qk_norm=true", "model.mlp=relu2")])
def test_a_run_learns_the_same(world: Any, tmp_path: Any, model: tuple[str, ...]) -> None:
    """The whole trainer, fused and plain, from the same seed."""
    losses = []
    for kernels in ("torch", "fused"):
        run = world.run(tmp_path / kernels, f"model.kernels={kernels}", *model, "train.steps=8")
        events = (tmp_path / kernels / "events.jsonl").read_text()
        assert run.state.step == 8
        losses.append([float(part.split(",")[0]) for part in events.split('"loss":')[1:] if part[0].isdigit()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
