"""The costs of block diffusion, compared with the formula and with counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from redline.hardware.machine import Machine, named_gpu
from redline.jobs.base import costs, job
from redline.jobs.objective import job_runtime
from redline.planning.flops import decoder_flops, layout_flops
from redline.planning.layout import Layout, Segment, uniform
from redline.planning.memory import Kernels
from redline.planning.shapes import DecoderShape
from redline.recipe.forecast import forecast
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve

SMALL = DecoderShape(layers=12, d_model=768, heads=12, kv_heads=12, head_dim=64, d_ff=2048, vocab=50_304)
TRUNK, HEAD = 84_934_656, 38_633_472
FACTS = DataFacts(50_258, 10**9, 10**6, "", "gpt2", "")
RECIPES = ("gsm8k-bd3lm", "gsm8k-hdp", "owt-bd3lm")


def planned(name: str, *overrides: str, gpu: str = "h200") -> Resolved:
    return resolve(load(name, overrides).recipe, named_gpu(gpu), FACTS)


def memory(plan: Resolved, sequences: int, **how: Any) -> float:
    options = {
        "tokens": sequences * plan.recipe.data.seq_len,
        "bytes_per_value": 2,
        "optimizer": "adamw",
        "ema": True,
        "checkpointing": "none",
        "kernels": Kernels(),
        **how,
    }
    peak: float = costs(plan.recipe).memory(plan.shape, **options).peak
    return peak


def test_the_formula_for_small() -> None:
    """6(2·N_trunk + N_head/2) + 12·L·d·(n + L'): 1.25 GFLOP for a token of data."""
    plan = planned("owt-bd3lm")
    assert plan.shape == SMALL
    assert plan.flops.useful == pytest.approx(6 * (2 * TRUNK + 0.5005 * HEAD) + 12 * 12 * 768 * (1024 + 16))
    assert plan.flops.useful / 1e9 == pytest.approx(1.25, abs=5e-3)
    assert plan.flops.formula == "6·(2·N_trunk + 0.5·N_head) + 12·L·d·1040"


def test_the_head_is_counted_only_at_masked_positions() -> None:
    flops = planned("owt-bd3lm").flops
    assert flops.executed == flops.useful, "the mask of blocks has no half that a kernel skips"
    assert flops.recomputed == 0.0
    narrow = planned("owt-bd3lm", "block_diffusion.clip_low=0.6", "block_diffusion.clip_high=0.8").flops
    assert narrow.executed - flops.executed == pytest.approx(6 * (0.7 - 0.5005) * HEAD)


def test_positions_without_a_loss_are_not_counted() -> None:
    """On GSM8K 54 % of the positions after the question are content or the padding that ends it. A plan without data
    states that it assumes all of them are."""
    recipe, facts = load("gsm8k-hdp").recipe, replace(FACTS, rows={"learnt": 0.54})
    blind, read = (resolve(recipe, named_gpu("h200"), known) for known in (FACTS, facts))
    assert blind.flops.assumed
    assert not read.flops.assumed
    scored = 6 * HEAD * 384 / 512 * 0.5005
    assert blind.flops.useful - read.flops.useful == pytest.approx((1 - 0.54) * scored)
    assert read.flops.executed == read.flops.useful
    ahead, without = forecast(read), forecast(blind)
    assert ahead.tokens_per_s == without.tokens_per_s, "calibrated on whole rows"
    peak = read.machine.peak("bf16")
    assert peak
    assert ahead.physical == pytest.approx(peak / read.flops.executed)


def test_a_question_is_computed_once_and_has_no_logits() -> None:
    """Of 512 positions 384 are noised, so 896 are computed."""
    plan = planned("gsm8k-hdp")
    layout = job("hierarchical_diffusion").layout(plan.recipe)
    assert (layout.length, layout.read, layout.denoised) == (512, 896, 384)
    heads = 6 * 0.5005 * HEAD * 384 / 512
    assert plan.flops.useful == pytest.approx(6 * TRUNK * 896 / 512 + heads + 12 * 12 * 768 * layout.pairs / 512)


def test_one_block_is_plain_masked_diffusion() -> None:
    """The same matmuls as next-token prediction, and every query attends to every key."""
    flops = planned("owt-bd3lm", "block_diffusion.block_size=1024").flops
    assert flops.useful == pytest.approx(decoder_flops(SMALL, 1024, scored=0.5005).useful)


def test_recomputation_is_counted_apart() -> None:
    layout = uniform(256, 16)
    plain, full = (layout_flops(SMALL, layout, 0.5, how) for how in ("none", "full"))
    assert (plain.useful, plain.executed) == (full.useful, full.executed)
    down = 12 * 768 * SMALL.d_ff  # no gradient asks for what it makes
    assert full.recomputed == pytest.approx(2 * 2 * (TRUNK - down) + 4 * 12 * 768 * (256 + 16))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_work_of_a_step_equals_executed_flops(name: str, checkpointing: str) -> None:
    plan = planned(name, f"train.grad_checkpointing={checkpointing}")
    how = {"bytes_per_value": 2, "optimizer": "adamw", "ema": True, "checkpointing": checkpointing}
    work = costs(plan.recipe).work(plan.shape, plan.recipe.data.seq_len, **how)
    assert work.matmul + work.attention == pytest.approx(plan.flops.executed)
    assert work.recomputed + work.attention_again == pytest.approx(plan.flops.recomputed)


@pytest.mark.parametrize("name", RECIPES)
def test_two_copies_move_more_bytes_than_one(name: str) -> None:
    plan = planned(name)
    how = {"bytes_per_value": 2, "optimizer": "adamw", "ema": True, "checkpointing": "none"}
    mine = costs(plan.recipe).work(plan.shape, plan.recipe.data.seq_len, **how)
    plain = costs(load("pretrain-125m").recipe).work(plan.shape, plan.recipe.data.seq_len, **how)
    twice = job(plan.recipe.objective).layout(plan.recipe).read / plan.recipe.data.seq_len
    assert mine.touched == pytest.approx(twice * plain.touched)
    assert plain.moved_least < mine.moved_least < 2 * plain.moved_least, "logits of what is hidden alone"
    assert (mine.update, mine.gradient_bytes) == (plain.update, plain.gradient_bytes)


@pytest.mark.parametrize("gpu", ["h100", "h200", "a100-80gb"])
@pytest.mark.parametrize("name", RECIPES)
def test_expected_time_exceeds_best_kernels_which_exceed_the_peak(name: str, gpu: str) -> None:
    plan = planned(name, "train.micro_batch=16", gpu=gpu)
    ahead = forecast(plan)
    assert ahead.tokens_per_s
    assert ahead.reachable
    assert ahead.physical
    assert ahead.tokens_per_s < ahead.reachable < ahead.physical
    peak = plan.machine.peak("bf16")
    assert peak
    assert ahead.physical == pytest.approx(peak / plan.flops.executed)


@pytest.mark.parametrize("name", ["owt-bd3lm", "gsm8k-bd3lm", "gsm8k-hdp"])
def test_the_fused_blocks_are_chosen_where_they_were_timed(name: str) -> None:
    assert planned(name).recipe.model.kernels == "fused"


# benchmarks/results/throughput-bd3lm-h200-20261116.json and throughput-hdp-h200-20261116.json
@pytest.mark.parametrize(
    ("name", "kernels", "precision", "gib", "tokens_per_s"),
    [
        ("owt-bd3lm", "fused", "bf16", 79.9, 314_603),
        ("owt-bd3lm", "torch", "bf16", 92.8, 289_813),
        ("gsm8k-hdp", "fused", "bf16", 36.2, 369_919),
        ("gsm8k-hdp", "torch", "bf16", 43.5, 339_742),
        ("gsm8k-hdp", "fused", "fp8", 33.9, 451_684),
    ],
)
def test_the_plan_is_near_what_was_measured(
    name: str, kernels: str, precision: str, gib: float, tokens_per_s: float
) -> None:
    how = (f"model.kernels={kernels}", f"train.precision={precision}")
    plan = planned(name, "train.micro_batch=128", "train.global_batch=128", *how)
    assert plan.memory.gib()["peak"] == pytest.approx(gib, rel=0.05)
    assert forecast(plan).tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(RECIPES),
    sequences=st.integers(1, 256),
    more=st.integers(1, 64),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
)
def test_memory_grows_with_the_batch(name: str, sequences: int, more: int, checkpointing: str) -> None:
    plan = planned(name)
    less = memory(plan, sequences, checkpointing=checkpointing)
    assert less < memory(plan, sequences + more, checkpointing=checkpointing)
    assert memory(plan, sequences, checkpointing="full") <= memory(plan, sequences)


def test_both_copies_are_kept_and_one_is_scored() -> None:
    """Compared with a decoder of the same shape: activations of twice the positions, no more logits."""
    plan, plain = planned("owt-bd3lm"), planned("pretrain-125m", "model.kernels=torch", "train.ema=0.9999")
    how = {"bytes_per_value": 2, "optimizer": "adamw", "ema": True, "checkpointing": "none", "kernels": Kernels()}
    mine = costs(plan.recipe).memory(plan.shape, tokens=8 * 1024, **how)
    once = costs(plain.recipe).memory(plan.shape, tokens=8 * 1024, **how)
    picked = 2 * 8 * 1024 * 768 * 2  # the scored positions' states, copied, and their gradient
    assert mine.activations == pytest.approx(2 * once.activations + picked)
    assert replace(mine, activations=0.0) == replace(once, activations=0.0)


def test_dense_attention_stores_scores_of_both_copies() -> None:
    plan = planned("owt-bd3lm", "model.attention=dense")
    formed = memory(plan, 1, kernels=Kernels(gpu=False, compiled=False, scores=1024))
    flash = memory(plan, 1, kernels=Kernels(gpu=False, compiled=False))
    assert formed - flash > 4 * 12 * 12 * 2048 * 2048, "in float32, for each head of each layer"


def test_the_question_needs_no_logits() -> None:
    layout = Layout((Segment("question", 96, 96, given=True), Segment("rest", 32, 16)))
    flops = layout_flops(SMALL, layout, 1.0)
    without = layout_flops(replace(SMALL, vocab=64), layout, 1.0)
    assert flops.useful - without.useful == pytest.approx(6 * 768 * (50_304 - 64) * 32 / 128)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("owt-bd3lm", ("data.seq_len=64", "block_diffusion.block_size=8")),
        ("owt-bd3lm", ("data.seq_len=64", "block_diffusion.block_size=64")),
        ("gsm8k-hdp", ("hierarchical_diffusion.question=32", "hierarchical_diffusion.plan=16")),
    ],
    ids=["blocks", "one block", "segments"],
)
def test_flops_are_what_torch_counts(name: str, lengths: tuple[str, ...]) -> None:
    """If every position is masked. Dense attention multiplies every query with every key."""
    small = ["model.layers=2", "model.d_model=64", "model.heads=4", "model.d_ff=192", "model.attention=dense"]
    more = ["train.precision=fp32", "train.compile=false", "train.micro_batch=auto", "train.global_batch=2"]
    facts = DataFacts(512, 10**6, 10**4, "", "bytes", "")
    machine = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
    plan = resolve(load(name, [*small, *more, *lengths]).recipe, machine, facts)
    runtime = job_runtime(plan.recipe.objective)
    objective = runtime.create(plan, runtime.random_data(facts))
    objective.build(torch.device("cpu"))
    batch = objective.worst_batch(2)
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}  # torch counts the others
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        objective.loss(batch)["bound"].sum.backward()
    layout = job(plan.recipe.objective).layout(plan.recipe)
    unseen = 12 * 2 * 64 * (layout.read**2 - layout.pairs) / layout.length
    counted = counter.get_total_flops() / (2 * layout.length)
    head = 6 * (1 - 0.5005) * plan.shape.head_parameters * layout.denoised / layout.length  # here all are hidden
    assert counted == pytest.approx(plan.flops.useful + head + unseen, rel=0.01)
    weights = sum(p.numel() for p in objective.model.parameters())
    assert plan.parameters() == {"total": weights, "trainable": weights, "matmul": plan.shape.matmul_parameters}
