"""Ranks that share each sequence (`parallel.context`) learn what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distributed import JOBS, STEPS, TEXT, curve, losses, stop_at

from finetuning import Tuning
from redline.recipe.forecast import communication_volume
from redline.recipe.resolve import adapt_to_world
from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid, read_state, read_tensors, verify
from redline.training.step import micro_batch_seed
from several import Several

PLAIN = tuple(option for option in TEXT if not option.startswith("data.pack"))
RICH = (
    *("model.qk_norm=true", "model.value_embeddings=1", "model.skips=unet", "model.qkv_bias=true"),
    *("model.kv_heads=1", "train.ema=0.9"),
)
KINDS: dict[str, tuple[str, ...]] = {
    "causal": (*PLAIN, "data.pack=false", *RICH),
    "packed": (*TEXT, *RICH),
    "packed, fused CPU kernel": (*TEXT, "model.attention=flash"),
    "blocks, in stages": (*JOBS["blocks"], "block_diffusion.causal_warmup=3", "block_diffusion.shift=true"),
    "one block": (*JOBS["blocks"], "block_diffusion.block_size=32"),
    "plans": JOBS["plans"],
    "tuned": JOBS["tuned"],
}


def weights(run: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    return dict(read_tensors(newest, stem))


def assert_equal_runs(found: Path, expected: Path) -> None:
    """Losses, gradient norms, evaluations and weights agree within 1e-5."""
    assert np.array(curve(found)) == pytest.approx(np.array(curve(expected)), abs=1e-5)
    evaluations = [
        [e["loss"] for e in read_events(r / "events.jsonl") if e["type"] == "eval"] for r in (found, expected)
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5)
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_sequences_learn_what_one_process_does(
    several: Several, kind: str, tiny_base: Path, answers: Path, tmp_path: Path
) -> None:
    """2 and 4 ranks on each sequence, and 2 × 2: groups of two that read different rows."""
    if kind == "tuned":
        Tuning(several.world, tiny_base, answers, tmp_path)
    alone = several.run(tmp_path / "alone", 1, *KINDS[kind])
    assert len(losses(alone)) == STEPS
    for size, context in ((2, 2), (4, 4), (4, 2)):
        run = several.run(tmp_path / f"{size}-{context}", size, *KINDS[kind], f"parallel.context={context}")
        assert_equal_runs(run, alone)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fsdp_over_ranks_that_share_sequences(several: Several, tmp_path: Path, optimizer: str) -> None:
    """Shards over all four ranks, two on each sequence; blocks are recomputed, so keys are gathered again."""
    options = (*TEXT, f"train.optimizer={optimizer}", "train.ema=0.9")
    alone = several.run(tmp_path / "alone", 1, *options)
    more = ("parallel.mode=fsdp", "parallel.context=2", "train.grad_checkpointing=full")
    run = several.run(tmp_path / "shares", 4, *options, *more)
    assert np.array(curve(run)) == pytest.approx(np.array(curve(alone)), abs=2e-5)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_exchanged_bytes_equal_the_plan(several: Several, tmp_path: Path, checkpointing: str) -> None:
    def count(trainer: Any) -> None:
        plain, context = trainer._loop, trainer.objective.context

        def loop() -> Any:
            assert (context.gathered, context.scattered) == (0, 0), "dry runs exchange nothing"
            stop = plain()
            planned = communication_volume(trainer.resolved)
            found = [context.gathered, context.scattered, planned.keys_gathered, planned.keys_scattered]
            (tmp_path / f"{trainer.ranks.rank}.json").write_text(json.dumps(found))
            return stop

        trainer._loop = loop
        trainer.evaluator.evaluate = lambda state, micro: state

    options = (*TEXT, f"train.grad_checkpointing={checkpointing}", "parallel.context=2", "model.kv_heads=1")
    several.run(tmp_path / "run", 4, *options, prepare=count)
    for rank in range(4):
        gathered, scattered, *planned = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [gathered, scattered] == [STEPS * size for size in planned]
        assert scattered > 0


def test_a_run_resumes_with_any_number_of_ranks_on_a_sequence(several: Several, tmp_path: Path) -> None:
    """1 → 2 ranks on each sequence → 2 × 2 → 4 → two ranks that read whole rows → 1."""
    options = (*TEXT[:-1], "train.ema=0.9", "train.global_batch=8", "train.micro_batch=2", "train.steps=12")
    alone = several.run(tmp_path / "alone", 1, *options)
    run, steps = tmp_path / "run", iter(range(2, 14, 2))
    for size, context in ((1, 1), (2, 2), (4, 2), (4, 4), (2, 1), (1, 1)):
        stop = next(steps)
        if size == 1:
            several.world.run(run, *options, resume=stop > 2, stop_at=stop)
        else:
            more = (f"parallel.context={context}",)
            several.run(run, size, *options, *more, resume=True, prepare=lambda t, s=stop: stop_at(t, s, 0))
        newest = newest_valid(run / "checkpoints")
        assert newest is not None
        assert verify(newest)["step"] == stop
    assert np.array(curve(run)) == pytest.approx(np.array(curve(alone)), abs=1e-5)


def test_restarts_are_bitwise(several: Several, tmp_path: Path) -> None:
    options = (*TEXT, "parallel.context=2", "model.dropout=0.1", "train.ema=0.9")
    several.run(tmp_path / "whole", 2, *options)
    several.run(tmp_path / "parts", 2, *options, prepare=lambda t: stop_at(t, 3))
    assert read_state(newest_valid(tmp_path / "parts/checkpoints"))["step"] == 3
    several.run(tmp_path / "parts", 2, *options, resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    for stem in ("model", "ema", "optimizer"):
        expected, got = (weights(tmp_path / r, stem) for r in ("whole", "parts"))
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_fewer_ranks_than_share_a_sequence_resume_with_smaller_groups(several: Several) -> None:
    """One process, which evaluates and samples, reads whole rows."""
    recipe = several.world.recipe(*TEXT, "parallel.context=4")
    adapted = [adapt_to_world(recipe, size).parallel.context for size in (1, 2, 4, 6, 8)]
    assert adapted == [1, 2, 4, 2, 4]


def test_parts_of_a_row_have_dropout_of_their_own() -> None:
    seeds = [micro_batch_seed(7, step, micro, part) for step in range(20) for micro in range(20) for part in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert micro_batch_seed(7, 3, 2) == micro_batch_seed(7, 3, 2, part=0)
