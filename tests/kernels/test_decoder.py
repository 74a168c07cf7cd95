"""The decoder: its layers, its cache, and sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models.decoder import Decoder, RMSNorm, rotary_table, rotate
from redline.models.generate import generate, sample_token
from redline.planning.layout import Layout, Segment, uniform
from redline.planning.shapes import DecoderShape

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped": {"kv_heads": 2},
    "untied-relu2": {"tied": False, "mlp": "relu2"},
    "qk-norm": {"qk_norm": True},
    "tables-x0": {"layers": 4, "kv_heads": 2, "value_embeddings": 2, "skips": "x0"},
    "tables-unet": {"layers": 4, "value_embeddings": 1, "skips": "unet"},
}


LAYOUTS = {
    "uniform": uniform(12, 3),
    "plan": Layout((Segment("q", 5, 5, given=True), Segment("p", 4, 4), Segment("e", 6, 2))),
    "given in the middle": Layout((Segment("a", 4, 2), Segment("b", 3, 3, given=True), Segment("c", 6, 3))),
}


def decoder(
    softcap: float | None = None, kernels: str = "torch", spec: MaskSpec = MaskSpec(), **changes: Any
) -> Decoder:
    fields = {"layers": 3, "d_model": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_ff": 48, "vocab": 64}
    shape = DecoderShape(**{**fields, **changes})
    model = Decoder(shape, attention=Attention("dense", spec), softcap=softcap, kernels=kernels)
    model.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():  # larger weights, so that every part of the model matters
        for parameter in model.parameters():
            parameter += 0.5 if not parameter.any() else 2.0 * parameter
    return model.eval()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_cache_changes_nothing(changes: dict[str, Any]) -> None:
    model = decoder(softcap=10.0, **changes)
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model.logits(model(tokens, Bound()))
        cache, pieces, position = model.new_cache(), [], 0
        for part in tokens.split((5, 1, 1, 8, 2), 1):
            pieces.append(model.logits(model(part, Bound(), cache, position)))
            position += part.shape[1]
    torch.testing.assert_close(torch.cat(pieces, 1), logits, rtol=1e-4, atol=2e-5)


def test_greedy_text_equals_that_without_a_cache() -> None:
    model = decoder()
    written = generate(model, [1, 2, 3], count=1, tokens=12, vocab=60, seed=0, temperature=0)[0]
    tokens = [1, 2, 3]
    for token in written:
        logits = model.logits(model(torch.tensor([tokens]), Bound()))[0, -1, :60]
        assert token == int(logits.argmax())
        tokens.append(token)
    assert max(written) < 60, "the padding of the vocabulary is never written"


def test_the_same_seed_writes_the_same_text_and_stops_before_the_end_mark() -> None:
    model = decoder()
    how: dict[str, Any] = {"count": 4, "tokens": 40, "vocab": 64, "temperature": 1.0}
    first = generate(model, [5], seed=3, **how)
    assert first == generate(model, [5], seed=3, **how)
    assert first != generate(model, [5], seed=4, **how)
    mark = first[0][10]
    stopped = generate(model, [5], seed=3, stop=mark, **how)
    assert all(mark not in row for row in stopped)
    assert stopped[0] == first[0][: first[0].index(mark)]


def test_nucleus_and_top_k_leave_only_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    chance = torch.Generator().manual_seed(0)

    def drawn(top_k: int | None, top_p: float | None) -> set[int]:
        return {int(sample_token(logits, chance, temperature=1.0, top_k=top_k, top_p=top_p)) for _ in range(400)}

    assert drawn(None, None) == {0, 1, 2, 3}
    assert drawn(2, None) == {0, 1}
    assert drawn(None, 0.79) == {0, 1}
    assert drawn(None, 0.81) == {0, 1, 2}
    assert drawn(None, 0.01) == {0}


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = rotary_table(64, 16, 10000.0)
    chance = torch.Generator().manual_seed(4)
    q, k = (torch.randn(1, 1, 1, 16, generator=chance).expand(1, 1, 64, 16) for _ in range(2))
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = (turned_q @ turned_k.mT)[0, 0]
    for distance in (0, 1, 7):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


def test_norm_equals_torch() -> None:
    norm = RMSNorm(24, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (24,), norm.weight, 1e-5))


def test_later_tokens_change_nothing_before_them() -> None:
    model = decoder(qk_norm=True)
    tokens = torch.randint(0, 64, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens, Bound()), model(changed, Bound())
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_the_softcap_bounds_the_logits() -> None:
    model = decoder(softcap=2.0)
    logits = model.logits(50 * torch.randn(1, 4, 32))
    assert logits.abs().max() <= 2.0
    assert logits.abs().max() > 1.9


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_block_by_block_equals_the_two_copies(changes: dict[str, Any], layout: Layout, kernels: str) -> None:
    """A noisy block after a cache of clean blocks computes what it computes in one row with them."""
    model = decoder(kernels=kernels, spec=MaskSpec.of_layout(layout), **changes)
    chance = torch.Generator().manual_seed(2)
    noisy, clean = (torch.randint(0, 64, (2, layout.length), generator=chance) for _ in range(2))
    positions = torch.tensor([*layout.noisy, *layout.clean])
    row = torch.cat((noisy[:, list(layout.noisy)], clean[:, list(layout.clean)]), 1)
    with torch.no_grad():
        states = model(row, model.attention.bind(layout.read), positions_T=positions)
        of_noisy = {place: states[:, i] for i, place in enumerate(layout.noisy)}
        of_clean = dict(zip(layout.clean, states[:, len(layout.noisy) :].unbind(1), strict=True))
        cache, start = model.new_cache(), 0
        for size in layout.sizes:
            places = range(start, start + size)
            block = slice(start, start + size)
            if layout.noised[start]:
                looked = model(noisy[:, block], Bound(), cache, start, bidirectional=True, update_cache=False)
                torch.testing.assert_close(looked, torch.stack([of_noisy[p] for p in places], 1), rtol=1e-4, atol=1e-4)
                assert all((layer.keys is None) == (start == 0) for layer in cache)
            added = model(clean[:, block], Bound(), cache, start, bidirectional=True)
            torch.testing.assert_close(added, torch.stack([of_clean[p] for p in places], 1), rtol=1e-4, atol=1e-4)
            start += size
            assert all(layer.keys is not None and layer.keys.shape[2] == start for layer in cache)


def test_positions_in_order_are_no_positions() -> None:
    model = decoder(qk_norm=True)
    tokens = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        plain = model(tokens, Bound())
        assert torch.equal(plain, model(tokens, Bound(), positions_T=torch.arange(9)))
        assert not torch.equal(plain, model(tokens, Bound(), positions_T=torch.arange(9) % 5))
        cache = model.new_cache()
        first, then = (model(tokens[:, part], Bound(), cache, part.start) for part in (slice(0, 4), slice(4, 9)))
        cache = model.new_cache()
        model(tokens[:, :4], Bound(), cache, positions_T=torch.arange(4))
        placed = model(tokens[:, 4:], Bound(), cache, 4, positions_T=torch.arange(4, 9))
    assert torch.equal(placed, then)
    assert first.shape[1] == 4


def test_angles_of_positions_are_made_once_and_live_as_long() -> None:
    model = decoder()
    tokens, positions = torch.zeros(1, 6, dtype=torch.long), torch.tensor([3, 4, 5, 3, 4, 5])
    model(tokens, Bound(), positions_T=positions)
    (before,) = model._rotary_at.values()
    model(tokens, Bound(), positions_T=positions)
    model(tokens, Bound(), positions_T=torch.arange(6))
    (after,) = model._rotary_at.values()  # of the other none is left
    assert all(a is b for a, b in zip(before, after, strict=True))
    cos, sin = rotary_table(6, 8, 10000.0)
    assert torch.equal(after[0], cos[positions])
    assert torch.equal(after[1], sin[positions])


def test_fused_blocks_read_the_same_positions() -> None:
    layout = LAYOUTS["plan"]
    positions = torch.tensor([*layout.noisy, *layout.clean])
    tokens = torch.randint(0, 64, (2, layout.read), generator=torch.Generator().manual_seed(5))
    results = []
    for kernels in ("torch", "fused"):
        model = decoder(kernels=kernels, spec=MaskSpec.of_layout(layout), kv_heads=2)
        states = model(tokens, model.attention.bind(layout.read), positions_T=positions)
        states.backward(torch.randn(states.shape, generator=torch.Generator().manual_seed(6)))
        results.append([states.detach(), *(parameter.grad for parameter in model.parameters())])
    for got, expected in zip(*results, strict=True):
        assert ((got - expected).norm() / expected.norm()).item() < 1e-5


def test_options_of_the_cache_need_a_cache() -> None:
    for how in ({"bidirectional": True}, {"update_cache": False}):
        with pytest.raises(AssertionError, match="without a cache"):
            decoder()(torch.zeros(1, 2, dtype=torch.long), Bound(), **how)
