"""What a plan expects of a CPU follows from what the CPU was measured at, and from what its step computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redline.hardware.machine import Machine, cpu_machine
from redline.planning.memory import MATMUL_POSITIONS, QUERIES_AT_ONCE
from redline.recipe.forecast import Forecast, forecast
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve

RATES = {"fp32": 2.4e11, "bf16": 1e12, "copy": 5e10, "cached": 2.3e11}  # two Zen 5 cores
FACTS = DataFacts(4096, 3_700_000, 190_000, "", "train:4096", "")


def planned(*overrides: str, machine: Machine = cpu_machine(RATES)) -> tuple[Resolved, Forecast]:
    recipe = load("quickstart", ["model.size=2m", "train.device=cpu", "train.global_batch=8", *overrides]).recipe
    resolved = resolve(recipe, machine, FACTS)
    return resolved, forecast(resolved)


def speed(*overrides: str, machine: Machine = cpu_machine(RATES)) -> float:
    rate = planned(*overrides, machine=machine)[1].tokens_per_s
    assert rate is not None
    return rate


@pytest.mark.parametrize(("name", "most"), [("bf16", 0.7), ("cached", 0.7), ("copy", 0.2)])
def test_each_rate_takes_its_part_of_a_step(name: str, most: float) -> None:
    faster = cpu_machine({**RATES, name: 2 * RATES[name]})
    gained = speed(machine=faster) / speed() - 1
    assert 0.01 < gained < most


def test_a_cpu_twice_as_fast_in_everything_is_not_twice_as_fast() -> None:
    twice = cpu_machine({name: 2 * rate for name, rate in RATES.items()})
    assert 1.5 < speed(machine=twice) / speed() < 2, "each operation takes its time on any CPU"


def test_longer_rows_smaller_precision_and_orthogonalisation_cost_what_they_compute() -> None:
    assert speed("train.precision=fp32") < speed() / 2
    assert speed("data.seq_len=1024", "train.micro_batch=2") < 0.95 * speed("train.micro_batch=8")
    assert speed("train.optimizer=adamw") > 1.05 * speed()


def test_the_ceiling_is_the_matmul_rate_in_the_precision_of_the_run() -> None:
    for precision in ("bf16", "fp32"):
        resolved, plan = planned(f"train.precision={precision}")
        ceiling = plan.event()["ceiling"]
        assert ceiling["precision"] == precision
        assert ceiling["matmul_rate_tokens_per_s"] == round(RATES[precision] / resolved.flops.computed)
        assert plan.tokens_per_s is not None
        assert plan.tokens_per_s < ceiling["matmul_rate_tokens_per_s"]


def test_a_cpu_whose_copies_were_not_measured_has_a_plan() -> None:
    bare = replace(cpu_machine(RATES), measured=None)
    assert planned(machine=bare)[1].tokens_per_s


def test_the_plan_knows_the_tiles_of_attention_on_a_cpu() -> None:
    from redline.kernels import attention

    assert attention._MOST_POSITIONS == MATMUL_POSITIONS
    assert attention._QUERIES == QUERIES_AT_ONCE
