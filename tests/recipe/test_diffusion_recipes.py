"""Recipes of both diffusion jobs: what they lay out, what they refuse, and what the guide's presets make of them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from redline.cli.main import app
from redline.errors import RecipeError, UserError
from redline.hardware.machine import Machine, named_gpu
from redline.jobs.base import job, options_of
from redline.planning.layout import Layout
from redline.recipe.load import known_keys, load, shipped
from redline.recipe.resolve import DataFacts, resolve

FACTS = DataFacts(50_262, 0, 0, "", "gpt2", "", estimated=True)
NAMES = ("gsm8k-bd3lm", "gsm8k-hdp", "owt-bd3lm", "problems-bd3lm", "problems-hdp")
BLOCK, PLAN = "block_diffusion", "hierarchical_diffusion"


def layout(name: str, *overrides: str) -> Layout:
    recipe = load(name, overrides).recipe
    found: Layout = job(recipe.objective).layout(recipe)
    return found


def problems(name: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        load(name, overrides)
    return {problem.key: problem.line() for problem in caught.value.problems}


# --- layouts


def test_a_text_is_cut_into_equal_blocks() -> None:
    found = layout("owt-bd3lm")
    assert (found.length, set(found.sizes)) == (1024, {16})
    for size in (4, 8, 1024):
        assert set(layout("owt-bd3lm", f"{BLOCK}.block_size={size}").sizes) == {size}


def test_a_solution_is_cut_and_its_question_is_not() -> None:
    question, solution = layout("gsm8k-bd3lm").segments
    assert (question.name, question.length, question.given, question.blocks) == ("question", 128, True, 1)
    assert (solution.name, solution.length, solution.given, solution.blocks) == ("solution", 384, False, 24)


def test_the_guides_three_segments() -> None:
    question, plan, execution = layout("gsm8k-hdp").segments
    assert [(s.name, s.length) for s in (question, plan, execution)] == [
        ("question", 128),
        ("plan", 128),
        ("execution", 256),
    ]
    assert (question.given, plan.given, execution.given) == (True, False, False)
    assert (plan.blocks, execution.blocks) == (1, 16), "the plan as a whole, the execution in fine blocks"
    fine = layout("gsm8k-hdp", f"{PLAN}.plan_block=32", f"{PLAN}.plan_weight=0.5", f"{PLAN}.execution_weight=2")
    assert fine.segments[1].blocks == 4
    assert [segment.weight for segment in fine.segments] == [1.0, 0.5, 2.0]


def test_a_sequence_is_as_long_as_its_segments() -> None:
    assert load("gsm8k-hdp").recipe.data.seq_len == 512
    assert load("gsm8k-hdp", [f"{PLAN}.question=64", f"{PLAN}.execution=1.6k"]).recipe.data.seq_len == 64 + 128 + 1600
    assert load("gsm8k-hdp", ["data.seq_len=512"]).recipe.data.seq_len == 512


def test_baseline_and_hierarchy_have_one_budget() -> None:
    """What is read and scored for a problem, and how long it is trained, are the same."""
    for names in (("gsm8k-bd3lm", "gsm8k-hdp"), ("problems-bd3lm", "problems-hdp")):
        first, second = (load(name).recipe for name in names)
        assert (first.train, first.model) == (second.train, second.model)
        one, other = (layout(name) for name in names)
        assert (one.length, one.read, one.denoised) == (other.length, other.read, other.denoised)


# --- what is refused


@pytest.mark.parametrize(
    ("name", "override", "key", "says"),
    [
        ("owt-bd3lm", f"{BLOCK}.block_size=48", f"{BLOCK}.block_size", "48 does not divide data.seq_len 1024. Use 16,"),
        ("owt-bd3lm", "data.seq_len=1000", f"{BLOCK}.block_size", "Use 8, or make data.seq_len 8 longer."),
        ("owt-bd3lm", f"{BLOCK}.block_size=2048", f"{BLOCK}.block_size", "is longer than data.seq_len 1024. Use at"),
        ("gsm8k-bd3lm", f"{BLOCK}.question=100", f"{BLOCK}.block_size", "does not divide the 412 positions after"),
        ("gsm8k-bd3lm", f"{BLOCK}.question=512", f"{BLOCK}.question", "leaves nothing of data.seq_len 512"),
        ("gsm8k-bd3lm", f"{BLOCK}.question=508", f"{BLOCK}.block_size", "16 is longer than the 4 positions after"),
        ("gsm8k-hdp", f"{PLAN}.plan_block=48", f"{PLAN}.plan_block", "48 does not divide the plan's 128 positions."),
        ("gsm8k-hdp", f"{PLAN}.plan_block=256", f"{PLAN}.plan_block", "256 is longer than the plan's 128 positions."),
        (
            "gsm8k-hdp",
            f"{PLAN}.execution=8",
            f"{PLAN}.execution_block",
            "16 is longer than the execution's 8 positions",
        ),
        ("gsm8k-hdp", "data.seq_len=400", "data.seq_len", "400 is not question 128 + plan 128 + execution 256 = 512."),
        ("owt-bd3lm", f"{BLOCK}.clip_high=1e-3", f"{BLOCK}.clip_low", "0.001 is not below block_diffusion.clip_high"),
        ("owt-bd3lm", f"{BLOCK}.clip_low=0", f"{BLOCK}.clip_low", "must be above 0"),
        ("owt-bd3lm", f"{BLOCK}.clip_high=1.5", f"{BLOCK}.clip_high", "at most 1"),
        ("gsm8k-hdp", f"{PLAN}.sampler_steps=4", f"{PLAN}.sampler_steps", "first_hitting"),
        ("gsm8k-hdp", f"{PLAN}.sampler=ddpm", f"{PLAN}.sampler", "not one of first_hitting, ancestral"),
        ("gsm8k-hdp", f"{PLAN}.question=0", f"{PLAN}.question", "at least 1"),
        ("gsm8k-hdp", f"{PLAN}.question=long", f"{PLAN}.question", "'long' is not a count"),
        ("gsm8k-hdp", f"{PLAN}.plan_weight=-1", f"{PLAN}.plan_weight", "at least 0"),
        ("gsm8k-hdp", f"{PLAN}.block_size=16", f"{PLAN}.block_size", "is not a key redline knows"),
        ("owt-bd3lm", "data.pack=true", "data.pack", "document masks"),
        ("gsm8k-hdp", "data.stream=true", "data.stream", "text"),
        ("gsm8k-bd3lm", "data.stream=true", "data.stream", "text"),
        ("owt-bd3lm", "data.tokenizer=base", "data.tokenizer", "the tokenizer of model.base, which is not set."),
        ("gsm8k-hdp", "model.quant=nf4", "model.quant", "hierarchical_diffusion, which trains all weights."),
        ("gsm8k-hdp", "model.lora.r=4", "model.lora", "hierarchical_diffusion, which trains all weights."),
    ],
)
def test_a_problem_is_named_with_its_key(name: str, override: str, key: str, says: str) -> None:
    found = problems(name, override)
    assert list(found) == [key]
    assert says in found[key]


def test_both_loss_weights_cannot_be_zero() -> None:
    found = problems("gsm8k-hdp", f"{PLAN}.plan_weight=0", f"{PLAN}.execution_weight=0")
    assert list(found) == [f"{PLAN}.execution_weight"]


def test_all_problems_at_once() -> None:
    words = ("data.seq_len=400", f"{PLAN}.plan_block=48", f"{PLAN}.clip_high=0.0001", "data.pack=true")
    assert set(problems("gsm8k-hdp", *words)) == {word.partition("=")[0] for word in words} - {f"{PLAN}.clip_high"} | {
        f"{PLAN}.clip_low"
    }


@pytest.mark.parametrize(
    "override",
    ["train.precision=fp8", "model.value_embeddings=2", "model.skips=unet", "model.softcap=15", "data.stream=1"],
)
def test_valid_combinations_are_accepted(override: str) -> None:
    override = override.replace("=1", "=true") if override.startswith("data") else override
    assert load("owt-bd3lm", [override]).recipe


def test_ancestral_steps() -> None:
    recipe: Any = load("gsm8k-hdp", [f"{PLAN}.sampler=ancestral", f"{PLAN}.sampler_steps=8"]).recipe
    assert (recipe.hierarchical_diffusion.sampler, recipe.hierarchical_diffusion.sampler_steps) == ("ancestral", 8)


# --- the guide's numbers


@pytest.mark.parametrize("name", ["gsm8k-bd3lm", "gsm8k-hdp"])
@pytest.mark.parametrize(
    ("preset", "micro", "total", "lr"),
    [
        (None, 128, 512, 6e-4),
        ("conservative", 64, 256, 4.24264e-4),
        ("recommended", 128, 512, 6e-4),
        ("aggressive", 192, 768, 7.34847e-4),
        ("extreme", 256, 1024, 8.48528e-4),
    ],
)
def test_the_guides_presets(name: str, preset: str | None, micro: int, total: int, lr: float) -> None:
    recipe = load(name, [f"train.preset={preset}"] if preset else []).recipe
    plan = resolve(recipe, named_gpu("h200"), FACTS)
    assert (plan.batch.micro, plan.batch.global_batch, plan.batch.accumulation) == (micro, total, 4)
    assert plan.recipe.train.lr == lr, "the guide's rule: 3e-4 at 128, by the square root"
    assert plan.memory.peak < plan.machine.memory_bytes


@pytest.mark.parametrize("name", ["gsm8k-bd3lm", "gsm8k-hdp"])
def test_the_guides_model_and_schedule(name: str) -> None:
    plan = resolve(load(name).recipe, named_gpu("h200"), FACTS)
    model, train = plan.shape, plan.recipe.train
    assert (model.layers, model.d_model, model.heads, model.vocab) == (12, 768, 12, 50_304)
    assert (train.steps, train.warmup_steps, train.ema, train.betas) == (50_000, 5000, 0.9999, (0.9, 0.999))
    assert (train.optimizer, train.clip, plan.recipe.data.seq_len) == ("adamw", 1.0, 512)
    assert plan.recipe.data.tokenizer == "gpt2"


def test_the_papers_numbers() -> None:
    plan = resolve(load("owt-bd3lm").recipe, named_gpu("h200"), FACTS)
    train = plan.recipe.train
    assert (train.lr, train.global_batch, train.warmup_steps, train.ema) == (3e-4, 512, 2500, 0.9999)
    assert plan.recipe.data.source == load("owt-cs336").recipe.data.source


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.attn_backend=flash_attn", "model", "attention", "auto"),
        ("trainer.precision=bf16-mixed", "train", "precision", "bf16"),
        ("+model.gradient_checkpointing=true", "train", "grad_checkpointing", "full"),
        ("+trainer.compile=true", "train", "compile", True),
        ("loader.num_workers=16", "data", "workers", 16),
    ],
)
def test_the_guides_overrides(override: str, section: str, key: str, value: Any) -> None:
    for name in ("gsm8k-bd3lm", "gsm8k-hdp"):
        assert getattr(getattr(load(name, [override]).recipe, section), key) == value


def test_the_small_recipes_are_small() -> None:
    laptop = Machine("cpu", "a CPU", 8 << 30, 8, cpu_flops=4e11)
    for name in ("problems-bd3lm", "problems-hdp"):
        plan = resolve(load(name).recipe, laptop, DataFacts(1030, 10**7, 10**5, "", "", ""))
        assert plan.shape.parameters < 2e6
        hours = plan.plan_event()["hours"]
        assert hours * 60 < 10
        assert plan.recipe.eval.prompt


# --- without data


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_needs_no_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = CliRunner().invoke(app, ["plan", name, "--gpu", "h200", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)
    assert plan["objective"] == load(name).recipe.objective
    assert plan["ceiling"]["tokens_per_s"] > plan["throughput"]["tokens_per_s"] > 0
    assert plan["memory_gib"]["peak"] < plan["memory_gib"]["available"]
    assert plan["horizon"]["steps"]


def test_each_recipe_is_shipped_with_a_description() -> None:
    assert set(NAMES) <= set(shipped())
    assert len({load(name).recipe.description for name in NAMES}) == len(NAMES)


KEYS = [
    *(f"{BLOCK}.{key}" for key in known_keys(options_of(BLOCK))),
    *(f"{PLAN}.{key}" for key in known_keys(options_of(PLAN))),
    *("data.seq_len", "train.micro_batch", "train.preset", "model.attention", "data.pack", BLOCK, PLAN),
]
VALUES = [
    "0",
    "1",
    "7",
    "16",
    "64",
    "512",
    "1k",
    "1B",
    "9" * 330,
    "-1",
    "0.5",
    "1.0",
    "null",
    "true",
    "auto",
    "[]",
    "{}",
]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    overrides=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)).map("=".join), max_size=4),
    gpu=st.booleans(),
)
def test_any_override_is_planned_or_refused(name: str, overrides: list[str], gpu: bool) -> None:
    machine = named_gpu("h200") if gpu else Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
    with contextlib.suppress(UserError):
        resolve(load(name, overrides).recipe, machine, FACTS).plan_event()
