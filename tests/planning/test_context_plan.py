"""The plan of a run whose ranks share sequences: batch, memory and messages; and what is refused, with a fix."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.errors import RecipeError, UsageError
from redline.hardware.machine import Machine
from redline.launch.plan import _check_probe
from redline.launch.processes import check_world
from redline.planning.batch import BatchPlan
from redline.planning.context import indivisible_sequence, indivisible_world
from redline.recipe.forecast import communication_volume, forecast
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.training.recovery import Failure, reduce_memory

FACTS = DataFacts(50257, 10**9, 10**6, "abc", "gpt2", "def")
H100 = Machine("cuda", "NVIDIA H100", 80 << 30, 16, (9, 0), fast_bf16=True)


def planned(*overrides: str, gpus: int = 8) -> Resolved:
    options = ("data.seq_len=65536", "train.global_batch=8", "train.micro_batch=1", "train.accumulation=auto")
    recipe = load("pretrain-350m", [*options, *overrides]).recipe
    return resolve(recipe, H100, FACTS, gpus=gpus)


def test_the_batch_of_groups() -> None:
    for context in (1, 2, 4, 8):
        plan = planned(f"parallel.context={context}").batch
        assert plan == BatchPlan(1, context, 8, context)
        assert (plan.global_batch, plan.data_ranks) == (8, 8 // context)
        assert BatchPlan(*plan.to_json()) == plan
    assert BatchPlan(*[2, 3, 4]).context == 1, "as older checkpoints have it"
    assert BatchPlan(4, 1, 8, 2).halved() == BatchPlan(2, 2, 8, 2)


def test_activations_and_messages() -> None:
    whole, shared = (planned(f"parallel.context={n}", "train.grad_checkpointing=full") for n in (1, 4))
    foreign = 2 * shared.shape.d_kv * 65536 * 2 * 3 / 4
    assert shared.memory.activations == pytest.approx(whole.memory.activations / 4 + 2 * foreign, rel=0.01)
    volume = communication_volume(shared)
    layer = 2 * shared.shape.d_kv * 65536 * 2
    micros = shared.batch.accumulation
    assert volume.keys_gathered == 2 * shared.shape.layers * layer * micros, "again for the recomputation"
    assert volume.keys_scattered == shared.shape.layers * layer * micros
    alone = communication_volume(whole)
    assert volume.reduced == alone.reduced
    assert volume.sent(8) - alone.sent(8) == pytest.approx(3 / 4 * (volume.keys_gathered + volume.keys_scattered))
    assert alone.keys_sent == 0
    event = forecast(shared).event()["communication"]
    assert event["keys_gathered_bytes"] == volume.keys_gathered
    assert "keys_gathered_bytes" not in forecast(whole).event()["communication"]
    assert ("parallel.context", 4) in [(choice.key, choice.value) for choice in shared.choices]


def test_a_card_needs_as_long_for_its_part_as_one_card_for_the_whole() -> None:
    """Without messages, as many cards compute as many tokens in the same time however they share sequences."""
    times = []
    for context in (1, 2, 8):
        time = forecast(planned(f"parallel.context={context}")).time
        assert time is not None
        times.append(time.total - (time.exposed or 0.0))
    assert times == pytest.approx([times[0]] * 3, rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "gpus", "what", "fix"),
    [
        (["parallel.context=3"], 3, "65,536 positions", "parallel.context=2"),
        (["parallel.context=2"], 3, "2 does not divide 3 GPUs", "--gpus 4, or parallel.context=1"),
        (["parallel.context=8"], 4, "8 does not divide 4 GPUs", "--gpus 8, or parallel.context=4"),
        (["parallel.context=2", "parallel.context_backend=ring", "data.pack=true"], 2, "packed", "gather"),
        (["parallel.context_backend=ring"], 2, "does nothing", "parallel.context"),
        (
            ["parallel.context=2", "train.global_batch=9"],
            4,
            "9 sequences cannot be shared by 2",
            "train.global_batch=8",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(overrides: list[str], gpus: int, what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(*overrides, gpus=gpus)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert fix in problem.fix


def test_rings_need_gpus() -> None:
    recipe = load("pretrain-350m", ["parallel.context=2", "parallel.context_backend=ring", "train.device=cpu"]).recipe
    with pytest.raises(RecipeError, match="ring needs GPUs"):
        resolve(recipe, Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11), FACTS, gpus=2)


def test_jobs_that_need_whole_sequences() -> None:
    with pytest.raises(RecipeError, match="latent_prefix read short rows"):
        load("latentwire-squad", ["parallel.context=2"])


def test_copies_of_diffusion_are_divided_each() -> None:
    options = ["objective=block_diffusion", "data.pack=false", "parallel.context=4", "data.seq_len=64"]
    assert load("quickstart", [*options, "block_diffusion.block_size=8"]).recipe.parallel.context == 4
    with pytest.raises(RecipeError, match="60 positions"):
        load("quickstart", [*options, "data.seq_len=60", "block_diffusion.block_size=4"])


def test_processes_and_probes_are_refused_at_once() -> None:
    recipe = load("quickstart", ["parallel.context=4", "train.device=cpu", "train.global_batch=6"]).recipe
    with pytest.raises(RecipeError, match="4 does not divide 6 GPUs"):
        check_world(recipe, 6)
    with pytest.raises(RecipeError, match="6 sequences cannot be shared by 4"):
        check_world(recipe, 16)
    with pytest.raises(UsageError, match="one card cannot measure it"):
        _check_probe(planned("parallel.context=2"), "auto")


@given(st.integers(1, 64), st.integers(1, 5000))
def test_suggested_lengths_and_contexts_are_valid(size: int, length: int) -> None:
    problem = indivisible_sequence(size, [length], "")
    assert (problem is None) == (size == 1 or length % (2 * size) == 0)
    if problem is not None:
        fewer, lengths = re.fullmatch(r"Use parallel.context=(\d+), or data.seq_len of (.+)\.", problem.fix).groups()  # type: ignore[union-attr]
        assert indivisible_sequence(int(fewer), [length], "") is None
        assert all(indivisible_sequence(size, [int(n.replace(",", ""))], "") is None for n in lengths.split(" or "))


@given(st.integers(1, 64), st.integers(1, 64))
def test_suggested_worlds_are_valid(size: int, world: int) -> None:
    problem = indivisible_world(size, world)
    assert (problem is None) == (world % size == 0)
    if problem is not None:
        more, fewer = map(int, re.findall(r"\d+", problem.fix))
        assert indivisible_world(size, more) is None
        assert indivisible_world(fewer, world) is None


def test_a_failure_with_fewer_ranks_on_a_sequence_does_not_count_with_more() -> None:
    def after(failed_on: int) -> Any:
        return reduce_memory(
            BatchPlan(8, 2, 4, 2), "none", [Failure(0, 9, 8, 4, "none", context=failed_on)], sharded=False
        )

    assert after(1)[0] == BatchPlan(8, 2, 4, 2)
    assert after(2)[0] == BatchPlan(4, 4, 4, 2)
