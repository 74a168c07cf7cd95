"""How fast a run's step could be: the plan's ceilings beside the step as measured, and what limits it.

Only facts are computed here. `summary` makes sentences of them and `report.figures` draws them; the live page shows
the sentences too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from redline.errors import UserError
from redline.hardware.specs import spec_of
from redline.runs.events import Event, computed_flops, number, numbers, section, throttling

if TYPE_CHECKING:
    from redline.jobs.base import Costs
    from redline.planning.flops import Passes
    from redline.planning.shapes import DecoderShape
    from redline.planning.speed import Work
    from redline.recipe.schema import Recipe

DENSE_PEAK, BEST_KERNELS, MATMUL_RATE = "dense peak", "best kernels", "matmul rate"  # names of ceilings
THIS_RUN = "this run"

# ----------------------------------------------------------------------------------------------------
# The classical roofline (Williams et al. 2009): FLOPs and bytes of a step by the plan's counts.


# Tensors that one causal attention pass and its backward read and write at least:
# q, k, v → o, then q, k, v, o, do → dq, dk, dv.
_ATTENTION_TENSORS = 12


@dataclass(frozen=True)
class Roof:
    """The most that a card can do, in bytes/s or FLOP/s."""

    name: str  # "bandwidth", or a precision
    rate: float
    measured: bool  # on this machine; otherwise the rated figure


@dataclass(frozen=True)
class Point:
    name: str
    flops_per_byte: float
    tflops: float
    measured: bool


def step_roofs(lock: Mapping[str, Any]) -> list[Roof]:
    """Return the bandwidth and the peaks of the precisions that the run uses; empty if either is unknown."""
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
    """Return the plan's parts at the rates of the best kernels, and the whole step as measured, for one card."""
    counted = _count_work(lock)
    tokens, cards = number(section(plan, "batch"), "tokens_per_step"), number(plan, "gpus") or 1
    micro = number(section(plan, "batch"), "micro")
    if counted is None or not tokens or not micro or not tokens_per_s:
        return []
    recipe, shape, work = counted
    activation_bytes, operand_bytes = _value_bytes(recipe)
    passes = _costs(lock, recipe).passes(recipe.data.seq_len)
    moved = {
        "matmul": _matmul_bytes(shape, micro * recipe.data.seq_len, passes, activation_bytes, operand_bytes),
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
    return [*points, Point(THIS_RUN, total / passed, total * tokens_per_s / cards / 1e12, True)]


def limits_ms(plan: Event, key: str) -> dict[str, float]:
    """Return the milliseconds of each part of a step in the plan's ceilings, for the parts that have `key`."""
    limits = section(plan, "ceiling").get("limits")
    parts = [part for part in limits if isinstance(part, Mapping)] if isinstance(limits, list) else []
    return {str(part.get("part")): ms for part in parts if (ms := number(part, key)) is not None}


def _count_work(lock: Mapping[str, Any]) -> tuple[Recipe, DecoderShape, Work] | None:
    """Return what a step computes; None for a lock that is damaged or of a version that this one cannot read."""
    # Imported here: pydantic and the schema take a tenth of a second, and `redline runs` needs neither.
    from redline.fields import AUTO
    from redline.planning.shapes import SHAPE_KEYS, DecoderShape
    from redline.recipe.load import validate

    try:
        recipe = validate(dict(section(lock, "recipe")), where="lock.json")
    except UserError:
        return None
    model, train = recipe.model, recipe.train
    sizes = {name: getattr(model, name) for name in SHAPE_KEYS}
    if AUTO in (*sizes.values(), train.grad_checkpointing, train.micro_batch):
        return None  # the recipe was never resolved
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


def _costs(lock: Mapping[str, Any], recipe: Recipe) -> Costs:
    """Return the costs for the rows of the run's data, as in its plan. Locks of older versions do not hold the rows."""
    from redline.jobs.base import costs

    rows = section(lock, "data").get("rows")
    return costs(recipe, rows if isinstance(rows, dict) else None, int(recipe.train.micro_batch))


def _value_bytes(recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of one value of an activation and of an operand of a matmul."""
    activation = 4 if recipe.train.precision == "fp32" else 2
    return activation, 1 if recipe.train.precision == "fp8" else activation


def _matmul_bytes(
    shape: DecoderShape, tokens: float, passes: Passes, activation_bytes: int, operand_bytes: int
) -> float:
    """Return the bytes per token that matmuls read and write if each operand is moved once, in the forward pass and for
    both gradients."""
    d, per_layer = shape.d_model, shape.layers
    sizes = [(d, shape.d_qkv), (shape.d_attention, d), (d, shape.d_up), (shape.d_ff, d)]
    blocks = [(k, n, per_layer, passes.read) for k, n in sizes]
    total = 0.0
    for k, n, count, times in [*blocks, (d, shape.vocab, 1, passes.scored)]:
        rows = times * tokens
        forward = operand_bytes * (rows * k + k * n) + activation_bytes * rows * n
        to_input = operand_bytes * (rows * n + k * n) + activation_bytes * rows * k
        to_weight = operand_bytes * (rows * k + rows * n) + activation_bytes * k * n
        total += count * (forward + to_input + to_weight)
    return total / tokens


# ----------------------------------------------------------------------------------------------------
# A step against its ceilings, and what limits it.


DATA_WAIT_LIMIT = 0.02  # share of a step; with less, data loading is not what limits it
CPU_SHARE_LIMIT = 0.75  # of the time of the run's threads; with less, they wait for a core or for each other
_MOST_LINES = 0.5  # share of the log lines in which the card was slowed


class LimitKind(StrEnum):
    DATA_LOADING = "data_loading"
    CPU_TIME = "cpu_time"  # of a run on a CPU
    HEAT = "heat"  # or the power supply
    POWER = "power"
    KERNELS = "kernels"


@dataclass(frozen=True)
class Limit:
    """What keeps a step from being faster, by the log lines of a run."""

    kind: LimitKind
    data_wait: float  # share of a step that waits for data
    slowed_lines: int = 0  # log lines in which the GPU was slowed for the reason of `kind`
    reported_lines: int = 0  # log lines that state whether it was slowed; 0 for a CPU
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    cpu_share: float | None = None  # CPU time over the time of all threads; None for a GPU


@dataclass(frozen=True)
class Bar:
    """The time of a step at the rates of one ceiling, by part. Parts that can overlap the others are in `may_hide`."""

    name: str
    ms: dict[str, float]
    may_hide: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.ms.values())


@dataclass(frozen=True)
class Roofline:
    """A step as measured and the ceilings above it. Lists are empty, numbers None, where nothing is known."""

    bars: list[Bar]  # one per ceiling, the highest first
    step_ms: float | None
    mfu: float | None
    planned_ms: float | None
    limit: Limit | None
    roofs: list[Roof]
    points: list[Point]
    machine: str = "this machine"
    has_ceilings: bool = True  # whether the log holds a plan with ceilings, even empty ones

    def data(self) -> dict[str, Any]:
        """Return the numbers as plain data; the report adds the sentences."""
        keys = ("bars", "step_ms", "mfu", "planned_ms", "roofs", "points")
        return {key: value for key, value in asdict(self).items() if key in keys}


def analyse(steps: Sequence[Event], plan: Event, lock: Mapping[str, Any]) -> Roofline:
    """Return where the step of a run stands. The first logged step is left out if there is another: it compiles."""
    steady = steps[1:] or steps
    step_ms = _median(steady, "step_ms")
    roofs = step_roofs(lock)
    points = step_points(lock, plan, _median(steady, "tokens_per_s")) if roofs else []
    return Roofline(
        _bars(plan, lock),
        step_ms,
        _median(steady, "mfu"),
        _planned_ms(plan),
        None if step_ms is None else _limit(steady, step_ms),
        roofs if points else [],
        points,
        str(section(lock, "machine").get("name") or "this machine"),
        bool(section(plan, "ceiling")),
    )


def _bars(plan: Event, lock: Mapping[str, Any]) -> list[Bar]:
    """Return the ceilings that are known, the highest first."""
    peak, best = limits_ms(plan, "ms_at_peak"), limits_ms(plan, "ms_per_step")
    bars = []
    # Without a rate in the plan, its peaks were derived from measured rates: they are not the card's.
    if peak and number(section(plan, "ceiling"), "tokens_per_s") is not None:
        bars.append(Bar(DENSE_PEAK, peak))
    if best:
        hides = {part: ms for part, ms in best.items() if part not in peak}
        bars.append(Bar(BEST_KERNELS, {part: ms for part, ms in best.items() if part in peak}, hides))
    return bars or _cpu_bar(plan, lock)


def _cpu_bar(plan: Event, lock: Mapping[str, Any]) -> list[Bar]:
    """Return the only known ceiling of a CPU: its matmul rate, measured before the run."""
    rate = number(section(lock, "machine"), "cpu_flops")
    flops = computed_flops(plan)
    tokens = number(section(plan, "batch"), "tokens_per_step")
    if not rate or not flops or not tokens:
        return []
    return [Bar(MATMUL_RATE, {"all FLOPs": 1e3 * tokens * flops / rate})]


def _planned_ms(plan: Event) -> float | None:
    rate = number(section(plan, "throughput"), "tokens_per_s")
    tokens = number(section(plan, "batch"), "tokens_per_step")
    return 1e3 * tokens / rate if rate and tokens else None


def _limit(steps: Sequence[Event], step_ms: float) -> Limit:
    """Return the first limit that applies: data loading, CPU time, heat, the power limit, otherwise the kernels."""
    waiting = (_median(steps, "data_wait_ms") or 0.0) / step_ms if step_ms else 0.0
    reported = [found for step in steps if (found := throttling(step)) is not None]
    hot, capped = sum(found.heat for found in reported), sum(found.power_limit for found in reported)
    most, cpu_share = _MOST_LINES * len(reported), _median(steps, "cpu_share")
    if waiting > DATA_WAIT_LIMIT:
        kind, slowed = LimitKind.DATA_LOADING, 0
    elif cpu_share is not None and cpu_share < CPU_SHARE_LIMIT:
        kind, slowed = LimitKind.CPU_TIME, 0
    elif hot > most:
        kind, slowed = LimitKind.HEAT, hot
    elif capped > most:
        kind, slowed = LimitKind.POWER, capped
    else:
        kind, slowed = LimitKind.KERNELS, 0
    watts, clock = _median(steps, "power_w"), _median(steps, "sm_clock_mhz")
    return Limit(kind, waiting, slowed, len(reported), watts, clock, cpu_share)


def data_wait_share(steps: Sequence[Event]) -> float | None:
    """Return the share of all time in logged steps that went by waiting for data."""
    pairs = [(number(step, "data_wait_ms"), number(step, "step_ms")) for step in steps]
    known = [(wait, step_ms) for wait, step_ms in pairs if wait is not None and step_ms is not None]
    total = sum(step_ms for _, step_ms in known)
    return sum(wait for wait, _ in known) / total if total > 0 else None


def largest_gap(roofline: Roofline) -> tuple[str, float] | None:
    """Return the part of a step with the most time above the dense peak, and that time's share of the step.

    The parts are the kernels of each kind in the plan, at their best known rates, and the time beside the kernels.
    Return None if a ceiling is unknown.
    """
    bars = {bar.name: bar for bar in roofline.bars}
    peak, best = bars.get(DENSE_PEAK), bars.get(BEST_KERNELS)
    if peak is None or best is None or not roofline.step_ms:
        return None
    above = {f"{part} kernels": ms - peak.ms[part] for part, ms in best.ms.items() if part in peak.ms}
    beside = "memory-bound work and other time outside these kernels" if best.may_hide else "time outside the kernels"
    above[beside] = roofline.step_ms - best.total
    part, ms = max(above.items(), key=lambda item: item[1])
    return part, ms / roofline.step_ms


def _median(steps: Sequence[Event], key: str) -> float | None:
    values = numbers(steps, key)
    return statistics.median(values) if values else None
