"""Fused blocks on a frozen base compute what plain blocks compute, with the same dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from redline.kernels.attention import Attention, MaskSpec
from redline.models.decoder import Decoder
from redline.models.float8 import LINEARS
from redline.models.pretrained import adapted_linears, fill_frozen, random_tensors
from redline.planning.shapes import TARGETS, Adapter, DecoderShape
from redline.recipe.schema import Lora

SHAPE = DecoderShape(layers=3, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=128, vocab=96, tied=False)
TOKENS = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(2))
CPU = torch.device("cpu")


def decoder(kernels: str, shape: DecoderShape, adapter: Adapter, lora: Lora, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape, attention=Attention("dense", MaskSpec()), dtype=dtype, kernels=kernels)
    generator = torch.Generator().manual_seed(5)
    fill_frozen(model, random_tensors(model, CPU), adapter, lora=lora, device=CPU, generator=generator)
    for linear in adapted_linears(model).values():
        for b in linear.lora_B.values():
            b.data.normal_(0.0, 0.05, generator=generator)
    return model


def outputs(model: Decoder) -> dict[str, Any]:
    torch.manual_seed(11)  # of the dropout
    hidden = model(TOKENS, model.attention.bind(TOKENS.shape[1]))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9))
    (hidden.float() * weights).sum().backward()
    return {"hidden": hidden.detach().float(), **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("changes", "targets"),
    [
        ({}, tuple(TARGETS)),
        ({"qkv_bias": True}, ("q_proj", "down_proj")),
        ({"qk_norm": True, "tied": True}, ("v_proj", "up_proj")),
        ({"skips": "unet"}, ("o_proj",)),
    ],
    ids=["all seven", "with a bias", "with norms", "with skips"],
)
def test_values_and_gradients_are_the_plain_ones(
    changes: dict[str, Any], targets: tuple[str, ...], quantised: bool, dropout: float
) -> None:
    shape, adapter = replace(SHAPE, **changes), Adapter(4, targets, quantised=quantised)
    lora = Lora(r=4, alpha=8.0, dropout=dropout, target_modules=targets)
    plain, fused = (outputs(decoder(kernels, shape, adapter, lora, torch.float32)) for kernels in ("torch", "fused"))
    assert plain.keys() == fused.keys()
    assert len(plain) > 1
    for name, expected in plain.items():
        scale = float(expected.abs().max()) + 1e-6
        torch.testing.assert_close(fused[name] / scale, expected / scale, rtol=1e-4, atol=1e-4, msg=name)


def test_dropout_changes_something() -> None:
    adapter = Adapter(4, tuple(TARGETS))
    with_it, without = (
        outputs(decoder("fused", SHAPE, adapter, Lora(r=4, dropout=dropout), torch.float32)) for dropout in (0.3, 0.0)
    )
    assert not torch.allclose(with_it["hidden"], without["hidden"], atol=1e-3)


def test_in_bf16_the_error_is_no_larger_than_that_of_plain_torch() -> None:
    adapter, lora = Adapter(4, tuple(TARGETS), quantised=False), Lora(r=4, dropout=0.0)
    truth = outputs(decoder("torch", SHAPE, adapter, lora, torch.float32))
    plain, fused = (outputs(decoder(kernels, SHAPE, adapter, lora, torch.bfloat16)) for kernels in ("torch", "fused"))

    def error(found: dict[str, Any]) -> float:
        return max(float((found[name].float() - value).norm() / value.norm()) for name, value in truth.items())

    assert error(fused) < 1.3 * error(plain) + 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("changes", "targets"),
    [({}, tuple(TARGETS)), ({"qkv_bias": True}, ("q_proj", "v_proj", "down_proj")), ({"qk_norm": True}, ("up_proj",))],
    ids=["all seven", "with a bias", "with norms"],
)
def test_in_fp8_it_stays_near_bf16(
    changes: dict[str, Any], targets: tuple[str, ...], quantised: bool, dropout: float
) -> None:
    """The adapters' own matrices are not rounded: what differs comes from the base's products."""
    shape, adapter = replace(SHAPE, **changes), Adapter(4, targets, quantised=quantised)
    lora = Lora(r=4, alpha=8.0, dropout=dropout, target_modules=targets)
    truth = outputs(decoder("fused", shape, adapter, lora, torch.bfloat16))
    eight = decoder("fused", shape, adapter, lora, torch.bfloat16)
    eight.use_float8(LINEARS, CPU)
    looked = outputs(eight)  # the first pass computes in bf16
    assert all(torch.equal(looked[name], value) for name, value in truth.items())
    eight.zero_grad()
    found = outputs(eight)
    errors = {name: float((found[name].float() - value).norm() / value.norm()) for name, value in truth.items()}
    assert 1e-3 < max(errors.values()) < 0.6, errors  # if nothing moved, nothing ran in fp8
    assert sorted(errors.values())[len(errors) // 2] < 0.15, errors  # those of queries are small, and mostly noise
    assert errors["hidden"] < 0.15


def test_in_fp8_norms_of_any_size_are_scaled_into_range() -> None:
    """The norms of a frozen base bound their outputs: no magnitude is measured, and no value saturates."""
    adapter, lora = Adapter(4, tuple(TARGETS), quantised=False), Lora(r=4, dropout=0.0)
    models = [decoder("fused", SHAPE, adapter, lora, torch.bfloat16) for _ in range(2)]
    for model in models:
        for block in model.blocks:
            block.mlp_norm.weight.data *= 900.0
    eight = models[1]
    eight.use_float8(LINEARS, CPU)
    outputs(eight)
    eight.zero_grad()
    found, truth = outputs(eight)["hidden"], outputs(models[0])["hidden"]
    assert float((found - truth).norm() / truth.norm()) < 0.3


def test_the_base_has_no_gradient() -> None:
    model = decoder("fused", SHAPE, Adapter(4, ("q_proj",)), Lora(r=4, target_modules=("q_proj",)), torch.float32)
    outputs(model)
    assert all((p.grad is not None) == (".lora_" in name) for name, p in model.named_parameters())
