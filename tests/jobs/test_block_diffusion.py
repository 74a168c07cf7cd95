"""The block diffusion loss against its definition: block by block, by enumeration, and in its two limiting cases."""

from __future__ import annotations

from dataclasses import replace
from math import gamma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.jobs.diffusion.objective import FULL_RANGE, Rows
from redline.kernels.attention import Bound
from redline.training.control import RunDirectory

SEED = 7


def build_objective(world: Any, tmp_path: Path, *overrides: str, block: int = 4, length: int = 32) -> Any:
    """Return the objective with a tiny model, before its first step."""
    options = ("objective=block_diffusion", f"block_diffusion.block_size={block}", f"data.seq_len={length}")
    with RunDirectory(tmp_path / f"run-{block}-{length}") as run:
        objective = world.trainer(run, *options, "data.pack=false", *overrides).objective
    torch.manual_seed(SEED)
    for parameter in objective.model.parameters():  # GPT-2's initial weights are too small: all losses would be equal
        torch.nn.init.normal_(parameter, 0.0, 0.3) if parameter.dim() > 1 else None
    return objective


def rows_of(objective: Any, count: int) -> Rows:
    return objective.data.training(np.arange(count))


def log_probabilities(objective: Any, clean: Tensor, noisy: Tensor, begin: int) -> Tensor:
    """Return log p [L', V] of a noisy block after the clean blocks before it, from its own forward pass."""
    model, cache, at = objective.model, objective.model.new_cache(), 0
    for size in objective.layout.sizes:
        if at < begin:
            model(clean[None, at : at + size], Bound(), cache, at, bidirectional=True)
        at += size
    states = model(noisy[None], Bound(), cache, begin, bidirectional=True, update_cache=False)
    return model.logits(states)[0, :, : objective.data.vocabulary.classes].log_softmax(-1)


def naive_loss(objective: Any, tokens: Tensor, masked: Tensor, weights: Tensor) -> Tensor:
    """Return the loss summed over blocks, each with its own forward pass."""
    total, begin = torch.zeros(()), 0
    for size in objective.layout.sizes:
        block = slice(begin, begin + size)
        noisy = torch.where(masked[block], objective.data.vocabulary.mask, tokens[block])
        found = log_probabilities(objective, tokens, noisy, begin).gather(1, tokens[block, None])[:, 0]
        total = total - (found * weights[block])[masked[block]].sum()
        begin += size
    return total


@pytest.mark.parametrize("block", [1, 4, 8, 32])
def test_loss_equals_the_sum_over_separate_blocks(world: Any, tmp_path: Path, block: int) -> None:
    objective = build_objective(world, tmp_path, block=block)
    rows, chance = rows_of(objective, 3), np.random.default_rng(SEED)
    masked = chance.random(rows.tokens.shape) < 0.6
    weights = chance.uniform(1, 9, rows.tokens.shape).astype(np.float32)
    batch = objective._assemble(rows, masked, weights)
    with torch.no_grad():
        got = objective.loss(batch)["bound"].sum
        each = (
            naive_loss(objective, *(torch.from_numpy(x) for x in one))
            for one in zip(rows.tokens, masked & rows.loss_mask, weights, strict=True)
        )
        assert float(got) == pytest.approx(float(sum(each)), rel=1e-4)


def test_masked_blocks_of_one_equal_the_autoregressive_factorisation(world: Any, tmp_path: Path) -> None:
    """−Σ log p(x_i | mask at i, x_<i), each term from its own forward pass."""
    objective = build_objective(world, tmp_path, block=1, length=16)
    rows = rows_of(objective, 1)
    tokens = torch.from_numpy(rows.tokens[0])
    everything = np.ones_like(rows.tokens, dtype=bool)
    batch = objective._assemble(rows, everything, np.ones(rows.tokens.shape, dtype=np.float32))
    expected = 0.0
    with torch.no_grad():
        for i, learnt in enumerate(rows.loss_mask[0]):
            if learnt:
                one = log_probabilities(objective, tokens, torch.tensor([objective.data.vocabulary.mask]), i)
                expected -= float(one[0, tokens[i]])
        assert float(objective.loss(batch)["bound"].sum) == pytest.approx(expected, rel=1e-4)


def test_one_block_equals_masked_diffusion(world: Any, tmp_path: Path) -> None:
    objective = build_objective(world, tmp_path, block=32)
    assert objective.layout.read == 32  # without a clean copy
    rows = rows_of(objective, 2)
    masked = np.random.default_rng(SEED).random(rows.tokens.shape) < 0.5
    batch = objective._assemble(rows, masked, np.ones(rows.tokens.shape, dtype=np.float32))
    with torch.no_grad():
        states = objective.model(
            batch["inputs"], Bound(), objective.model.new_cache(), 0, bidirectional=True, update_cache=False
        )
        logits = objective.model.logits(states)[..., : objective.data.vocabulary.classes]
        losses = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(rows.tokens).flatten(), reduction="none")
        expected = losses[torch.from_numpy(masked & rows.loss_mask).flatten()].sum()
        assert float(objective.loss(batch)["bound"].sum) == pytest.approx(float(expected), rel=1e-4)


def test_the_estimate_of_the_nelbo_is_unbiased(world: Any, tmp_path: Path) -> None:
    """∫ 1/t · P(exactly these are masked | t) dt is a beta function: enumerate all mask patterns of a block."""
    n = 4
    objective = build_objective(world, tmp_path, block=n, length=2 * n)
    one = rows_of(objective, 1)
    tokens = torch.from_numpy(one.tokens[0])
    learnt = torch.from_numpy(one.loss_mask[0])
    exact = 0.0
    with torch.no_grad():
        for begin in (0, n):
            free = [i for i in range(n) if bool(learnt[begin + i])]
            for pattern in range(1, 1 << len(free)):
                places = [free[i] for i in range(len(free)) if pattern >> i & 1]
                masked = torch.zeros(n, dtype=torch.bool)
                masked[places] = True
                block = tokens[begin : begin + n]
                noisy = torch.where(masked, objective.data.vocabulary.mask, block)
                found = log_probabilities(objective, tokens, noisy, begin).gather(1, block[:, None])[:, 0]
                hidden, shown = len(places), len(free) - len(places)
                chance = gamma(hidden) * gamma(shown + 1) / gamma(hidden + shown + 1)
                exact -= chance * float(found[masked].sum())
        draws = 16384
        many = Rows(*(None if x is None else np.repeat(x, draws, 0) for x in one))
        batch = objective._noisy_batch(many, SEED, np.arange(draws), draws, FULL_RANGE)
        estimate = float(objective.loss(batch)["bound"].sum) / draws
    assert estimate == pytest.approx(exact, rel=0.02)


def test_noise_does_not_depend_on_the_split_into_micro_batches(world: Any, tmp_path: Path) -> None:
    objective = build_objective(world, tmp_path)
    whole = objective.batch(np.arange(8))
    parts = [objective.batch(np.arange(first, first + 2)) for first in range(0, 8, 2)]
    assert torch.equal(whole["inputs"], torch.cat([part["inputs"] for part in parts]))
    assert int(whole["learnt"]) == sum(int(part["learnt"]) for part in parts)
    asked = [part["weights"][part["weights"] > 0] for part in parts]
    assert torch.equal(whole["weights"][whole["weights"] > 0], torch.cat(asked))


def test_the_beginning_of_sequence_token_is_never_masked(world: Any, tmp_path: Path) -> None:
    objective = build_objective(world, tmp_path)
    rows = objective.data.training(np.arange(200))
    first = rows.tokens[:, 0] == objective.data.vocabulary.end
    assert first.any()
    assert not rows.loss_mask[first, 0].any()
    batch = objective._noisy_batch(rows, SEED, np.arange(200), 200, FULL_RANGE)
    assert (batch["inputs"][torch.from_numpy(first), 0] == objective.data.vocabulary.end).all()


def test_training_resumes_bit_for_bit(world: Any, tmp_path: Path, tensors_of: Any) -> None:
    """Also with the clip search, which invalidates the batches that the loader has prefetched."""
    options = (
        "objective=block_diffusion",
        "block_diffusion.block_size=8",
        "block_diffusion.clip_search=true",
        "data.pack=false",
        "train.steps=24",
        "train.lr=1e-2",
        "eval.every=6",
        "train.ema=0.9",
    )
    trainer = world.run(tmp_path / "whole", *options)
    assert trainer.objective.clip != FULL_RANGE
    world.run(tmp_path / "parts", *options, stop_at=9)
    world.run(tmp_path / "parts", *options, resume=True)
    whole, parts = (tensors_of(tmp_path / name / "checkpoints/step-00000024") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    losses = [event["loss"] for event in trainer.monitor.view.events if event["type"] == "eval"]
    assert losses[-1] < losses[0] - 0.3


def test_the_contenders_of_the_throughput_benchmark() -> None:
    from redline.bench.throughput import contenders
    from redline.recipe.load import load

    names = {recipe: [one.name for one in contenders(load(recipe).recipe)] for recipe in ("owt-bd3lm", "pretrain-350m")}
    assert names["owt-bd3lm"] == ["redline", "redline-fp8", "masked", "dense", "textbook"]
    assert names["pretrain-350m"] == ["redline", "redline-fp8", "plain"]


def test_a_validation_text_shorter_than_a_window_is_not_held_out(world: Any, tmp_path: Path) -> None:
    """It is never evaluated, so no stop condition may wait for its loss."""
    data = build_objective(world, tmp_path, length=32).data
    assert data.facts.val_tokens == len(data.text.held_out) >= 32
    short = replace(data, seq_len=len(data.text.held_out) + 1)
    assert short.held_out == 0
    assert short.facts.val_tokens == 0


def test_loading_another_clip_invalidates_prefetched_batches(world: Any, tmp_path: Path) -> None:
    objective = build_objective(world, tmp_path)
    objective.load_state(objective.state())
    assert not objective.batches_changed()
    objective.load_state({**objective.state(), "clip": [0.45, 0.95]})
    assert (objective.clip.low, objective.clip.high) == (0.45, 0.95)
    assert objective.batches_changed()
