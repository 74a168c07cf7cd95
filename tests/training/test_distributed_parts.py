"""Details of several ranks: traffic, bad steps, samples, damaged shards, out of memory, refused batches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_distributed import TEXT

from redline.errors import RecipeError
from redline.hardware.machine import Machine
from redline.planning.batch import BatchPlan, indivisible_batch
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, adapt_to_world, resolve
from redline.runs.events import read_events
from redline.training.checkpoint import (
    DamagedCheckpointError,
    canonical_json,
    find_weights,
    newest_valid,
    read_manifest,
    read_tensors,
    verify,
)
from redline.training.optim import assign_owners, first_row
from redline.training.parallel import buckets
from redline.training.recovery import Failure, reduce_memory
from redline.training.step import data_step
from several import Several

FACTS = DataFacts(50257, 10**9, 10**6, "abc", "gpt2", "def")
H200 = Machine("cuda", "NVIDIA H200", 141 << 30, 16, (9, 0), fast_bf16=True)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_bad_step_on_one_rank_is_skipped_on_all(several: Several, tmp_path: Path, mode: str) -> None:
    """A loss that is not finite on one rank changes the weights on no rank."""

    def poison(trainer: Any) -> None:
        plain = trainer.objective.loss

        def loss(batch: Any) -> Any:
            terms, bad = plain(batch), trainer.state.step == 2 and trainer.ranks.rank == 1 and torch.is_grad_enabled()
            return {n: type(t)(t.sum * (float("nan") if bad else 1.0), t.weight) for n, t in terms.items()}

        trainer.objective.loss = loss

    options = (*TEXT, f"parallel.mode={mode}", "train.optimizer=muon", "train.ema=0.9", "train.schedule=constant")
    run = several.run(tmp_path / "run", 2, *options, "checkpoint.every=1", "checkpoint.keep=9", prepare=poison)
    kept = {step: run / "checkpoints" / f"step-{step:08d}" for step in (2, 3, 4)}
    for stem in ("model", "ema", "optimizer"):
        before, after, later = (read_tensors(kept[step], stem) for step in (2, 3, 4))
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        assert not all(torch.equal(tensor, later[name]) for name, tensor in before.items())


def test_traffic_of_a_step(several: Several, tmp_path: Path) -> None:
    """DDP sends each gradient once per step; FSDP gathers in each micro-batch, and scatters once or in each of them."""
    modes = {"ddp": (), "fsdp": ("parallel.accumulate=whole",), "rows": ("parallel.accumulate=sharded",)}
    for mode, how in modes.items():

        def count(trainer: Any, mode: str = mode) -> None:
            plain = trainer._loop

            def loop() -> Any:
                trainer.parallel.traffic.pop()
                stop = plain()
                seen = vars(trainer.parallel.traffic.pop())
                whole = sum(p.numel() for p in trainer.parameters.values())
                (tmp_path / f"{mode}-{trainer.ranks.rank}.json").write_text(json.dumps({**seen, "own": whole}))
                return stop

            trainer._loop = loop

        options = (*TEXT[:-1], "train.steps=3", "train.micro_batch=1", *how)
        options += (f"parallel.mode={'ddp' if mode == 'ddp' else 'fsdp'}",)
        several.run(tmp_path / mode, 2, *options, prepare=count)
    model = read_tensors(newest_valid(tmp_path / "ddp/checkpoints"), "model")  # type: ignore[arg-type]
    size = 4 * sum(tensor.numel() for tensor in model.values())
    copies = [json.loads((tmp_path / f"ddp-{rank}.json").read_text()) for rank in (0, 1)]
    assert [found["reduced"] for found in copies] == [3 * size] * 2
    shares = [json.loads((tmp_path / f"fsdp-{rank}.json").read_text()) for rank in (0, 1)]
    blocks = 4 * sum(tensor.numel() for name, tensor in model.items() if name.startswith("blocks."))
    assert [found["scattered"] for found in shares] == [3 * size] * 2  # every dimension here is even
    assert [found["gathered"] for found in shares] == [3 * 4 * (size + blocks)] * 2
    assert sum(found["own"] for found in shares) == size // 4
    rows = [json.loads((tmp_path / f"rows-{rank}.json").read_text()) for rank in (0, 1)]
    assert rows == [{**share, "scattered": 3 * 4 * size} for share in shares]


def test_fsdp_samples_and_its_checkpoint_is_read_as_one(several: Several, tmp_path: Path) -> None:
    """Sampling needs all ranks; a sharded checkpoint is evaluated and exported like any other."""
    options = (*TEXT, "eval.samples=1", "eval.sample_tokens=8", "train.ema=0.9")
    several.run(tmp_path / "one", 1, *options)
    run = several.run(tmp_path / "shares", 2, *options, "parallel.mode=fsdp")
    texts = [
        [e["text"] for e in read_events(r / "events.jsonl") if e["type"] == "sample"] for r in (tmp_path / "one", run)
    ]
    assert len(texts[0]) == 2
    assert texts[0] == texts[1]
    weights = find_weights(run)
    assert weights.kind == "ema"
    assert len(weights.fingerprint) == 64
    for name, tensor in find_weights(tmp_path / "one").tensors().items():
        torch.testing.assert_close(weights.tensors()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_damaged_shard_is_noticed(several: Several, tmp_path: Path) -> None:
    run = several.run(tmp_path / "run", 2, *TEXT, "parallel.mode=fsdp", "checkpoint.every=2", "checkpoint.best=false")
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    for name in ("model-00002-of-00002.safetensors", "optimizer.index.json"):
        whole = (newest / name).read_bytes()
        (newest / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DamagedCheckpointError, match=name):
            verify(newest)
        assert newest_valid(run / "checkpoints") == run / "checkpoints/step-00000004"
        (newest / name).write_bytes(whole)
    assert verify(newest)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda entry: entry["parts"].pop(), "rows of"),
        (lambda entry: entry["parts"][0].__setitem__(0, "../step-00000002/x.safetensors"), "not part of"),
        (lambda entry: entry["parts"][1].__setitem__(1, 5), "does not agree"),
        (lambda entry: entry.pop("shape"), "cannot be read"),
    ],
)
def test_an_index_that_lies_is_damage(several: Several, tmp_path: Path, lie: Any, words: str) -> None:
    """The digests are right, as they would be in a forged checkpoint."""
    run = several.run(tmp_path / "run", 2, *TEXT[:-1], "train.steps=1", "parallel.mode=fsdp")
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    index = json.loads((newest / "model.index.json").read_bytes())
    lie(index["tensors"]["norm.weight"])
    (newest / "model.index.json").write_bytes(canonical_json(index))
    body = {key: value for key, value in read_manifest(newest).items() if key != "digest"}
    content = (newest / "model.index.json").read_bytes()
    body["files"]["model.index.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    signed = {**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()}
    (newest / "manifest.json").write_bytes(canonical_json(signed))
    with pytest.raises(DamagedCheckpointError, match=words):
        verify(newest)


# --- arithmetic


@given(st.integers(1, 300), st.integers(1, 40))
def test_first_row_is_as_in_torch(rows: int, size: int) -> None:
    found = [first_row(rows, rank + 1, size) - first_row(rows, rank, size) for rank in range(size)]
    chunks = [len(part) for part in torch.arange(rows).chunk(size)]
    assert found == chunks + [0] * (size - len(chunks))


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 1000), min_size=1), st.integers(1, 9))
def test_muon_owners_have_about_equal_work(sizes: dict[str, int], ranks: int) -> None:
    found = assign_owners(sizes, ranks)
    loads = [sum(size for name, size in sizes.items() if found[name] == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= max(sizes.values())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 400))
def test_buckets_hold_every_parameter_once_in_reverse(sizes: list[int], limit: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    found = buckets(parameters, limit)
    assert [id(p) for bucket in found for p in bucket.parameters] == [id(p) for p in reversed(parameters)]
    assert all(bucket.bytes <= limit or len(bucket.parameters) == 1 for bucket in found)


@given(st.sets(st.integers(0, 60)), st.integers(0, 40))
def test_steps_read_all_data_except_skipped(skipped: set[int], steps: int) -> None:
    read = [data_step(step, sorted(skipped)) for step in range(steps)]
    assert read == [step for step in range(steps + len(skipped)) if step not in skipped][:steps]


@given(st.integers(1, 512), st.integers(1, 64))
def test_suggested_batches_are_valid(total: int, world: int) -> None:
    problem = indivisible_batch(total, world)
    assert (problem is None) == (total % world == 0)
    if problem is not None:
        batches, counts = problem.fix.removeprefix("Use train.global_batch=").removesuffix(" GPUs.").split(", or ")
        assert all(int(number) % world == 0 for number in batches.split(" or "))
        assert all(total % int(number) == 0 for number in counts.split(" or "))


@given(st.integers(0, 6), st.integers(1, 4), st.integers(0, 6))
def test_less_memory_never_changes_the_global_batch(micro: int, accumulation: int, failed: int) -> None:
    plan = BatchPlan(2**micro, accumulation, 2)
    after, checkpointing = reduce_memory(plan, "none", [Failure(0, 9, 2**failed, 2, "none")], sharded=False)
    assert after.global_batch == plan.global_batch
    assert after.micro < 2**failed or checkpointing == "full" or plan.micro < 2**failed


@pytest.mark.parametrize(
    ("sharded", "failed_on", "micro"), [(False, 2, 4), (False, 8, 4), (True, 2, 8), (True, 4, 4), (True, 8, 4)]
)
def test_a_failure_with_fewer_shards_does_not_count_with_more(sharded: bool, failed_on: int, micro: int) -> None:
    after, _ = reduce_memory(BatchPlan(8, 1, 4), "none", [Failure(0, 9, 8, failed_on, "none")], sharded=sharded)
    assert after.micro == micro


def test_an_odd_micro_batch_gets_smaller_too() -> None:
    after, checkpointing = reduce_memory(BatchPlan(15, 1, 1), "none", [Failure(0, 9, 3, 1, "none")], sharded=False)
    assert (after, checkpointing) == (BatchPlan(1, 15, 1), "none")


# --- what is chosen, and refused


def resolved(*overrides: str, gpus: int = 4, machine: Machine = H200) -> Any:
    return resolve(load("pretrain-350m", list(overrides)).recipe, machine, FACTS, gpus=gpus)


def test_the_mode_follows_from_memory() -> None:
    small = resolved()
    assert small.recipe.parallel.mode == "ddp"
    assert "a copy of the model needs" in next(c.reason for c in small.choices if c.key == "parallel.mode")
    wide = ("model.layers=48", "model.d_model=6144", "model.heads=48", "model.size=null", "model.d_ff=auto")
    large = resolved(*wide, gpus=8)
    assert large.recipe.parallel.mode == "fsdp"
    assert large.recipe.model.kernels == "torch"
    assert "1/8" in next(c.reason for c in large.choices if c.key == "parallel.mode")
    assert large.memory.optimizer * 8 == pytest.approx(8.0 * large.shape.parameters)
    alone = resolved(gpus=1)
    assert alone.recipe.parallel.mode == "ddp"
    assert not [c for c in alone.choices if c.key == "parallel.mode"]


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("pretrain-350m", ("parallel=fsdp", "model.kernels=fused"), r"model\.kernels"),
        ("pretrain-350m", ("parallel=hsdp",), r"parallel\.mode.*on one node.*Use parallel\.mode=fsdp"),
        ("pretrain-350m", ("parallel.mode=hsdp", "parallel.shard_size=3"), r"parallel\.shard_size.*Use one of 1, 2, 4"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_an_alternative(name: str, overrides: Any, words: str) -> None:
    recipe = load(name, [*overrides]).recipe
    with pytest.raises(RecipeError, match=words):
        resolve(recipe, H200, FACTS, gpus=4)


@pytest.mark.parametrize(
    "words", [("parallel=fsdp", "parallel.shard_size=2"), ("parallel=ddp", "parallel.accumulate=whole")]
)
def test_keys_of_shards_are_refused_where_nothing_reads_them(words: tuple[str, str]) -> None:
    key = words[1].partition("=")[0]
    with pytest.raises(RecipeError) as refused:
        load("pretrain-350m", [words[0].replace("parallel=", "parallel.mode="), words[1]])
    assert [problem.key for problem in refused.value.problems] == [key]


def test_a_node_holds_a_copy_where_it_fits() -> None:
    """With several nodes, shards within each node are preferred: then only gradients pass between nodes."""
    wide = ("model.layers=48", "model.d_model=6144", "model.heads=48", "model.size=null", "model.d_ff=auto")
    recipe = load("pretrain-350m", list(wide)).recipe
    one, two = (resolve(recipe, H200, FACTS, gpus=8, nodes=nodes).recipe.parallel for nodes in (1, 2))
    assert (one.mode, two.mode, two.shard_size) == ("fsdp", "hsdp", 8)
    stated = load("pretrain-350m", ["parallel=hsdp"]).recipe
    assert resolve(stated, H200, FACTS, gpus=4, nodes=2).recipe.parallel.shard_size == 4
    again = adapt_to_world(resolve(stated, H200, FACTS, gpus=4, nodes=2).recipe, 2)
    assert resolve(again, H200, FACTS, gpus=2).recipe.parallel.shard_size == 2
    assert resolve(adapt_to_world(again, 1), H200, FACTS, gpus=1).recipe.parallel.mode == "hsdp"


def test_gradients_are_summed_whole_where_they_fit() -> None:
    small = resolved("parallel=fsdp", "train.micro_batch=2", "train.global_batch=64")
    assert small.recipe.parallel.accumulate == "whole"
    wide = ("model.layers=48", "model.d_model=6144", "model.heads=48", "model.size=null", "model.d_ff=auto")
    large = resolved(*wide, "train.micro_batch=1", "train.accumulation=4", "train.global_batch=auto", gpus=8)
    assert large.recipe.parallel.accumulate == "sharded"
    assert "whole gradients need" in next(c.reason for c in large.choices if c.key == "parallel.accumulate")
    assert resolved("parallel=fsdp", "train.accumulation=1").recipe.parallel.accumulate == "sharded"


def test_a_batch_that_cannot_be_shared_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"Use train.global_batch=125 or 130, or 4 or 8 GPUs"):
        resolved("train.global_batch=128", "train.micro_batch=auto", "train.accumulation=auto", gpus=5)


def test_other_ranks_share_the_same_batch() -> None:
    recipe = resolved("train.global_batch=96", "train.micro_batch=6", "train.accumulation=auto", gpus=4).recipe
    for world in (1, 2, 3, 8, 16):
        batch = resolve(adapt_to_world(recipe, world), H200, FACTS, gpus=world).batch
        assert (batch.global_batch, batch.world) == (96, world)


def test_step_events_hold_the_readings_of_every_rank(
    several: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with invented cards, of which the second is too hot: the event has both, and the warning its rank."""
    from redline.hardware.nvml import Reading
    from redline.training import readings

    def sensors(self: Any) -> Reading:
        hot = self.ranks.rank == 1
        return Reading(power_w=500.0 + self.ranks.rank, temperature_c=91.0, throttle="thermal" if hot else "power_cap")

    monkeypatch.setattr(readings.RankReadings, "read", sensors)
    run = several.run(tmp_path / "run", 2, *TEXT)
    events = read_events(run / "events.jsonl")
    steps = [event for event in events if event["type"] == "step"]
    for event in steps:
        assert event["ranks"]["power_w"] == [500.0, 501.0]
        assert event["ranks"]["throttle"] == ["power_cap", "thermal"]
        assert event["power_w"] == 500.0, "rank 0's, as before"
        assert "gpu_util" not in event["ranks"], "no card reports it"
        for name in ("forward_ms", "data_wait_ms", "memory_gib"):
            assert len(event["ranks"][name]) == 2
            assert all(value is not None and value >= 0 for value in event["ranks"][name])
        assert all(0 < value < event["step_ms"] for value in event["ranks"]["forward_ms"])
    (warning,) = [
        event["message"] for event in events if event["type"] == "warning" and "throttled" in event["message"]
    ]
    assert warning.startswith("rank 1: the GPU is throttled: it is too hot (91 °C)")
    alone = several.run(tmp_path / "alone", 1, *TEXT)
    assert not any("ranks" in event for event in read_events(alone / "events.jsonl") if event["type"] == "step")
