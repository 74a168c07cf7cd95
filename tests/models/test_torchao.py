"""Plain blocks whose linears torchao computes in fp8; on a CPU by its own emulation of the hardware."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from redline.kernels.attention import Attention, MaskSpec
from redline.models.decoder import Decoder
from redline.models.float8 import LINEARS
from redline.planning.shapes import DecoderShape

# found, not imported: it brings Triton in, which other tests must first tell to interpret
pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
SHAPE = DecoderShape(layers=2, d_model=64, heads=4, kv_heads=4, head_dim=16, d_ff=96, vocab=64, qk_norm=True)
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def decoder(linears: tuple[str, ...] = ()) -> Decoder:
    model = Decoder(SHAPE, attention=Attention("dense", MaskSpec(causal=True)), dtype=torch.bfloat16)
    model.initialise(torch.Generator().manual_seed(3))
    model.use_float8(linears, torch.device("cpu"))
    return model


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    hidden = model(TOKENS, model.attention.bind(TOKENS.shape[1]))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9))
    (hidden.float() * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("linears", [("up",), LINEARS])
def test_gradients_stay_near_the_bf16_ones(linears: tuple[str, ...]) -> None:
    truth, found = gradients(decoder()), gradients(decoder(linears))
    errors = [float((found[name] - value).norm() / value.norm()) for name, value in truth.items()]
    assert all(found[name].dtype == torch.float32 for name in truth)
    assert 1e-3 < max(errors) < 0.3


def test_evaluation_is_in_bf16() -> None:
    plain, eight = decoder(), decoder(LINEARS)
    with torch.no_grad():
        mask = plain.attention.bind(TOKENS.shape[1])
        assert torch.equal(plain(TOKENS, mask), eight(TOKENS, mask))
