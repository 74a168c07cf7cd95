"""The optional parts of a decoder: value embeddings and long skip connections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import RecipeError
from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models.decoder import Decoder
from redline.planning.memory import training_memory
from redline.planning.shapes import DecoderShape
from redline.planning.speed import decoder_work
from redline.recipe.load import load
from redline.runs.events import read_events

SHAPE = DecoderShape(layers=6, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab=64, tied=False)
TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2))
PARTS = ("model.layers=4", "model.value_embeddings=2", "model.skips=x0", "model.tied=false", "model.embedding_std=0.5")


def decoder(shape: DecoderShape, init: str = "gpt2", eps: float = 1e-5, **options: Any) -> Decoder:
    model = Decoder(shape, attention=Attention("dense", MaskSpec()), eps=eps)
    model.initialise(torch.Generator().manual_seed(1), init, **options)
    return model


def test_which_layers() -> None:
    assert replace(SHAPE, value_embeddings=2).value_tables == [0, 1, None, None, 0, 1]
    assert replace(SHAPE, value_embeddings=3).value_tables == [0, 1, 2, 0, 1, 2]
    assert replace(SHAPE, skips="x0").skip_sources == [None, 0, 0, 0, 0, 0]
    assert replace(SHAPE, skips="unet").skip_sources == [None, None, None, 2, 1, 0]
    assert replace(SHAPE, layers=5, skips="unet").skip_sources == [None, None, None, 1, 0]


@pytest.mark.parametrize("skips", ["x0", "unet"])
def test_at_the_start_they_change_nothing(skips: str) -> None:
    plain, more = decoder(SHAPE), decoder(replace(SHAPE, value_embeddings=2, skips=skips))
    assert torch.equal(plain(TOKENS, Bound()), more(TOKENS, Bound()))


def test_values_are_added_to_and_nothing_else() -> None:
    """A single token sees its own value."""
    attention = decoder(replace(SHAPE, value_embeddings=1)).blocks[0].attention
    x, cos = torch.randn(2, 1, 32), torch.zeros(1, 4)
    values = torch.randn(2, 1, 16)
    found = attention(x, cos, cos, Bound(), values) - attention(x, cos, cos, Bound())
    groups = values.view(2, 1, 2, 8).repeat_interleave(2, 2).flatten(2)  # two heads of queries share one of values
    torch.testing.assert_close(found, attention.out(groups))


@pytest.mark.parametrize(("skips", "factor"), [("x0", 1 + 0.1 + 0.2 + 0.3 + 0.4 + 0.5), ("unet", 1 + 0.1 + 0.2 + 0.3)])
def test_states_are_added_with_their_weights(skips: str, factor: float) -> None:
    """Blocks that add nothing leave what was looked up, times what the skips make of it."""
    model = decoder(replace(SHAPE, skips=skips), "zero", eps=1e8)  # so large that the norm only divides by 1e4
    assert model.skip_weights is not None
    model.skip_weights.data = torch.arange(1, len(model.skip_weights) + 1) / 10
    looked_up = model.embedding.weight[TOKENS]
    torch.testing.assert_close(1e4 * model(TOKENS, Bound()), factor * looked_up, rtol=1e-4, atol=1e-6)


def test_a_skip_of_the_unet_begins_where_it_should() -> None:
    """Moving what goes into block 1 reaches block 4 by the skip, and block 3 not."""
    model = decoder(replace(SHAPE, skips="unet"), "zero")
    assert model.skip_weights is not None
    model.skip_weights.data = torch.tensor([0.0, 1.0, 0.0])  # of blocks 3, 4, 5, from 2, 1, 0
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.blocks[0].register_forward_hook(lambda _, __, output: output + 1.0)
    model(TOKENS, Bound())
    moved = [state - seen[0] for state in seen]
    torch.testing.assert_close(moved[1], torch.ones_like(moved[1]))
    torch.testing.assert_close(moved[3], torch.ones_like(moved[3]))
    torch.testing.assert_close(seen[4], seen[3] + seen[1])


def test_every_part_learns() -> None:
    model = decoder(replace(SHAPE, value_embeddings=2, skips="x0"))
    model(TOKENS, Bound()).square().sum().backward()
    assert model.skip_weights is not None
    assert model.skip_weights.grad is not None
    assert (model.skip_weights.grad != 0).all()
    for table in model.value_embeddings:
        rows = table.weight.grad.abs().sum(1) > 0
        assert set(rows.nonzero().flatten().tolist()) == set(TOKENS.unique().tolist())


def test_the_standard_deviation_of_the_embedding_and_a_head_of_zeros() -> None:
    plain, wide = decoder(SHAPE), decoder(SHAPE, "zero", embedding_std=1.0)
    torch.testing.assert_close(wide.embedding.weight, 50 * plain.embedding.weight)
    assert not wide.head_weight.any()
    assert not decoder(replace(SHAPE, tied=True), "zero", embedding_std=1.0).head_weight.std() < 0.9
    assert torch.equal(plain.blocks[2].attention.qkv.weight, wide.blocks[2].attention.qkv.weight)


def test_the_plan_counts_them() -> None:
    more = replace(SHAPE, value_embeddings=2, skips="x0")
    options: Any = {"optimizer": "adamw", "ema": False, "checkpointing": "none", "bytes_per_value": 2}
    before, after = (training_memory(shape, tokens=1000, **options) for shape in (SHAPE, more))
    added = 2 * 64 * 16 + 5
    assert after.weights - before.weights == after.gradients - before.gradients == 4 * added
    assert after.optimizer - before.optimizer == 8 * added
    assert after.activations > before.activations
    before_work, after_work = (decoder_work(shape, 64, **options) for shape in (SHAPE, more))
    assert after_work.matmul == before_work.matmul
    assert after_work.moved > before_work.moved
    assert after_work.update - before_work.update == 32 * added


@pytest.mark.parametrize("part", [{"value_embeddings": 2}, {"skips": "x0"}, {"skips": "unet"}], ids=str)
def test_the_plan_counts_what_each_keeps_and_moves(part: dict[str, Any]) -> None:
    options: Any = {"optimizer": "adamw", "ema": False, "checkpointing": "none", "bytes_per_value": 2}
    shapes = (SHAPE, replace(SHAPE, **part))
    before, after = (training_memory(shape, tokens=1000, **options).activations for shape in shapes)
    assert after > before
    before, after = (decoder_work(shape, 64, **options).moved_least for shape in shapes)
    assert after > before


def test_muon_does_not_train_embedding_tables(world: Any, tmp_path: Path) -> None:
    trainer = world.run(tmp_path / "run", *PARTS, "train.steps=1")
    roles = {name: group.role for group in trainer.objective.param_groups() for name in group.parameters}
    assert {role for name, role in roles.items() if "embedding" in name} == {"embedding"}
    assert roles["skip_weights"] == "scalar"


@pytest.mark.parametrize("skips", ["x0", "unet"])
def test_a_resumed_run_is_the_same_to_the_bit(world: Any, tmp_path: Path, tensors_of: Any, skips: str) -> None:
    keys = (*PARTS, f"model.skips={skips}", "train.steps=8")
    world.run(tmp_path / "whole", *keys)
    world.run(tmp_path / "parts", *keys, stop_at=5)
    world.run(tmp_path / "parts", *keys, resume=True)
    expected, got = (tensors_of(tmp_path / name / "checkpoints/step-00000008") for name in ("whole", "parts"))
    assert expected["model/skip_weights"].any()
    assert expected["model/value_embeddings.1.weight"].any()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_a_run_learns_with_them(world: Any, tmp_path: Path) -> None:
    trainer = world.run(tmp_path, *PARTS, "model.init=zero", "train.steps=20")
    found = [event["loss"] for event in read_events(tmp_path / "events.jsonl") if event["type"] == "step"]
    assert found[-1] < found[0] - 0.3
    assert trainer.objective.model.skip_weights.any()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.value_embeddings=13"], "13 is more than half of 24 layers"),
        (["model.value_embeddings=-1"], "model.value_embeddings"),
        (["model.skips=dense"], "'dense' is not one of none, x0, unet"),
        (["model.embedding_std=0"], "model.embedding_std"),
    ],
)
def test_impossible_values_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("pretrain-350m", overrides)
    assert said in caught.value.message()
