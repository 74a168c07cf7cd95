"""The costs of fine-tuning equal those of the built model and what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from redline.hardware.machine import Machine, named_gpu
from redline.jobs.finetune.costs import Costs
from redline.jobs.objective import job_runtime
from redline.models.pretrained import adapted_linears
from redline.planning.shapes import TARGETS, Adapter, DecoderShape, matrix_sides, nf4_bytes
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve

SHAPE = DecoderShape(layers=3, d_model=128, heads=4, kv_heads=2, head_dim=32, d_ff=256, vocab=512, tied=False)
FACTS = DataFacts(512, 10**6, 10**4, "", "base", "")
STATED = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab")
CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)


def resolved(*overrides: str) -> Resolved:
    stated = [f"model.{name}={getattr(SHAPE, name)}" for name in STATED]
    free = ["model.tied=false", "data.seq_len=64", "train.precision=fp32", "train.global_batch=2"]
    return resolve(load("qlora-smollm2", [*stated, *free, *overrides]).recipe, CPU, FACTS)


def built(plan: Resolved) -> Any:
    runtime = job_runtime("finetune")
    objective = runtime.create(plan, runtime.random_data(FACTS))
    objective.build(torch.device("cpu"))
    return objective


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.lora.r=5", "model.lora.target_modules=[q_proj, down_proj]"),
        ("finetune.method=lora",),
        ("model.quant_double=false",),
    ],
    ids=["qlora", "two of seven", "lora", "scales in float32"],
)
def test_parameters_and_the_bytes_of_the_base(overrides: tuple[str, ...]) -> None:
    plan = resolved(*overrides)
    model, costs = built(plan).model, Costs(plan.recipe)
    counted = costs.parameters(plan.shape)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted["trainable"] == plan.parameters()["trainable"] == trained
    assert counted["total"] == plan.shape.parameters + trained
    assert costs.adapter is not None
    held = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    for linear in adapted_linears(model).values():
        if linear.base.plain is not None:
            held += linear.base.plain.numel() * linear.base.plain.element_size()
        for part in linear.base.quantised:
            held += part.codes.numel() + part.scales.numel() * part.scales.element_size()
            held += 0 if part.nested is None else 4 * part.nested[1].numel()
    assert costs.adapter.base_bytes(plan.shape, 4) == pytest.approx(held, rel=2e-3)


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_flops_are_what_torch_counts(method: str) -> None:
    keys = () if method != "full" else ("model.lora.alpha=16",)
    plan = resolved(f"finetune.method={method}", "model.attention=dense", "data.pack=false", *keys)
    objective = built(plan)
    batch = objective.worst_batch(2)
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}  # torch counts the others
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        objective.loss(batch)["cross_entropy"].sum.backward()
    per_token = counter.get_total_flops() / batch["inputs"].numel()
    # what is frozen has no gradient of its input in the first layer: an eighth of a tenth here
    assert per_token == pytest.approx(plan.flops.useful, rel=0.03)


def test_the_published_count_for_eight_billion() -> None:
    """Rank 16 on all seven matrices of Llama-3.1-8B has 41,943,040 parameters."""
    plan = resolve(load("qlora-8b").recipe, named_gpu("h200"), DataFacts(128_256, 10**7, 10**5, "", "base", ""))
    assert plan.shape.parameters == 8_030_261_248
    assert plan.parameters()["trainable"] == 41_943_040
    assert plan.memory.gib()["weights"] < 6.0, "half a byte each, and two matrices of the vocabulary in bf16"
    assert plan.flops.formula == "4·N_base + 6·N_lora + 12·L·d·T"


def test_recomputation_keeps_less() -> None:
    stored, recomputed = (resolved(f"train.grad_checkpointing={how}") for how in ("none", "full"))
    assert recomputed.memory.activations < stored.memory.activations
    assert recomputed.flops.computed > recomputed.flops.executed == stored.flops.executed
    assert recomputed.flops.useful == stored.flops.useful


def test_each_adapter_target_is_a_matrix_of_a_block() -> None:
    sides = matrix_sides(SHAPE)
    assert set(sides) == set(TARGETS)
    assert sum(a * b for a, b in sides.values()) == SHAPE.layer_matmul_parameters
    one = Adapter(8, ("k_proj",))
    assert one.parameters(SHAPE) == 3 * 8 * (128 + 64)


def test_bits_of_nf4() -> None:
    assert 8 * nf4_bytes(1.0, double=True) == pytest.approx(4.127, abs=1e-3)
    assert 8 * nf4_bytes(1.0, double=False) == 4.5


def test_bytes_of_narrow_matmuls_counted_by_hand() -> None:
    """Queries, keys and values read one input; gate and up another."""
    shape = DecoderShape(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
    every = Adapter(16, tuple(TARGETS))
    assert every.moved_values(shape) == 4 * (3 * 4096 + 14336) + 4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert Adapter(16, ("k_proj", "q_proj")).moved_values(shape) == 4 * 4096 + 4 * (4096 + 1024)
    assert Adapter(64, ("down_proj",)).moved_values(shape) == 4 * 14336 + 4 * 4096
