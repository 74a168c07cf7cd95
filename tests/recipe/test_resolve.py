"""Every auto becomes a value with a reason, from the machine and the data alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import RecipeError
from redline.fields import AUTO
from redline.hardware.machine import Machine
from redline.recipe.forecast import recipe_steps
from redline.recipe.load import flatten, load, shipped
from redline.recipe.resolve import DataFacts, Resolved, resolve

DATA = DataFacts(50257, 10_000_000, 100_000, "data", "gpt2", "tokenizer")
H200 = Machine("cuda", "NVIDIA H200", 141 * 10**9, 16, (9, 0), fast_bf16=True)
V100 = Machine("cuda", "Tesla V100-SXM2-16GB", 16 * 10**9, 16, (7, 0), fast_bf16=False)
CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
FAST_CPU = Machine("cpu", "a CPU with AMX", 8 << 30, 2, cpu_flops=1e12, fast_bf16=True)


def resolved(*overrides: str, name: str = "pretrain-350m", machine: Machine = H200, data: DataFacts = DATA) -> Resolved:
    return resolve(load(name, overrides).recipe, machine, data)


def reasons(plan: Resolved) -> dict[str, Any]:
    return {choice.key: choice for choice in plan.choices}


@pytest.mark.parametrize("machine", [H200, V100, CPU, FAST_CPU], ids=lambda machine: machine.name)
@pytest.mark.parametrize("name", shipped())
def test_no_auto_is_left_and_each_choice_has_a_reason(name: str, machine: Machine) -> None:
    own = load(name).recipe.model.vocab  # of a base that is stated
    plan = resolved(name=name, machine=machine, data=DATA if own == AUTO else replace(DATA, vocab_size=own))
    left = {key for key, value in flatten(plan.recipe.model_dump()) if value == AUTO}
    measured, of_shards = {"model.attention", "train.fp8"}, {"parallel.shard_size", "parallel.accumulate"}
    assert left <= measured | of_shards, "measured when the model is built; read by shards only"
    assert plan.recipe.parallel.mode == "ddp"
    assert all(len(choice.reason) > 3 for choice in plan.choices)
    flat = dict(flatten(plan.recipe.model_dump()))
    assert {c.key: c.value for c in plan.choices} == {c.key: flat[c.key] for c in plan.choices}


@settings(max_examples=150, deadline=None)
@given(
    total=st.integers(1, 4096),
    gigabytes=st.integers(1, 200),
    gpu=st.booleans(),
    seq_len=st.sampled_from([16, 100, 1024, 8192]),
)
def test_micro_times_accumulation_is_the_global_batch(total: int, gigabytes: int, gpu: bool, seq_len: int) -> None:
    machine = Machine("cuda" if gpu else "cpu", "some", gigabytes * 10**9, 4, cpu_flops=1e11, fast_bf16=True)
    plan = resolved(f"train.global_batch={total}", f"data.seq_len={seq_len}", machine=machine)
    train = plan.recipe.train
    assert train.micro_batch * train.accumulation == train.global_batch == total == plan.batch.global_batch
    assert (train.micro_batch, train.accumulation) == (plan.batch.micro, plan.batch.accumulation)


@settings(max_examples=60, deadline=None)
@given(micro=st.integers(1, 64), accumulation=st.integers(1, 64), given_too=st.booleans())
def test_given_values_are_kept(micro: int, accumulation: int, given_too: bool) -> None:
    overrides = [f"train.micro_batch={micro}", f"train.accumulation={accumulation}"]
    plan = resolved(*overrides, f"train.global_batch={micro * accumulation if given_too else 'auto'}")
    assert (plan.batch.micro, plan.batch.accumulation) == (micro, accumulation)
    assert plan.recipe.train.global_batch == micro * accumulation


@settings(max_examples=60, deadline=None)
@given(lr=st.floats(1e-8, 10.0), total=st.integers(1, 2048))
def test_a_number_given_for_the_learning_rate_is_never_touched(lr: float, total: int) -> None:
    plan = resolved(f"train.lr={lr!r}", f"train.global_batch={total}")
    assert plan.recipe.train.lr == lr
    assert "train.lr" not in reasons(plan)


@pytest.mark.parametrize(("batch", "lr"), [(128, 3e-4), (256, 4.24264e-4), (512, 6e-4), (32, 1.5e-4)])
def test_the_square_root_rule(batch: int, lr: float) -> None:
    plan = resolved("train.lr_base=3e-4", "train.batch_base=128", f"train.global_batch={batch}")
    assert plan.recipe.train.lr == pytest.approx(lr, rel=1e-6)
    assert reasons(plan)["train.lr"].reason == f"0.0003·√({batch}/128)"


def test_vocabulary() -> None:
    assert resolved().recipe.model.vocab == 50304
    assert resolved("model.vocab=60000").recipe.model.vocab == 60000
    with pytest.raises(RecipeError, match=r"model\.vocab: 50000 .*at least 50257"):
        resolved("model.vocab=50000")


@pytest.mark.parametrize(
    ("machine", "precision", "says"),
    [
        (H200, "bf16", "tensor cores"),
        (V100, "fp16", "older"),
        (CPU, "fp32", "no fast bf16"),
        (FAST_CPU, "bf16", "this CPU"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_precision_by_machine(machine: Machine, precision: str, says: str) -> None:
    plan = resolved(machine=machine)
    assert plan.recipe.train.precision == precision
    assert says in reasons(plan)["train.precision"].reason


def test_a_given_precision_is_kept_if_possible() -> None:
    assert resolved("train.precision=fp32").recipe.train.precision == "fp32"
    assert resolved("train.precision=fp16").recipe.train.precision == "fp16"
    with pytest.raises(RecipeError, match=r"train\.precision: fp16 is for GPUs.*Use bf16 or fp32"):
        resolved("train.precision=fp16", machine=CPU)


def test_an_unknown_card_has_no_peak() -> None:
    assert V100.peak("bf16") is None
    assert CPU.peak("bf16") is None
    assert H200.peak("bf16") == 989e12
    assert resolved(name="quickstart", machine=V100).recipe.model.size is not None, "a size is chosen all the same"


def test_compile_mode_is_refused_or_warned_of_where_nothing_is_compiled() -> None:
    mode = "train.compile_mode=max-autotune-no-cudagraphs"
    assert not [text for text in resolved(mode, "model.kernels=torch").warnings if "compile_mode" in text]
    assert [text for text in resolved(mode).warnings if "compile_mode" in text], "on this card the blocks are fused"
    assert [text for text in resolved(mode, machine=CPU).warnings if "compile_mode" in text], "compile is off by auto"
    with pytest.raises(RecipeError) as refused:
        load("pretrain-350m", [mode, "train.compile=false"])
    assert [problem.key for problem in refused.value.problems] == ["train.compile_mode"]
    with pytest.raises(RecipeError):
        load("pretrain-350m", ["train.compile_mode=max-autotune"])


def test_compile_by_machine() -> None:
    assert resolved().recipe.train.compile is True
    assert resolved(machine=CPU).recipe.train.compile is False, "no clock says that the run is long"
    assert resolved("train.hours=1", machine=CPU).recipe.train.compile is True
    brief = ("train.hours=1", "train.steps=3", "train.tokens=null", "data.seq_len=32", "model.layers=1")
    small = resolved(*brief, "model.d_model=64", "model.heads=2", machine=CPU)
    assert small.recipe.train.compile is False, "three steps are no hour"
    bare = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11, compiler=False)
    assert "compiler" in reasons(resolved("train.hours=1", machine=bare))["train.compile"].reason


def test_checkpointing_only_when_one_sequence_does_not_fit() -> None:
    assert resolved().recipe.train.grad_checkpointing == "none"
    small = Machine("cuda", "some", 12 * 10**9, 4, (8, 0), fast_bf16=True)
    plan = resolved("data.seq_len=16384", machine=small)
    assert plan.recipe.train.grad_checkpointing in ("selective", "full")
    assert plan.batch.micro == 1
    assert any("GiB" in warning for warning in resolved("data.seq_len=1M", machine=small).warnings)


def test_the_plan_adds_up() -> None:
    plan = resolved().plan_event()
    assert plan["batch"]["tokens_per_step"] == 128 * 1024
    horizon = {key: plan["horizon"][key] for key in ("steps", "tokens", "seconds", "expected_tokens")}
    assert horizon == {"steps": 53406, "tokens": 53406 * 128 * 1024, "seconds": None, "expected_tokens": None}
    parts = {k: v for k, v in plan["memory_gib"].items() if k not in ("peak", "available")}
    assert sum(parts.values()) == pytest.approx(plan["memory_gib"]["peak"], abs=0.01)
    assert plan["memory_gib"]["peak"] <= 0.9 * plan["memory_gib"]["available"]


def test_a_memory_limit_in_gigabytes() -> None:
    """`train.memory_gb` is the same limit on every card, and never more than the card has."""
    small = Machine("cuda", "NVIDIA H100 80GB HBM3", 80 * 10**9, 16, (9, 0), fast_bf16=True)
    plans = [resolved("train.memory_gb=40", machine=machine) for machine in (small, H200)]
    assert plans[0].batch == plans[1].batch
    assert max(plan.memory.peak for plan in plans) <= 40e9
    assert resolved("train.memory_gb=72", machine=small).batch.micro == resolved(machine=small).batch.micro
    assert resolved("train.memory_gb=1000", machine=small).memory.peak <= 80e9


def test_batch_keys_that_fit_only_other_world_sizes_are_refused() -> None:
    recipe = load("quickstart", ["train.global_batch=32", "train.micro_batch=4", "train.accumulation=4"]).recipe
    with pytest.raises(RecipeError, match="any two of the three"):
        resolve(recipe, H200, DATA)
    assert resolve(recipe, H200, DATA, gpus=2).batch.global_batch == 32


def test_a_warm_up_longer_than_the_run_is_warned_of() -> None:
    said = "train.warmup_steps=1000 is more than half of an expected"
    data = replace(DATA, vocab_size=50257)
    assert any(w.startswith(said) for w in resolved("train.hours=5m", name="pretrain-350m", data=data).warnings)
    assert not any(w.startswith(said) for w in resolved("train.hours=1.5", name="pretrain-350m", data=data).warnings)
    assert any(w.startswith(said) for w in resolved("train.steps=1500", name="pretrain-350m", data=data).warnings)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("pretrain-350m", ("model.qk_norm=true",), "with QK norm the fused ones are not measured yet"),
        ("pretrain-350m", ("model.skips=x0", "model.mlp=relu2"), "with the relu2 activation and skips the fused ones"),
        ("pretrain-350m", ("model.value_embeddings=2",), "with value embeddings the fused ones"),
        ("lora-8b", ("finetune.method=full",), "with a base the fused ones"),
    ],
)
def test_kernels_untested_on_a_gpu_are_not_chosen(name: str, words: tuple[str, ...], said: str) -> None:
    data = replace(DATA, vocab_size=50257)
    plan = resolved(*words, name=name, data=data)
    assert plan.recipe.model.kernels == "torch"
    assert reasons(plan)["model.kernels"].reason.startswith(said)
    assert resolved(*words, "model.kernels=fused", name=name, data=data).recipe.model.kernels == "fused", "but may be"


def test_on_a_base_in_nf4_the_fused_blocks_are_chosen() -> None:
    assert resolved(name="qlora-8b", data=replace(DATA, vocab_size=50257)).recipe.model.kernels == "fused"


def test_the_model_of_a_counted_run_is_sized_by_its_real_batch() -> None:
    words = ("train.hours=null", "train.epochs=null", "train.steps=1000")
    parts = resolved(*words, "train.micro_batch=64", "train.accumulation=4", name="quickstart")
    whole = resolved(*words, "train.global_batch=256", name="quickstart")
    assert parts.shape == whole.shape


@pytest.mark.parametrize(("tokens", "steps"), [(257, 1), (256 + 31, 1), (256 + 32, 2), (20, 1)])
def test_an_epoch_has_only_complete_sequences(tokens: int, steps: int) -> None:
    """Tokens that do not fill a sequence or a batch add no step."""
    words = ("train.hours=null", "train.steps=null", "train.epochs=1", "data.seq_len=32", "train.global_batch=8")
    recipe = load("quickstart", list(words)).recipe
    assert recipe_steps(recipe, tokens, tokens_per_step=256) == steps
