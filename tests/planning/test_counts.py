"""The plan's counts equal those of the built model and of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from redline.hardware.machine import Machine, named_gpu
from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.cross_entropy import linear_cross_entropy
from redline.models.decoder import Decoder
from redline.planning.flops import decoder_flops, mfu
from redline.planning.memory import training_memory
from redline.planning.shapes import SIZES, DecoderShape, padded_vocab
from redline.planning.shards import decoder_units, sharded_memory
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve
from redline.units import GIB


@st.composite
def shapes(draw: st.DrawFn) -> DecoderShape:
    kv_heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    return DecoderShape(
        layers=layers,
        d_model=draw(st.integers(1, 12)) * 8,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 16)) * 2,
        d_ff=draw(st.integers(1, 200)),
        vocab=draw(st.integers(2, 500)),
        mlp=draw(st.sampled_from(["swiglu", "relu2"])),
        tied=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        value_embeddings=draw(st.integers(0, layers // 2)),
        skips=draw(st.sampled_from(["none", "x0", "unet"])),
    )


def built(shape: DecoderShape, device: str = "meta", checkpointing: str = "none") -> Decoder:
    with torch.device(device):
        return Decoder(shape, attention=Attention("dense", MaskSpec(), device), checkpointing=checkpointing)


@settings(max_examples=60, deadline=None)
@given(shape=shapes())
def test_parameters_are_those_of_the_built_model(shape: DecoderShape) -> None:
    model = built(shape)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for n, p in model.blocks.named_parameters() if p.dim() == 2)
    assert shape.matmul_parameters == matrices + model.head_weight.numel()
    assert shape.scalar_parameters == sum(p.numel() for p in model.parameters() if p.dim() == 1)


def test_the_350m_model() -> None:
    machine = Machine("cuda", "NVIDIA H200", 141 * 10**9, 16, (9, 0), fast_bf16=True)
    facts = DataFacts(50257, 10**9, 10**6, "data", "gpt2", "tokenizer")
    plan = resolve(load("pretrain-350m").recipe, machine, facts)
    assert plan.shape.parameters == 350_405_632
    assert plan.flops.useful == 6 * 350_355_456 + 12 * 24 * 1024 * 1024
    assert plan.flops.useful / 1e9 == pytest.approx(2.404, abs=5e-4)
    assert plan.flops.causal / 1e9 == pytest.approx(2.253, abs=5e-4)
    assert plan.flops.recomputed == 0.0


@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(2, 64, 4, 4, 16, 192, 512),
        DecoderShape(3, 48, 6, 2, 8, 128, 300, tied=False, qk_norm=True),
        DecoderShape(2, 64, 4, 1, 32, 256, 256, mlp="relu2", qkv_bias=True),
        DecoderShape(4, 64, 4, 2, 16, 192, 512, tied=False, value_embeddings=2, skips="x0"),
    ],
    ids=["plain", "grouped", "relu2", "with tables"],
)
@pytest.mark.parametrize("length", [32, 128])
def test_palm_flops_are_what_torch_counts(shape: DecoderShape, length: int) -> None:
    """With dense attention torch multiplies every query with every key, as the PaLM form counts."""
    assert counted(shape, length, "none") == pytest.approx(decoder_flops(shape, length).useful, rel=0.01)


def counted(shape: DecoderShape, length: int, checkpointing: str) -> float:
    """Return the FLOPs of a token as torch counts them."""
    model = built(shape, "cpu", checkpointing)
    model.initialise(torch.Generator().manual_seed(0))
    tokens = torch.randint(0, shape.vocab, (2, length))
    bound = model.blocks[0].attention.attention.bind(length)
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens, bound)
        linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, tokens.flatten()).backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_full_recomputation_is_what_torch_repeats(mlp: str) -> None:
    shape, length = DecoderShape(2, 64, 4, 2, 16, 192, 512, mlp=mlp), 128
    plain, full = (decoder_flops(shape, length, how) for how in ("none", "full"))
    assert (plain.useful, plain.executed) == (full.useful, full.executed)
    assert plain.recomputed == 0.0
    half = 2.0 * shape.layers * shape.d_attention * length  # of attention's forward: what causality leaves of it
    again = counted(shape, length, "full") - counted(shape, length, "none")
    assert full.recomputed == pytest.approx(again - half)


def test_mfu_of_an_unknown_peak_is_unknown() -> None:
    assert mfu(1000.0, 2e9, None) is None
    assert mfu(1000.0, 2e9, 1e13) == 1000.0 * 2e9 / 1e13


@given(vocab=st.integers(1, 300_000))
def test_padded_vocabulary(vocab: int) -> None:
    padded = padded_vocab(vocab)
    assert padded % 64 == 0
    assert vocab <= padded < vocab + 64


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_about_what_its_name_says(name: str) -> None:
    layers, d_model, heads, d_ff = SIZES[name]
    shape = DecoderShape(layers, d_model, heads, heads, d_model // heads, d_ff, 50304 if d_model >= 768 else 4096)
    advertised = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert 0.6 < shape.parameters / advertised < 1.7
    assert d_model % heads == 0
    assert d_ff % 64 == 0


def peak(layers: int = 4, tokens: int = 1024, how: str = "none", optimizer: str = "adamw", ema: bool = False) -> float:
    shape = DecoderShape(layers, 256, 4, 4, 64, 704, 4096)
    parts = training_memory(shape, tokens=tokens, bytes_per_value=2, optimizer=optimizer, ema=ema, checkpointing=how)
    return parts.peak


@given(layers=st.integers(1, 40), tokens=st.integers(1, 1 << 17), how=st.sampled_from(["none", "selective", "full"]))
def test_memory_grows_with_tokens_and_layers(layers: int, tokens: int, how: str) -> None:
    assert peak(layers, tokens, how) < peak(layers + 1, tokens, how)
    assert peak(layers, tokens, how) < peak(layers, tokens + 1, how)


def test_memory_by_optimizer_and_checkpointing() -> None:
    assert peak(12, 1 << 15, "full") < peak(12, 1 << 15, "selective") < peak(12, 1 << 15, "none")
    assert peak(optimizer="muon") < peak(optimizer="adamw") < peak(optimizer="adamw", ema=True)


def kept_casts(checkpointing: str) -> int:
    """Return the bytes of bf16 copies of block weights that autograd keeps for the backward pass."""
    shape = DecoderShape(3, 64, 4, 2, 16, 192, 512)
    attention = Attention("flash", MaskSpec(), "cpu", grouped=True)
    model = Decoder(shape, attention=attention, dtype=torch.bfloat16, checkpointing=checkpointing)
    model.initialise(torch.Generator().manual_seed(0))
    weights = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    values, kept = {tuple(p.shape): p for p in weights}, dict[int, int]()

    def pack(tensor: Any) -> Any:
        matrix = tensor.T if tensor.dim() == 2 and tuple(tensor.shape) not in values else tensor
        if tensor.dtype == torch.bfloat16 and tuple(matrix.shape) in values:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(0, shape.vocab, (2, 40))  # 80 rows: no activation has a weight's shape
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, attention.bind(40)).float().sum()
    loss.backward()
    return sum(kept.values())


def test_a_checkpointed_block_keeps_no_cast_weights() -> None:
    shape = DecoderShape(3, 64, 4, 2, 16, 192, 512)
    assert kept_casts("none") == 2 * shape.layers * shape.layer_matmul_parameters
    assert kept_casts("full") == kept_casts("selective") == 0
    eight = DecoderShape(32, 4096, 32, 8, 128, 14336, 128_256, tied=False)
    how: dict[str, Any] = {"tokens": 8192, "bytes_per_value": 2, "optimizer": "adamw", "ema": False}
    stored, recomputed = (training_memory(eight, **how, checkpointing=level).workspace for level in ("none", "full"))
    spared = 2 * (eight.layers - 1) * eight.layer_matmul_parameters  # one block is cast again, and the head once
    assert stored - recomputed == spared > 12.5 * GIB


def test_a_sharded_rank_holds_whole_gradients_only_if_it_sums_them_whole() -> None:
    shape = DecoderShape(32, 4096, 32, 8, 128, 14336, 128_256, tied=False)
    how: dict[str, Any] = {"tokens": 8192, "bytes_per_value": 2, "optimizer": "adamw", "ema": False}
    parts, units = (
        training_memory(shape, **how, checkpointing="full"),
        decoder_units(shape, block_bytes=2, root_bytes=2),
    )
    whole, rows = (sharded_memory(parts, units, 8, whole=whole) for whole in (True, False))
    assert whole.gradients > 4 * shape.parameters
    assert rows.gradients < whole.gradients / 3
    assert replace(whole, gradients=0.0) == replace(rows, gradients=0.0)
    ranks = [sharded_memory(parts, units, count, whole=False) for count in (8, 16, 32)]
    assert [parts.optimizer / one.optimizer for one in ranks] == [8, 16, 32]
    under_way = ranks[0].gradients - 4 * shape.parameters / 8
    assert [round(4 * shape.parameters / (one.gradients - under_way)) for one in ranks] == [8, 16, 32]


@pytest.mark.parametrize(("precision", "share"), [("bf16", 1.0), ("fp8", 0.937), ("fp32", 1.0)])
def test_the_ceiling_is_a_share_of_the_peak_named_beside_it(precision: str, share: float) -> None:
    facts = DataFacts(50257, 10**9, 10**6, "data", "gpt2", "tokenizer")
    recipe = load("pretrain-350m", [f"train.precision={precision}"]).recipe
    for gpus in (1, 8):
        ceiling = resolve(recipe, named_gpu("h200"), facts, gpus=gpus).plan_event()["ceiling"]
        assert ceiling["precision"] == precision
        assert ceiling["mfu"] == pytest.approx(share, abs=1e-3)
