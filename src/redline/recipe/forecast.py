"""Predict a run: its length, speed, duration and cost, and the ceiling that the hardware sets.

`forecast` takes a resolved recipe and combines what a step has to compute (`planning.speed.Work`), the card's peaks and
the communication between cards. `check_target` compares a requested speed with the ceiling. `scaling` plans the same
recipe for several numbers of cards, and the last part computes how long a run is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from redline.errors import Problem, RecipeError, UserError
from redline.fields import AUTO, none_if_auto
from redline.hardware.machine import Machine
from redline.jobs.base import costs
from redline.planning.batch import BatchPlan, solve_batch
from redline.planning.communication import (
    GIGABIT,
    HOP_SECONDS,
    NETWORK_GBPS_PER_CARD,
    SHARDED,
    WHOLE,
    WIRE_SHARE,
    Fabric,
    Volume,
    ddp_volume,
    sharded_volume,
    with_keys,
)
from redline.planning.flops import mfu
from redline.planning.memory import MATMUL_POSITIONS, MUON, Kernels, causal_keys
from redline.planning.schedule import horizon_steps
from redline.planning.shapes import DecoderShape
from redline.planning.shards import Units, decoder_units
from redline.planning.speed import (
    BEST_MATMUL_SHARE,
    CACHED_OF_COPY,
    COPY_SHARE,
    SHARDS_SPEED,
    CpuRates,
    Limit,
    Peaks,
    StepTime,
    Work,
    add_communication,
    expected_cpu_step_time,
    expected_step_time,
    limits,
    seconds_at_best_rates,
    seconds_at_peak,
)
from redline.recipe.load import row_copies
from redline.recipe.schema import Recipe
from redline.units import format_count

if TYPE_CHECKING:
    from redline.recipe.resolve import Resolved


CPU_SHARE = 0.28  # share of a CPU's measured matmul rate that a training step of a small model reaches


@dataclass(frozen=True)
class ProbeResult:
    """What `plan --probe` measured with a few real steps on one card."""

    tokens_per_s: float
    memory_gib: float | None
    step_ms: float
    compile_s: float


@dataclass(frozen=True)
class Forecast:
    """The expected speed of a run beside its ceilings. None means unknown."""

    tokens_per_s: float | None
    source: str  # where `tokens_per_s` comes from: a prior or a measurement
    flops: tuple[float, float]  # per token: PaLM form, mask-exact form
    peak: float | None  # dense bf16 peak of all cards together
    physical: float | None  # tokens/s at 100 % of the dense peak: no run can be faster
    reachable: float | None  # tokens/s at the best kernels' rates if all memory-bound work is hidden
    parts: list[Limit]
    peaks: Peaks | None
    hours: float | None
    cost_usd: float | None
    mode: str
    volume: Volume
    fabric: Fabric
    time: StepTime | None
    matmul_rate: float | None = None  # tokens/s of a CPU at its measured matmul rate: no CPU is in the table of peaks
    precision: str | None = None  # of that rate

    def event(self) -> dict[str, Any]:
        """Return the forecast's fields of the plan event."""
        palm, causal = self.flops
        return {
            "throughput": {
                "tokens_per_s": _rounded_int(self.tokens_per_s),
                "mfu": self._mfu(self.tokens_per_s, palm),
                "mfu_causal": self._mfu(self.tokens_per_s, causal),
                "precision": "bf16",  # MFU is relative to the bf16 peak whatever precision the run trains in
                "source": self.source,
            },
            "ceiling": {
                "tokens_per_s": _rounded_int(self.physical),
                "mfu": self._ceiling_mfu(causal),
                "precision": self.precision if self.peaks is None else self.peaks.precision,
                "best_kernels_tokens_per_s": _rounded_int(self.reachable),
                **({} if self.matmul_rate is None else {"matmul_rate_tokens_per_s": round(self.matmul_rate)}),
                "limits": [
                    {
                        "part": part.part,
                        "ms_per_step": round(1e3 * part.at_best, 3),
                        "ms_at_peak": None if part.at_peak is None else round(1e3 * part.at_peak, 3),
                    }
                    for part in self.parts
                ],
            },
            "communication": self._communication() if self.fabric.world > 1 else None,
            "hours": None if self.hours is None else round(self.hours, 6),
            "cost_usd": None if self.cost_usd is None else round(self.cost_usd, 2),
        }

    def tokens_by_clock(self, hours: float | None, counted: int | None) -> int | None:
        """Return the tokens that fit into `hours`, or None if the counted limit (in tokens) ends the run first."""
        if hours is None or self.tokens_per_s is None:
            return None
        tokens = round(hours * 3600 * self.tokens_per_s)
        return None if counted is not None and counted <= tokens else tokens

    def _communication(self) -> dict[str, Any]:
        time, volume = self.time or StepTime(0.0, 0.0, None, None), self.volume
        return {
            "mode": self.mode,
            "all_reduced_bytes": round(volume.reduced),
            "all_gathered_bytes": round(volume.gathered),
            "reduce_scattered_bytes": round(volume.scattered),
            "exchanged_bytes": round(volume.exchanged),  # Muon's matrices, summed over all cards
            **self._keys(),
            "sent_bytes": round(volume.sent(self.fabric.world)),  # by each card
            "ms_per_step": _milliseconds(time.communication),
            "exposed_ms": _milliseconds(time.exposed),
            "estimate": True,
        }

    def _keys(self) -> dict[str, int]:
        """Return the bytes of keys and values and of their gradients, if cards share sequences."""
        volume = self.volume
        sizes = {"keys_gathered_bytes": volume.keys_gathered, "keys_scattered_bytes": volume.keys_scattered}
        return {name: round(size) for name, size in sizes.items()} if volume.context > 1 else {}

    def _mfu(self, tokens_per_s: float | None, flops: float) -> float | None:
        share = None if tokens_per_s is None else mfu(tokens_per_s, flops, self.peak)
        return None if share is None else round(share, 4)

    def _ceiling_mfu(self, flops: float) -> float | None:
        """Return the MFU of the ceiling: 1, except in fp8, where attention still runs at the bf16 peak."""
        if self.peaks is None or self.physical is None:
            return None
        share = mfu(self.physical, flops, self.peaks.matmul * self.fabric.world)
        return None if share is None else round(share, 4)


def _rounded_int(rate: float | None) -> int | None:
    return None if rate is None else round(rate)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def forecast(resolved: Resolved, *, price: float | None = None, measured: ProbeResult | None = None) -> Forecast:
    """Forecast a resolved recipe. `price` is USD per card and hour; `measured` replaces the prior for the speed."""
    machine, batch, flops = resolved.machine, resolved.batch, resolved.flops
    world, tokens = batch.world, resolved.tokens_per_step
    peaks, known = _peaks(machine, resolved.recipe.train.precision)
    work, volume, fabric = step_work(resolved), communication_volume(resolved), planned_fabric(resolved)
    # The prior is calibrated with full rows; the ceiling counts what the rows of the data really need.
    counted = work if resolved.rows is None else step_work(resolved, use_data=True)
    parts = limits(counted, peaks, tokens / world) if peaks else []
    if measured is None:
        time, source = _prior(resolved, work, peaks, known)
    else:
        source = "measured" if world == 1 else "measured on one card"
        time = StepTime(tokens / world / measured.tokens_per_s, 0.0)
    if time is not None and world > 1:
        time = add_communication(time, volume, fabric, batch.accumulation)
        source += "; between cards " + ("unknown" if fabric.bandwidth is None else "an estimate")
    rate = tokens / time.total if time and time.total else None
    hours = _hours(resolved, rate)
    bf16_peak = machine.peak("bf16")
    cpu_rate = cpu_matmul_rate(machine, resolved.recipe.train.precision)
    return Forecast(
        tokens_per_s=rate,
        source=source,
        flops=(flops.useful, flops.executed),
        peak=bf16_peak * world if bf16_peak else None,
        physical=tokens / seconds_at_peak(parts) if parts and known else None,
        reachable=tokens / seconds_at_best_rates(parts) if parts else None,
        parts=parts,
        peaks=peaks if known else None,
        hours=hours,
        cost_usd=None if hours is None or price is None else hours * price * world,
        mode=parallel_mode(resolved),
        volume=volume,
        fabric=fabric,
        time=time,
        matmul_rate=world * cpu_rate / flops.computed if cpu_rate else None,
        precision=resolved.recipe.train.precision if cpu_rate else None,
    )


def cpu_matmul_rate(machine: Machine, precision: str) -> float | None:
    """Return the FLOP/s of matmuls in this precision as measured on a CPU, or those of its fastest precision."""
    if machine.device != "cpu":
        return None
    return (machine.measured or {}).get(precision, machine.cpu_flops)


def planned_kernels(recipe: Recipe, device: str, *, precision: str, compiled: bool, fused: bool) -> Kernels:
    """Return how a step is computed, as far as memory and traffic depend on it."""
    gpu, length = device == "cuda", recipe.data.seq_len
    by_matmuls = recipe.model.attention == "matmul" or (recipe.model.attention == AUTO and length <= MATMUL_POSITIONS)
    return Kernels(
        gpu=gpu,
        compiled=compiled,
        fused=fused,
        fp8=fused and precision == "fp8",
        packed=gpu and recipe.data.pack,
        # On MPS attention is always dense (kernels/attention.py).
        scores=length if recipe.model.attention == "dense" or device == "mps" else 0,
        cpu=device == "cpu" and not compiled,
        keys=causal_keys(length) if device == "cpu" and not compiled and by_matmuls else 0.0,
    )


def step_work(resolved: Resolved, *, use_data: bool = False) -> Work:
    """Return what a step has to compute: for full rows, or with `use_data` for the average row of the data."""
    train, rows = resolved.recipe.train, resolved.rows if use_data else None
    work: Work = costs(resolved.recipe, rows, resolved.batch.micro).work(
        resolved.shape,
        resolved.recipe.data.seq_len,
        checkpointing=train.grad_checkpointing,
        bytes_per_value=4 if train.precision == "fp32" else 2,
        optimizer=train.optimizer,
        ema=train.ema is not None,
        muon_steps=train.muon_steps,
        kernels=planned_kernels(
            resolved.recipe,
            resolved.machine.device,
            precision=train.precision,
            compiled=train.compile,
            fused=resolved.recipe.model.kernels == "fused",
        ),
    )
    return work


def _peaks(machine: Machine, precision: str) -> tuple[Peaks | None, bool]:
    """Return the card's peaks and whether they are from the table of cards.

    For a card that is not in the table, estimate them from its measured rates: such peaks give a prior, not a ceiling.
    """
    spec, measured = machine.spec, machine.measured or {}
    attention = "fp32" if precision == "fp32" else "bf16"  # attention never runs in fp8
    if spec is not None:
        matmul, other = spec.peak(precision), spec.peak(attention)
        if matmul is None or other is None:
            what = f"the {spec.name} has no {precision} tensor cores."
            raise RecipeError("recipe", [Problem("train.precision", what, "Use train.precision=bf16.")])
        return Peaks(matmul, other, spec.bandwidth, precision), True
    if machine.device == "cuda" and {precision, attention, "copy"} <= set(measured):
        matmul, other = (measured[name] / BEST_MATMUL_SHARE[name] for name in (precision, attention))
        return Peaks(matmul, other, measured["copy"] / COPY_SHARE, precision), False
    return None, False


def _prior(resolved: Resolved, work: Work, peaks: Peaks | None, known: bool) -> tuple[StepTime | None, str]:
    """Return the expected step time of one card without communication, and what the expectation rests on."""
    machine, batch = resolved.machine, resolved.batch
    micro_tokens = batch.micro * resolved.recipe.data.seq_len // batch.context
    if machine.device == "cpu":
        if machine.cpu_flops is None:
            return None, "unknown"
        return _cpu_prior(resolved, work, machine.cpu_flops), "prior: this CPU's measured rates"
    if peaks is None:
        return None, "unknown"
    shards = shard_size(resolved)
    time = expected_step_time(work, peaks, micro_tokens=micro_tokens, accumulation=batch.accumulation, shards=shards)
    if not known:
        source = "prior: this card's measured rates"
    elif machine.spec is not None and machine.spec.name == "h200":
        source = "prior: H200 kernel rates"
    else:
        source = "prior: H200 kernel rates, scaled to this card"
    if shards > 1:
        source += f", at {SHARDS_SPEED:.0%} with shards (from torchtitan's published 8B on H100)"
    return time, source + costs(resolved.recipe).assumed


def _cpu_prior(resolved: Resolved, work: Work, fastest: float) -> StepTime:
    machine, batch, train = resolved.machine, resolved.batch, resolved.recipe.train
    measured = machine.measured or {}
    if train.compile or "copy" not in measured:
        rate = CPU_SHARE * fastest / resolved.flops.computed
        return StepTime(batch.micro * resolved.recipe.data.seq_len * batch.accumulation / rate, 0.0)
    rates = CpuRates(
        measured.get(train.precision, fastest),
        measured.get("cached", CACHED_OF_COPY * measured["copy"]),
        measured["copy"],
    )
    micro_tokens = batch.micro * resolved.recipe.data.seq_len
    return expected_cpu_step_time(work, rates, micro_tokens=micro_tokens, accumulation=batch.accumulation)


def parallel_mode(resolved: Resolved) -> str:
    """Return "fsdp" or "hsdp" if each card holds a shard of the model, else "ddp"."""
    mode = str(resolved.recipe.parallel.mode)
    return mode if mode in SHARDED else "ddp"


def shard_size(resolved: Resolved) -> int:
    """Return how many cards share one copy of the model."""
    if parallel_mode(resolved) == "hsdp":
        return int(resolved.recipe.parallel.shard_size)
    return resolved.batch.world if parallel_mode(resolved) == "fsdp" else 1


def planned_fabric(resolved: Resolved) -> Fabric:
    """Return how the cards are connected: links as in the table of cards, the network as in the recipe or assumed."""
    gpus, spec = resolved.batch.world // resolved.nodes, resolved.machine.spec
    gbps = resolved.recipe.parallel.network_gbps or NETWORK_GBPS_PER_CARD * gpus
    return Fabric(gpus, resolved.nodes, spec.link if spec else None, gbps * GIGABIT)


def communication_volume(resolved: Resolved) -> Volume:
    """Return the bytes that the cards exchange in a step."""
    shape, batch = resolved.shape, resolved.batch
    if batch.world == 1:
        return Volume()
    train = resolved.recipe.train
    if parallel_mode(resolved) == "ddp":
        volume = ddp_volume(4.0 * costs(resolved.recipe).parameters(shape)["trainable"])
    else:
        volume = _sharded_volume(resolved)
    return with_keys(
        volume,
        shape,
        context=batch.context,
        positions=batch.micro * batch.accumulation * sum(row_copies(resolved.recipe)),
        micros=batch.accumulation,
        bytes_per_value=4 if train.precision == "fp32" else 2,
        again=train.grad_checkpointing != "none",
    )


def _sharded_volume(resolved: Resolved) -> Volume:
    train, size = resolved.recipe.train, shard_size(resolved)
    units = planned_units(resolved.recipe, resolved.shape, resolved.machine.device)
    matrices = 0
    if train.optimizer in MUON:
        matrices = units.layers * sum(t.rows * t.columns for t in units.block if t.gradient and t.columns > 1)
    return sharded_volume(
        units,
        size,
        resolved.batch.world // size,
        micros=resolved.batch.accumulation,
        whole=resolved.recipe.parallel.accumulate == WHOLE,
        orthogonalised=4.0 * matrices,
    )


def planned_units(recipe: Recipe, shape: DecoderShape, device: str) -> Units:
    """Return what FSDP shards and gathers with a resolved recipe."""
    train = recipe.train
    kernels = planned_kernels(recipe, device, precision=train.precision, compiled=bool(train.compile), fused=False)
    return units_of(recipe, shape, train.precision, train.grad_checkpointing, kernels)


def units_of(recipe: Recipe, shape: DecoderShape, precision: str, checkpointing: str, kernels: Kernels) -> Units:
    """Return what FSDP shards and gathers; costs of another package that do not say it are those of a decoder."""
    known = getattr(costs(recipe), "units", None)
    units: Units = known(shape, precision, checkpointing, kernels) if known else decoder_units(shape)
    return units


def _hours(resolved: Resolved, tokens_per_s: float | None) -> float | None:
    """Return the duration of the run: train.hours, or the counted horizon at the expected speed if that is shorter."""
    limit, steps = resolved.recipe.train.hours, resolved.horizon_steps
    by_tokens = steps * resolved.tokens_per_step / tokens_per_s / 3600 if steps and tokens_per_s else None
    return min((hours for hours in (limit, by_tokens) if hours), default=None)


def check_target(target: float, resolved: Resolved, forecast: Forecast) -> str | None:
    """Compare a requested speed (tokens/s) with the ceiling.

    Raise a UserError with the arithmetic if no data could make it possible. Return a warning if it is above what the
    best measured kernels reach or depends on the data, and None if it is plausible.
    """
    limit, name = forecast.physical, resolved.machine.name
    if limit is None:
        return f"cannot check the target of {target:,.0f} tokens/s: the peak of {name} is not known"
    if target > limit and target <= (most := _limit_for_any_data(limit, resolved, forecast)):
        return (
            f"the target of {target:,.0f} tokens/s is above {limit:,.0f}, the limit for rows in which every token "
            f"attends to the whole row and has a loss. Short documents and long prompts raise the limit, to at most "
            f"{most:,.0f}: whether the target is possible depends on the data"
        )
    if target > limit:
        raise UserError(
            f"{target:,.0f} tokens/s is impossible.\n{_arithmetic(target, limit, resolved, forecast)}",
            where="--target-tokens-per-s",
            fix=_alternatives(target, limit, resolved),
        )
    if forecast.reachable is not None and target > forecast.reachable:
        return (
            f"the target of {target:,.0f} tokens/s is below the physical limit of {limit:,.0f}, but above "
            f"{forecast.reachable:,.0f}, which the best measured kernels reach if all memory-bound work is hidden"
        )
    return None


def _limit_for_any_data(limit: float, resolved: Resolved, forecast: Forecast) -> float:
    """Return the tokens/s that no data can exceed: count only the work that every row needs."""
    matmul, attention = costs(resolved.recipe).certain(resolved.shape)
    at_peak = {part.part: part.at_peak or 0.0 for part in forecast.parts}
    return limit * seconds_at_peak(forecast.parts) / (matmul * at_peak["matmul"] + attention * at_peak["attention"])


def _arithmetic(target: float, limit: float, resolved: Resolved, forecast: Forecast) -> str:
    """Return a small table: the FLOP/s that the target needs, what the cards have, and the resulting limit."""
    flops, world, peaks = resolved.flops.executed, resolved.batch.world, forecast.peaks
    assert peaks is not None  # a physical limit is known, so the peaks are too
    cards = f"one {resolved.machine.name}" if world == 1 else f"{world} × {resolved.machine.name}"
    per_second = f"{target:,.0f}/s = {flops * target / 1e12:,.0f} TFLOP/s"
    if peaks.precision == "fp8":
        # Matmuls run at the fp8 peak, attention at the bf16 peak.
        matmul = (forecast.parts[0].at_peak or 0.0) / seconds_at_peak(forecast.parts)
        available = (
            f"{peaks.matmul / 1e12:,.0f} TFLOP/s in fp8 for matmuls, {peaks.attention / 1e12:,.0f} in bf16 for "
            f"attention: the dense peaks of {cards}"
        )
        bound = (
            f"{limit:,.0f} tokens/s ({matmul:.0%} of the time in matmuls, {1 - matmul:.0%} in attention); "
            f"{world * peaks.matmul / flops:,.0f} if attention ran in fp8 too"
        )
    else:
        available = (
            f"{world * peaks.matmul / 1e12:,.0f} TFLOP/s: the dense {peaks.precision} peak of {cards} "
            "(data sheets often print twice that, for 2:4 sparsity, which training does not use)"
        )
        bound = f"{limit:,.0f} tokens/s at 100 % of the peak"
    expected = [f"best kernels {format_count(forecast.reachable)}"] if forecast.reachable else []
    if forecast.tokens_per_s:
        expected.append(f"this plan {format_count(forecast.tokens_per_s)} ({forecast.source})")
    rows = {
        "needed": f"{flops / 1e9:.3f} GFLOP per token ({resolved.flops.formula_executed}) × {per_second}",
        "available": available,
        "limit": bound,
        "expected": ", ".join(expected),
    }
    lines = [f"  {label:<11}{text}" for label, text in rows.items()]
    # The error appends a space and its fix to the last line.
    return "\n".join([*lines, f"  {'instead':<10}"])


def _alternatives(target: float, limit: float, resolved: Resolved) -> str:
    cards = math.ceil(resolved.batch.world * target / limit)
    parameters = format_count(resolved.shape.matmul_parameters * limit / target)
    more = f"--gpus {cards} or more" if resolved.nodes == 1 else f"{cards} cards or more in total"
    return f"lower the target, plan with {more}, or use a model with fewer than {parameters} parameters."


# ----------------------------------------------------------------------------------------------------
# Plan the same recipe for one card, two, four and so on up to the requested number, and find where that stops paying.
#
# Every row is an estimate: the expected speed of one card, and arithmetic for the communication between cards.


WORTHWHILE = 0.5  # an added card must bring this share of the speed of a single card


@dataclass(frozen=True)
class Row:
    """The plan for one number of cards. None means unknown."""

    gpus: int  # in each node
    nodes: int
    mode: str
    micro: int
    accumulation: int
    tokens_per_step: int
    memory_gib: float
    fits: bool
    step_ms: float | None
    communication_ms: float | None
    exposed_ms: float | None
    tokens_per_s: float | None
    efficiency: float | None  # relative to as many cards without any communication
    hours: float | None
    cost_usd: float | None
    tokens: int | None  # in that time

    @property
    def world(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Scaling:
    rows: list[Row]
    left_out: list[str]
    assumptions: list[str]

    @property
    def fitting(self) -> list[Row]:
        """Return the rows in which the model fits into memory; a speed means nothing in the others."""
        return [row for row in self.rows if row.fits]

    @property
    def pays_up_to(self) -> int | None:
        """Return the largest number of cards up to which each added card brings half the speed of a single one.

        None if no speed is known, or if the model fits nowhere.
        """
        rows = self.fitting
        if not rows or any(row.tokens_per_s is None for row in rows):
            return None
        paid = rows[0].world
        for small, large in pairwise(rows):
            if _gain(small, large) < WORTHWHILE * _speed_per_card(rows[0]):
                break
            paid = large.world
        return paid

    @property
    def verdict(self) -> str:
        """Return a sentence that says where scaling stops paying."""
        rows, paid = self.fitting, self.pays_up_to
        if not rows:
            return "by estimate the run fits on none of these"
        last = rows[-1].world
        if paid is None:
            return "how these cards are connected is not known, so the speed of several cannot be estimated"
        if paid == last:
            return (
                f"by estimate every card up to {last} pays: each adds {WORTHWHILE:.0%} or more of a single card's speed"
            )
        after = next(row for row in rows if row.world > paid)
        gain = max(0.0, _gain(next(row for row in rows if row.world == paid), after) / _speed_per_card(rows[0]))
        return (
            f"by estimate scaling stops paying at {paid} cards: each further card up to {after.world} would add"
            f" {gain:.0%} of a single card's speed"
        )

    def event(self) -> dict[str, Any]:
        """Return the `scaling` field of the plan."""
        return {
            "estimate": True,
            "rows": [{"world": row.world, **asdict(row)} for row in self.rows],
            "pays_up_to": self.pays_up_to,
            "verdict": self.verdict,
            "left_out": self.left_out,
            "assumptions": self.assumptions,
        }


def _speed_per_card(first: Row) -> float:
    return (first.tokens_per_s or 0.0) / first.world


def _gain(small: Row, large: Row) -> float:
    """Return the tokens/s that each added card brings."""
    return ((large.tokens_per_s or 0.0) - (small.tokens_per_s or 0.0)) / (large.world - small.world)


def worlds(gpus: int, nodes: int) -> Iterator[tuple[int, int]]:
    """Yield (cards per node, nodes): powers of two within a node up to `gpus`, then powers of two up to `nodes`."""
    yield from ((count, 1) for count in _doubling(gpus))
    yield from ((gpus, count) for count in _doubling(nodes) if count > 1)


def _doubling(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def scaling(
    resolve_for: Callable[[int, int], Resolved],
    gpus: int,
    nodes: int,
    *,
    price: float | None = None,
    measured: ProbeResult | None = None,
) -> Scaling:
    """Plan every number of cards. `resolve_for(gpus, nodes)` resolves the recipe for one of them.

    Numbers of cards that cannot share the batch are listed in `left_out`.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    for count, size in worlds(gpus, nodes):
        try:
            resolved = resolve_for(count, size)
        except RecipeError as error:
            left_out.append(f"{count * size} cards: {error.problems[0].what}")
            continue
        single = next((_speed_per_card(row) for row in rows if row.fits), None)
        rows.append(_row(resolved, single, price=price, measured=measured))
    return Scaling(rows, left_out, _assumptions(resolve_for(gpus, nodes)))


def _row(resolved: Resolved, single: float | None, *, price: float | None, measured: ProbeResult | None) -> Row:
    predicted, batch, world = forecast(resolved, price=price, measured=measured), resolved.batch, resolved.batch.world
    time, rate = predicted.time, predicted.tokens_per_s
    fits = resolved.memory.peak <= resolved.machine.memory_bytes
    counted = resolved.horizon_steps * resolved.tokens_per_step if resolved.horizon_steps else None
    by_clock = predicted.tokens_by_clock(resolved.recipe.train.hours, counted)
    return Row(
        gpus=world // resolved.nodes,
        nodes=resolved.nodes,
        mode=predicted.mode if world > 1 else "single",
        micro=batch.micro,
        accumulation=batch.accumulation,
        tokens_per_step=resolved.tokens_per_step,
        memory_gib=resolved.memory.gib()["peak"],
        fits=fits,
        step_ms=_rounded(1e3 * time.total if time and time.total else None),
        communication_ms=_rounded(1e3 * time.communication if time and time.communication is not None else None),
        exposed_ms=_rounded(1e3 * time.exposed if time and time.exposed is not None else None),
        tokens_per_s=_rounded(rate, 0),
        efficiency=_rounded(rate / world / (single or rate / world) if rate and fits else None, 4),
        hours=_rounded(predicted.hours, 6),
        cost_usd=_rounded(predicted.cost_usd, 2),
        tokens=by_clock if by_clock is not None else counted,
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _assumptions(resolved: Resolved) -> list[str]:
    assumptions = [
        f"links reach {WIRE_SHARE:.0%} of their rated bandwidth",
        f"a message has {1e6 * HOP_SECONDS:.0f} µs of latency at each card",
    ]
    if resolved.nodes > 1 and resolved.recipe.parallel.network_gbps is None:
        assumptions.append(
            f"the network has {NETWORK_GBPS_PER_CARD:.0f} Gbit/s per card (set parallel.network_gbps to change it)"
        )
    return assumptions


# ----------------------------------------------------------------------------------------------------
# The length of a run: the last step that its stop conditions lead to, the warm-up, and warnings.


FEW_STEPS = 20  # outside of these limits a run is probably a mistake
FEW_EPOCHS, MANY_EPOCHS = 0.1, 10.0


def epoch_tokens(recipe: Recipe, train_tokens: int) -> int:
    """Return the tokens of one epoch, which consists of whole sequences; 0 if `train_tokens` is not known yet."""
    length = recipe.data.seq_len
    return max(length, train_tokens - train_tokens % length) if train_tokens else 0


def recipe_steps(recipe: Recipe, train_tokens: int, tokens_per_step: int) -> int | None:
    """Return the step at which the first counted stop condition is met, or None if none is set or known."""
    train, epoch = recipe.train, epoch_tokens(recipe, train_tokens)
    return horizon_steps(
        steps=train.steps,
        tokens=train.tokens,
        epochs=train.epochs if epoch else None,  # the length of an epoch is unknown before the data are prepared
        train_tokens=epoch,
        tokens_per_step=tokens_per_step,
    )


def horizon_fields(
    *, steps: int | None, hours: float | None, expected_tokens: int | None, tokens_per_step: int, epoch: int
) -> dict[str, Any]:
    """Return the plan's `horizon`. The `expected_…` fields are set if train.hours ends the run before a count."""
    tokens = steps * tokens_per_step if steps else None
    return {
        "steps": steps,
        "tokens": tokens,
        "epochs": _epochs(tokens, epoch),
        "seconds": hours * 3600 if hours else None,
        "expected_steps": None if expected_tokens is None else expected_tokens // tokens_per_step,
        "expected_tokens": expected_tokens,
        "expected_epochs": _epochs(expected_tokens, epoch),
    }


def remaining_fields(plan: Mapping[str, Any], step: int, seconds: float) -> dict[str, Any]:
    """Return what is left to do, by the plan, for a run that resumes at `step` after `seconds` of training."""
    horizon, rate = plan["horizon"], plan["throughput"]["tokens_per_s"]
    per_step = plan["batch"]["tokens_per_step"]
    steps = None if horizon["steps"] is None else max(0, horizon["steps"] - step)
    share = steps / horizon["steps"] if steps is not None and horizon["epochs"] is not None else None
    limits = [None if horizon["seconds"] is None else max(0.0, horizon["seconds"] - seconds)]
    limits.append(steps * per_step / rate if steps is not None and rate else None)
    return {
        "steps": steps,
        "tokens": None if steps is None else steps * per_step,
        "epochs": None if share is None else round(share * horizon["epochs"], 4),
        "seconds": min((limit for limit in limits if limit is not None), default=None),
    }


def horizon_warnings(horizon: Mapping[str, Any], *, embedded: bool) -> list[str]:
    """Warn about a run that is probably too short or too long. `embedded` is whether it trains on the built-in text."""
    by_clock = horizon["expected_tokens"] is not None
    about, prefix = ("about ", "expected_") if by_clock else ("", "")
    steps, epochs = horizon[f"{prefix}steps"], horizon[f"{prefix}epochs"]
    longer = "Raise train.hours" if by_clock else "Raise train.steps, train.tokens or train.epochs"
    warnings = []
    if steps is not None and steps < FEW_STEPS:
        counted = f"{steps:,} {'step' if steps == 1 else 'steps'}"
        warnings.append(f"the run is only {about}{counted} long. {longer}, or lower train.global_batch")
    if epochs is not None and epochs < FEW_EPOCHS:
        warnings.append(f"the run sees {about}{epochs:.2g} epochs: most of the training data is never used. {longer}")
    if epochs is not None and epochs > MANY_EPOCHS:
        shorter = "a smaller train.hours" if by_clock else "fewer train.steps, train.tokens or train.epochs"
        seen = f"{epochs:.3g}" if epochs < 1000 else f"{epochs:,.0f}"
        more = "Use your own text with data.source=PATH" if embedded else "Use more data"
        warnings.append(f"the run sees {about}{seen} epochs and may memorise the training data. {more}, or {shorter}")
    return warnings


def _epochs(tokens: int | None, epoch: int) -> float | None:
    return round(tokens / epoch, 4) if tokens is not None and epoch else None


def token_limit(recipe: Recipe, train_tokens: int, world: int) -> float:
    """Return the earliest counted stop condition in tokens, before the batch is chosen; infinity if there is none."""
    train = recipe.train
    limits = [math.inf]
    if train.epochs and train_tokens:
        limits.append(train.epochs * train_tokens)
    if train.tokens:
        limits.append(train.tokens)
    if train.steps:
        requested = requested_batch(recipe)
        solved = solve_batch(*requested, world)
        batch = solved.global_batch if isinstance(solved, BatchPlan) else requested[0] or train.batch_base
        limits.append(train.steps * batch * recipe.data.seq_len)
    return min(limits)


def requested_batch(recipe: Recipe) -> tuple[int | None, int | None, int | None]:
    """Return global batch, micro-batch and accumulation as the recipe sets them; None for those the plan chooses."""
    train = recipe.train
    return none_if_auto(train.global_batch), none_if_auto(train.micro_batch), none_if_auto(train.accumulation)


UNKNOWN_WARMUP = 100  # steps of warm-up if the length of the run is not known


def default_warmup(expected_steps: float) -> tuple[int, str]:
    """Return the steps of warm-up and the reason: 2 % of the run, at least 5 and at most 1000."""
    if math.isinf(expected_steps):
        return UNKNOWN_WARMUP, "the length of the run is not known yet"
    value = min(1000, max(min(5, expected_steps // 2), expected_steps // 50, 1))
    least = ", at least 5" if 10 <= expected_steps < 250 else ""
    return int(value), f"about 2 % of an expected {expected_steps:.0f} steps{least}"


def warmup_warnings(warmup_steps: int, expected_steps: float) -> list[str]:
    """Warn about a warm-up that takes more than half of the run."""
    if warmup_steps <= expected_steps / 2:
        return []
    what = f"train.warmup_steps={warmup_steps} is more than half of an expected {expected_steps:.0f} steps"
    tenth = f"Use, for example, a tenth: {max(1, expected_steps // 10):.0f}"
    return [f"{what}: the learning rate hardly reaches its peak. {tenth}"]
