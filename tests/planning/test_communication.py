"""Communication time: its properties, and the comparison of world sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.hardware.machine import Machine, named_gpu
from redline.planning.communication import (
    BUCKET,
    HOP_SECONDS,
    WIRE_SHARE,
    Fabric,
    Volume,
    ddp_volume,
    exposed_seconds,
    sharded_volume,
)
from redline.planning.shards import Sharded, Units
from redline.recipe.forecast import ProbeResult, Scaling, forecast, scaling, worlds
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve

FACTS = DataFacts(50257, 10**10, 10**6, "", "gpt2", "")


def planned(gpu: str, *overrides: str, gpus: int = 1, nodes: int = 1) -> Resolved:
    return resolve(load("pretrain-350m", overrides).recipe, named_gpu(gpu), FACTS, gpus=gpus, nodes=nodes)


def scaled(gpu: str, *overrides: str, gpus: int, nodes: int = 1, **how: Any) -> Scaling:
    return scaling(lambda g, n: planned(gpu, *overrides, gpus=g, nodes=n), gpus, nodes, **how)


def test_the_350m_model_by_hand() -> None:
    """1.4 GB of gradients, of which each of eight GPUs sends seven eighths twice."""
    ahead = forecast(planned("h100", gpus=8))
    assert ahead.volume.reduced == 4 * 350_405_632
    sent = 2 * 7 / 8 * 4 * 350_405_632
    assert ahead.volume.sent(8) == sent
    calls = math.ceil(4 * 350_405_632 / BUCKET)
    assert ahead.time
    assert ahead.time.communication == pytest.approx(sent / (WIRE_SHARE * 450e9) + calls * 7 * HOP_SECONDS)


def test_a_node_sends_through_all_its_adapters() -> None:
    assert Fabric(8, 1, 450e9, 50e9).bandwidth == 450e9
    assert Fabric(8, 4, 450e9, 8 * 50e9).bandwidth == 400e9, "the network is the narrower"
    assert Fabric(8, 4, 32e9, 8 * 50e9).bandwidth == 32e9
    assert Fabric(1, 4, None, 50e9).bandwidth == 50e9, "no link is needed"
    assert Fabric(2, 1, None, 50e9).bandwidth is None
    assert Fabric().bandwidth == math.inf


def test_the_network_comes_from_the_recipe() -> None:
    slow, fast = (forecast(planned("h100", f"parallel.network_gbps={gbps}", gpus=8, nodes=4)) for gbps in (100, 3200))
    assert slow.fabric.network == 12.5e9
    assert slow.tokens_per_s
    assert fast.tokens_per_s
    assert slow.tokens_per_s < fast.tokens_per_s
    assert forecast(planned("h100", gpus=8, nodes=4)).tokens_per_s == fast.tokens_per_s, "400 Gbit/s a card is assumed"


@given(
    size=st.floats(1, 1e12),
    gpus=st.integers(1, 8),
    nodes=st.integers(1, 64),
    micro=st.floats(0, 10),
    micros=st.integers(1, 8),
)
def test_exposed_time_is_part_of_all_communication(
    size: float, gpus: int, nodes: int, micro: float, micros: int
) -> None:
    fabric = Fabric(gpus, nodes, 450e9, 50e9)
    units = Units(5, (Sharded(int(size) // 20 + 1, 1),), (Sharded(int(size) // 36 + 1, 1),))
    sharded = {"ranks": gpus, "replicas": nodes, "micros": micros}
    whole = {"ranks": gpus * nodes, "micros": micros, "whole": True}
    volumes = [
        ddp_volume(size),
        sharded_volume(units, **sharded, whole=False),
        sharded_volume(units, **sharded, whole=True),
        sharded_volume(units, **whole),
        sharded_volume(units, **whole, orthogonalised=size),
    ]
    for volume in volumes:
        total, left = fabric.seconds(volume), exposed_seconds(volume, fabric, micro)
        assert total is not None
        assert left is not None
        assert 0 <= left <= total * (1 + 1e-9)
        nothing = exposed_seconds(volume, fabric, 0.0)
        assert nothing == pytest.approx(total, rel=0.2), "with nothing to hide behind all of it shows"
        assert left <= nothing
        assert exposed_seconds(volume, fabric, 2 * micro) <= left + 1e-12  # type: ignore[operator]


@given(rows=st.integers(1, 2000), columns=st.integers(1, 9), world=st.integers(1, 64))
def test_padding_is_less_than_a_row_per_gpu(rows: int, columns: int, world: int) -> None:
    padded = Sharded(rows, columns).padded(world)
    assert 0 <= padded - rows * columns < world * columns
    assert padded % world == 0


def test_world_sizes_double() -> None:
    assert list(worlds(8, 4)) == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4)]
    assert list(worlds(6, 3)) == [(1, 1), (2, 1), (4, 1), (6, 1), (6, 2), (6, 3)]
    assert list(worlds(1, 1)) == [(1, 1)]


def test_the_table_agrees_with_the_plan_of_each_world() -> None:
    table = scaled("h100", gpus=8, nodes=2, price=2.0)
    assert [row.world for row in table.rows] == [1, 2, 4, 8, 16]
    for row in table.rows:
        alone = forecast(planned("h100", gpus=row.gpus, nodes=row.nodes), price=2.0)
        assert row.tokens_per_s == round(alone.tokens_per_s or 0)
        assert row.hours == pytest.approx(alone.hours, abs=1e-4)
        assert row.cost_usd == pytest.approx(2.0 * row.world * (row.hours or 0), abs=0.01)
        assert row.step_ms == pytest.approx(1e3 * row.tokens_per_step / (row.tokens_per_s or 1), rel=1e-3)
        assert row.micro * row.accumulation * row.world * 1024 == row.tokens_per_step == 128 * 1024
        assert 0 < (row.efficiency or 0) <= 1


def test_a_slow_network_makes_scaling_stop_sooner() -> None:
    fast, slow = (scaled("h100", f"parallel.network_gbps={gbps}", gpus=8, nodes=8) for gbps in (3200, 25))
    assert fast.pays_up_to == 32
    assert slow.pays_up_to == 8, "the first node"
    assert "stops paying at 8 cards" in slow.verdict
    assert "by estimate" in slow.verdict


def test_the_verdict_if_every_gpu_pays() -> None:
    table = scaled("h100", gpus=8)
    assert table.pays_up_to == 8
    assert "every card up to 8 pays" in table.verdict


def test_a_world_size_that_does_not_divide_the_batch_is_listed_as_left_out() -> None:
    table = scaled("h100", "train.global_batch=12", gpus=6, nodes=1)
    assert [row.world for row in table.rows] == [1, 2, 4, 6]
    table = scaled("h100", "train.global_batch=6", gpus=6, nodes=1)
    assert [row.world for row in table.rows] == [1, 2, 6]
    assert table.left_out
    assert table.left_out[0].startswith("4 cards: ")


def test_shards_are_gathered_for_every_micro_batch() -> None:
    """FSDP saves memory and pays for it with gathers."""
    small = ("train.micro_batch=4", "train.global_batch=128")
    replicated, sharded = (
        forecast(planned("h100", *small, f"parallel.mode={mode}", gpus=8)) for mode in ("ddp", "fsdp")
    )
    assert (replicated.mode, sharded.mode) == ("ddp", "fsdp")
    assert sharded.volume.gathered > 4 * 2 * 2 * 298_844_160, "four micro-batches, each block twice, in bf16"
    assert sharded.volume.sent(8) > replicated.volume.sent(8)


def test_an_unknown_link_gives_no_scaling() -> None:
    rates = {"bf16": 100e12, "copy": 1e12}
    own = Machine("cuda", "Brandnew X1", 80 << 30, 8, (11, 0), fast_bf16=True, measured=rates)
    recipe = load("pretrain-350m").recipe
    one, two = (forecast(resolve(recipe, own, FACTS, gpus=count)) for count in (1, 2))
    assert one.tokens_per_s
    assert two.tokens_per_s is None
    assert "between cards unknown" in two.source
    table = scaling(lambda g, n: resolve(recipe, own, FACTS, gpus=g, nodes=n), 2, 1)
    assert table.pays_up_to is None
    assert [row.tokens_per_s is None for row in table.rows] == [False, True]


def test_a_probe_of_one_gpu_is_not_a_measurement_of_several() -> None:
    steps = ProbeResult(tokens_per_s=100_000.0, memory_gib=60.0, step_ms=1310.0, compile_s=5.0)
    one, four = (forecast(planned("h100", gpus=count), measured=steps) for count in (1, 4))
    assert (one.source, one.tokens_per_s) == ("measured", pytest.approx(100_000))
    assert four.source == "measured on one card; between cards an estimate"
    assert four.tokens_per_s
    assert 300_000 < four.tokens_per_s < 400_000


def test_one_gpu_sends_nothing() -> None:
    ahead = forecast(planned("h100"))
    assert ahead.volume == Volume()
    assert ahead.event()["communication"] is None
    assert "estimate" not in ahead.source
