"""Blocks that train in fp8: close to bf16, with scales that follow their tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.float8 import LARGEST, Scale
from redline.models.decoder import Decoder
from redline.models.float8 import HEADROOM, LINEARS, AmaxProbe, Scales
from redline.planning.shapes import DecoderShape

SHAPE = DecoderShape(layers=3, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=96, vocab=64)
NEAR = 0.3  # e4m3 rounds to one part in sixteen, a dozen times on the way through this model
TOKENS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(2))


def decoder(linears: tuple[str, ...] = (), shape: DecoderShape = SHAPE) -> Decoder:
    model = Decoder(shape, attention=Attention("dense", MaskSpec(causal=True)), dtype=torch.bfloat16, kernels="fused")
    model.initialise(torch.Generator().manual_seed(3))
    noise = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    if linears:
        model.use_float8(linears, torch.device("cpu"))
    return model


def gradients(model: Decoder, scale: float = 1.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    hidden = model(TOKENS, model.attention.bind(TOKENS.shape[1]))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)) * scale
    (hidden.float() * weights).sum().backward()
    actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach().float(), **actual}


def error(actual: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((actual[name] - value).norm() / (value.norm() + 1e-12)) for name, value in truth.items()}


def test_the_first_pass_measures_in_bf16() -> None:
    plain, eight = decoder(), decoder(LINEARS)
    expected, actual = gradients(plain), gradients(eight)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert eight.scales is not None
    assert (eight.scales.amax[..., 0] > 0).all()
    assert not eight.scales.known


@pytest.mark.parametrize("linears", [("qkv",), ("out",), ("up",), ("down",), ("qkv", "up", "down"), LINEARS])
def test_gradients_stay_near_the_bf16_ones(linears: tuple[str, ...]) -> None:
    truth = gradients(decoder())
    model = decoder(linears)
    gradients(model)
    worst = error(gradients(model), truth)
    assert 1e-3 < max(worst.values()) < NEAR, worst  # if nothing moved, nothing ran in fp8
    assert worst["hidden"] < NEAR / 2


@pytest.mark.parametrize("parts", [{}, {"layers": 4, "value_embeddings": 2, "skips": "x0"}, {"skips": "unet"}])
def test_other_parts_have_fp8_too(parts: dict[str, Any]) -> None:
    other = replace(SHAPE, mlp="relu2", qk_norm=True, **parts)
    truth, model = gradients(decoder((), other)), decoder(LINEARS, other)
    gradients(model)
    worst = error(gradients(model), truth)
    # the gains of queries and keys, and of skips, see little gradient here, and much of it is noise
    assert 1e-3 < max(worst.values()) < 2 * NEAR, worst
    gains = ("q_norm", "k_norm", "skip_weights")
    assert max(e for name, e in worst.items() if not any(gain in name for gain in gains)) < NEAR, worst


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6])
def test_gradients_of_any_magnitude_are_scaled_into_range(scale: float) -> None:
    model = decoder(LINEARS)
    gradients(model, scale)
    actual, truth = gradients(model, scale), gradients(decoder(), scale)
    assert max(error(actual, truth).values()) < NEAR


def test_the_scale_follows_a_growing_tensor() -> None:
    model, truth = decoder(LINEARS), gradients(decoder(), 1e4)
    for _ in range(2):
        gradients(model)
    errors = [max(error(gradients(model, 1e4), truth).values()) for _ in range(3 * len(LINEARS) + 2)]
    assert errors[0] > 0.9  # cut off
    assert errors[-1] < NEAR


def test_scales_leave_headroom_and_forget_slowly() -> None:
    scales = Scales(1, LINEARS, 64, torch.device("cpu"))
    assert isinstance(scales.next()[0].down_grad, AmaxProbe)
    seen, factors = scales._probes[0].down_grad, []
    assert seen is not None
    assert seen.amax is not None
    for magnitude in (1.0, 0.0, 0.0, 4.0, 0.0):
        seen.amax.fill_(magnitude)
        scale = scales.next()[0].down_grad
        assert isinstance(scale, Scale)
        assert float(scale.factor * scale.unscale) == 1.0
        factors.append(float(scale.factor))
    # the largest powers of two that leave room for twice the magnitudes 1, 0.9, 0.81, 4 and 3.6
    assert factors == [128.0, 128.0, 256.0, 32.0, 32.0]
    assert HEADROOM * 1.0 * factors[0] <= LARGEST


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_sets_no_scale(bad: float) -> None:
    model = decoder(LINEARS)
    gradients(model)
    gradients(model)
    assert model.scales is not None
    before = model.scales.factor.clone()
    model.scales.amax.fill_(bad)
    model.scales.next()
    assert torch.isfinite(model.scales.factor).all()
    assert (model.scales.factor >= before / 2).all()


def test_a_nan_reaches_every_gradient_before_it() -> None:
    model = decoder(LINEARS)
    gradients(model)
    model.blocks[-1].mlp.down.weight.data[0, 0] = float("nan")  # type: ignore[union-attr]
    assert not torch.isfinite(gradients(model)["embedding.weight"]).all()


def test_what_is_kept_goes_on_exactly() -> None:
    model = decoder(LINEARS)
    for _ in range(3):
        gradients(model)
    assert model.scales is not None
    kept: Any = json.loads(json.dumps(model.scales.state()))
    expected = gradients(model)
    again = decoder(LINEARS)
    assert again.scales is not None
    again.scales.load(kept)
    actual = gradients(again)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_evaluation_is_in_bf16() -> None:
    plain, eight = decoder(), decoder(LINEARS)
    gradients(eight)
    with torch.no_grad():
        mask = plain.attention.bind(TOKENS.shape[1])
        assert torch.equal(plain(TOKENS, mask), eight(TOKENS, mask))
