"""FLOPs and bytes of a run's step, by the plan's counts: where its parts stand under a classical roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redline.errors import UserError
from redline.fields import AUTO
from redline.hardware.specs import spec_of
from redline.jobs import costs
from redline.monitor.events import Event, number, section
from redline.plan.flops import Passes
from redline.plan.shapes import SHAPE_KEYS, DecoderShape
from redline.plan.work import Work
from redline.recipe.load import validate
from redline.recipe.schema import Recipe

# What one causal pass and its backward read and write at the least: q, k, v → o, then q, k, v, o, do → dq, dk, dv.
_ATTENTION_TENSORS = 12


@dataclass(frozen=True)
class Roof:
    """What a card can do at most, in bytes/s or FLOP/s."""

    name: str  # "bandwidth", or a precision
    rate: float
    measured: bool  # on this machine; else its rated figure


@dataclass(frozen=True)
class Point:
    name: str
    flops_per_byte: float
    tflops: float
    measured: bool


def step_roofs(lock: Mapping[str, Any]) -> list[Roof]:
    """Bandwidth, and the peaks that this run's precision uses; empty when either is unknown."""
    machine, precision = section(lock, "machine"), section(section(lock, "recipe"), "train").get("precision")
    used = {"fp8": ("bf16", "fp8")}.get(str(precision), (str(precision),))
    memory = number(machine, "memory_bytes")
    spec = spec_of(str(machine.get("name")), memory / 1e9 if memory else None)
    if spec is not None and machine.get("device") == "cuda" and precision in ("bf16", "fp16", "fp32", "fp8"):
        peaks = [(name, spec.peak(name)) for name in used]
        return [Roof("bandwidth", spec.bandwidth, False), *(Roof(name, peak, False) for name, peak in peaks if peak)]
    measured = section(machine, "measured")
    rates = [(name, number(measured, name)) for name in used]
    copy = number(measured, "copy")
    if not copy or not any(rate for _, rate in rates):
        return []
    return [Roof("bandwidth", copy, True), *(Roof(name, rate, True) for name, rate in rates if rate)]


def step_points(lock: Mapping[str, Any], plan: Event, tokens_per_s: float | None) -> list[Point]:
    """The plan's parts at the best kernels' rates, and the whole step as it was measured, on one card."""
    counted = _counted(lock)
    tokens, cards = number(section(plan, "batch"), "tokens_per_step"), number(plan, "gpus") or 1
    micro = number(section(plan, "batch"), "micro")
    if counted is None or not tokens or not micro or not tokens_per_s:
        return []
    recipe, shape, work = counted
    wide, narrow = _value_bytes(recipe)
    moved = {
        "matmul": _matmul_bytes(
            shape, micro * recipe.data.seq_len, _costs(lock, recipe).passes(recipe.data.seq_len), wide, narrow
        ),
        "attention": _ATTENTION_TENSORS * work.touched,
    }
    flops = {"matmul": work.matmul, "attention": work.attention}
    best = limits_ms(plan, "ms_per_step")
    points = [
        Point(name, flops[name] / moved[name], flops[name] * tokens / cards / best[name] / 1e9, False)
        for name in flops
        if best.get(name)
    ]
    total, passed = sum(flops.values()), sum(moved.values()) + work.moved_least + cards * work.update / tokens
    return [*points, Point("this run", total / passed, total * tokens_per_s / cards / 1e12, True)]


def limits_ms(plan: Event, key: str) -> dict[str, float]:
    """The plan's parts of a step in milliseconds, those that have a figure under `key`."""
    given = section(plan, "ceiling").get("limits")
    parts = [part for part in given if isinstance(part, Mapping)] if isinstance(given, list) else []
    return {str(part.get("part")): ms for part in parts if (ms := number(part, key)) is not None}


def _counted(lock: Mapping[str, Any]) -> tuple[Recipe, DecoderShape, Work] | None:
    """What the run computed; None for a lock that is damaged, or of another version."""
    try:
        recipe = validate(dict(section(lock, "recipe")), where="lock.json")
    except UserError:
        return None
    model, train = recipe.model, recipe.train
    sizes = {name: getattr(model, name) for name in SHAPE_KEYS}
    if AUTO in (*sizes.values(), train.grad_checkpointing, train.micro_batch):
        return None  # never resolved
    shape = DecoderShape(**sizes)
    work: Work = _costs(lock, recipe).work(
        shape,
        recipe.data.seq_len,
        checkpointing=train.grad_checkpointing,
        bytes_per_value=_value_bytes(recipe)[0],
        optimizer=train.optimizer,
        ema=train.ema is not None,
        muon_steps=train.muon_steps,
    )
    return recipe, shape, work


def _costs(lock: Mapping[str, Any], recipe: Recipe) -> Any:
    """By the rows of the run's data, as its plan's limits are; locks of older versions say nothing of them."""
    rows = section(lock, "data").get("rows")
    return costs(recipe, rows if isinstance(rows, dict) else None, int(recipe.train.micro_batch))


def _value_bytes(recipe: Recipe) -> tuple[int, int]:
    """Of an activation, and of what goes into a matmul."""
    wide = 4 if recipe.train.precision == "fp32" else 2
    return wide, 1 if recipe.train.precision == "fp8" else wide


def _matmul_bytes(shape: DecoderShape, tokens: float, passes: Passes, wide: int, narrow: int) -> float:
    """Per token: what the matmuls read and write if each operand passes once; forward and both gradients."""
    d, per_layer = shape.d_model, shape.layers
    sizes = [(d, shape.d_qkv), (shape.d_attention, d), (d, shape.d_up), (shape.d_ff, d)]
    blocks = [(k, n, per_layer, passes.read) for k, n in sizes]
    total = 0.0
    for k, n, count, times in [*blocks, (d, shape.vocab, 1, passes.scored)]:
        rows = times * tokens
        forward = narrow * (rows * k + k * n) + wide * rows * n
        to_input = narrow * (rows * n + k * n) + wide * rows * k
        to_weight = narrow * (rows * k + rows * n) + wide * k * n
        total += count * (forward + to_input + to_weight)
    return total / tokens
