"""`flops_per_token.executed` equals the FLOPs that torch dispatches, for every job, forward and backward."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from finetuning import Tuning
from latents import Latents, other_base
from redline.jobs.latent_prefix.costs import longest_bucket_chances
from redline.training.control import RunDirectory

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_padding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the padding of the head's rows to a few sizes: rows without a loss are not counted as executed, so
    they must not be computed here."""
    monkeypatch.setattr("redline.jobs.objective._round_to_quarters", lambda count, most: max(1, count))
    monkeypatch.setattr("redline.jobs.diffusion.objective._padded_size", lambda count, most: max(1, count))


@pytest.fixture(autouse=True)
def fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose torch's fused kernel, whose mask says which pairs count; matmuls compute masked pairs, too."""
    monkeypatch.setattr("redline.kernels.attention._MOST_POSITIONS", 0)


class Counter(TorchDispatchMode):
    """Count FLOPs of matmuls by their sizes, and of attention by the pairs that its mask allows."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in (aten.mm, aten.bmm):
            self.flops += 2.0 * args[0].numel() * args[1].shape[-1]
        elif packet in (aten.addmm, aten.addmm_, aten.baddbmm):
            self.flops += 2.0 * args[1].numel() * args[2].shape[-1]
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += 4.0 * _pairs(args[0], args[1], args[4:5], kwargs) * args[0].shape[-1]
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.flops += 8.0 * _pairs(args[1], args[2], args[7:8], kwargs) * args[1].shape[-1]
        return func(*args, **kwargs)


def _pairs(q: torch.Tensor, k: torch.Tensor, causal: Any, kwargs: dict[str, Any]) -> float:
    """Return the allowed pairs over all rows and heads."""
    shape = (*q.shape[:3], k.shape[2])
    mask = kwargs.get("attn_mask")
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask > float("-inf")
        return float(allowed.expand(shape).sum())
    rows, queries, keys = shape[0] * shape[1], shape[2], shape[3]
    return rows * (queries * (queries + 1) / 2 if (causal and causal[0]) else queries * keys)


def executed(objective: Any, samples: int) -> float:
    """Return the FLOPs per token of data over `samples` training samples and those that complete the last batch."""
    micro, recipe = objective.resolved.batch.micro, objective.recipe
    samples = -(-samples // micro) * micro
    counter = Counter()
    for first in range(0, samples, micro):
        batch = objective.batch(np.arange(first, first + micro))
        with counter:
            terms = objective.loss(batch).values()
            torch.stack([term.sum for term in terms]).sum().backward()
    return counter.flops / (samples * recipe.data.seq_len)


SMALL = ("model.layers=1", "train.micro_batch=4", "data.tokenizer=bytes")
TEXTS = {
    "plain": ("model.layers=2", "data.pack=false", "data.seq_len=32"),
    "grouped": ("model.layers=3", "model.kv_heads=2", "model.mlp=relu2", "data.pack=false", "data.seq_len=128"),
    "packed": ("model.layers=2", "data.pack=true", "data.seq_len=256"),
}
BLOCKS = {
    "blocks": ("data.seq_len=64", "block_diffusion.block_size=8"),
    "one block": ("data.seq_len=128", "block_diffusion.block_size=128", "block_diffusion.clip_low=0.3"),
    "records": (
        "data.source=problems:easy:120",
        "block_diffusion.question=160",
        "block_diffusion.block_size=16",
        "data.seq_len=288",
    ),
}
SEGMENTS = {
    "long plan": (160, 96, 128, 16),
    "short": (128, 64, 96, 8),
    "whole blocks": (96, 96, 192, 64),
}


def of_text(world: Any, tmp_path: Path, *overrides: str) -> Any:
    with RunDirectory(tmp_path / "run") as run:
        return world.trainer(run, *SMALL, *overrides).objective


@pytest.mark.parametrize("shape", TEXTS)
def test_causal_lm(world: Any, tmp_path: Path, shape: str) -> None:
    objective = of_text(world, tmp_path, *TEXTS[shape])
    assert executed(objective, 48) == pytest.approx(objective.resolved.flops.executed, rel=0.01)


@pytest.mark.parametrize("shape", BLOCKS)
def test_block_diffusion(world: Any, tmp_path: Path, shape: str) -> None:
    objective = of_text(world, tmp_path, "objective=block_diffusion", "data.pack=false", *BLOCKS[shape])
    assert executed(objective, 24) == pytest.approx(objective.resolved.flops.executed, rel=0.01)


@pytest.mark.parametrize("shape", SEGMENTS)
def test_hierarchical_diffusion(world: Any, tmp_path: Path, shape: str) -> None:
    question, plan, execution, block = SEGMENTS[shape]
    overrides = (
        "objective=hierarchical_diffusion",
        "data.source=problems:easy:120",
        "data.pack=false",
        f"hierarchical_diffusion.question={question}",
        f"hierarchical_diffusion.plan={plan}",
        f"hierarchical_diffusion.execution={execution}",
        f"hierarchical_diffusion.execution_block={block}",
        f"data.seq_len={question + plan + execution}",
    )
    objective = of_text(world, tmp_path, *overrides)
    assert executed(objective, 24) == pytest.approx(objective.resolved.flops.executed, rel=0.01)


TUNED = {
    "qlora": ("finetune.method=qlora", "train.micro_batch=4"),
    "lora, unpacked": ("finetune.method=lora", "data.pack=false", "model.lora.target_modules=[o_proj,down_proj]"),
    "full, all learnt": ("finetune.method=full", "finetune.learn=all", "data.seq_len=64"),
}


@pytest.mark.parametrize("shape", TUNED)
def test_finetune(world: Any, tiny_base: Path, answers: Path, tmp_path: Path, shape: str) -> None:
    objective = Tuning(world, tiny_base, answers, tmp_path).objective(*TUNED[shape])
    epochs = 4 * len(objective.data.answers.index)  # of a few rows, which fill no whole number of batches
    assert executed(objective, epochs) == pytest.approx(objective.resolved.flops.executed, rel=0.01)


@pytest.fixture(scope="module")
def second_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_base(tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return texts and answers of very different lengths."""
    chance, path = random.Random(3), tmp_path_factory.mktemp("rows") / "rows.jsonl"
    made = [
        {"source": "stone " * chance.randint(1, 40) + str(n), "answer": "red " * chance.choice((1, 12)) + "."}
        for n in range(160)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


WIRED = {
    "one": (1, ("latent_prefix.bytes=64", "latent_prefix.slots=8")),
    "two": (2, ("latent_prefix.bytes=128", "latent_prefix.private_slots=3", "latent_prefix.layers=2")),
    "patches": (
        1,
        ("latent_prefix.bytes=256", "latent_prefix.patch=4", "latent_prefix.kd_weight=0", "train.micro_batch=1"),
    ),
}


@pytest.mark.parametrize("shape", WIRED)
def test_latent_prefix(world: Any, tiny_base: Path, second_base: Path, rows: Path, tmp_path: Path, shape: str) -> None:
    models, overrides = WIRED[shape]
    objective = Latents(world, [tiny_base, second_base][:models], rows, tmp_path).objective(
        *overrides, "train.steps=40"
    )
    epoch = len(objective.data.pairs.index)
    assert executed(objective, epoch) == pytest.approx(objective.resolved.flops.executed, rel=0.01)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3))
def test_padding_to_the_longest_row_of_a_batch(counts: list[int], micro: int) -> None:
    """Compare with all possible batches."""
    rows = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    if micro > len(rows):
        return
    for place in range(len(counts)):
        own = rows.index(place)
        others = list(combinations([row for number, row in enumerate(rows) if number != own], micro - 1))
        longest = [max((place, *batch)) for batch in others]
        expected = [longest.count(bucket) / len(others) for bucket in range(len(counts))]
        assert longest_bucket_chances(counts, place, micro) == pytest.approx(expected)
