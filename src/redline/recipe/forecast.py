"""Before the run: how fast, how long, how dear, and how far from what the hardware allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redline.errors import Problem, RecipeError
from redline.hardware.machine import Machine
from redline.jobs.base import costs
from redline.planning.communication import Fabric, Volume
from redline.planning.flops import mfu
from redline.planning.memory import Kernels
from redline.planning.speed import (
    BEST_MATMUL_SHARE,
    COPY_SHARE,
    Limit,
    Peaks,
    StepTime,
    Work,
    among,
    expected,
    limits,
    physical,
    reachable,
)
from redline.recipe.parallel import fabric_of, mode_of, volume_of
from redline.recipe.schema import Recipe

if TYPE_CHECKING:
    from redline.recipe.resolve import Resolved

CPU_SHARE = 0.28  # of a CPU's measured matmul rate, that a training step of a small model reaches


@dataclass(frozen=True)
class Measured:
    """What a few real steps showed."""

    tokens_per_s: float
    memory_gib: float | None
    step_ms: float
    compile_s: float


@dataclass(frozen=True)
class Forecast:
    tokens_per_s: float | None
    source: str
    flops: tuple[float, float]  # PaLM and causal, per token
    peak: float | None  # dense bf16 peak of all cards together
    physical: float | None  # tokens/s that no run can pass
    reachable: float | None  # tokens/s at the best kernels' rates, memory-bound work hidden
    parts: list[Limit]
    peaks: Peaks | None
    hours: float | None
    cost_usd: float | None
    mode: str
    volume: Volume
    fabric: Fabric
    time: StepTime | None  # of a step, where it can be foretold

    def event(self) -> dict[str, Any]:
        palm, causal = self.flops
        return {
            "throughput": {
                "tokens_per_s": _rounded(self.tokens_per_s),
                "mfu": self._share(self.tokens_per_s, palm),
                "mfu_causal": self._share(self.tokens_per_s, causal),
                "precision": "bf16",  # whose peak the shares are of, whatever is trained in
                "source": self.source,
            },
            "ceiling": {
                "tokens_per_s": _rounded(self.physical),
                "mfu": self._share_of_own_peak(causal),
                "precision": None if self.peaks is None else self.peaks.precision,
                "best_kernels_tokens_per_s": _rounded(self.reachable),
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

    def _communication(self) -> dict[str, Any]:
        time, volume = self.time or StepTime(0.0, 0.0, None, None), self.volume
        return {
            "mode": self.mode,
            "all_reduced_bytes": round(volume.reduced),
            "all_gathered_bytes": round(volume.gathered),
            "reduce_scattered_bytes": round(volume.scattered),
            "exchanged_bytes": round(volume.exchanged),  # Muon's, by all cards together
            "sent_bytes": round(volume.sent(self.fabric.world)),  # by each card
            "ms_per_step": _milliseconds(time.communication),
            "exposed_ms": _milliseconds(time.exposed),
            "estimate": True,
        }

    def tokens_by_clock(self, hours: float | None, counted: int | None) -> int | None:
        """What the clock leaves time for, when it stops the run before the counted limits do."""
        if hours is None or self.tokens_per_s is None:
            return None
        tokens = round(hours * 3600 * self.tokens_per_s)
        return None if counted is not None and counted <= tokens else tokens

    def _share_of_own_peak(self, flops: float) -> float | None:
        """Of the ceiling: 1 where all is computed at the peak of `precision`; less in fp8, as attention is in bf16."""
        if self.peaks is None or self.physical is None:
            return None
        share = mfu(self.physical, flops, self.peaks.matmul * self.fabric.world)
        return None if share is None else round(share, 4)

    def _share(self, rate: float | None, flops: float) -> float | None:
        share = None if rate is None else mfu(rate, flops, self.peak)
        return None if share is None else round(share, 4)


def _rounded(rate: float | None) -> int | None:
    return None if rate is None else round(rate)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def forecast(resolved: Resolved, *, price: float | None = None, measured: Measured | None = None) -> Forecast:
    """`price` is for one card an hour; `measured` replaces the prior."""
    machine, batch, flops = resolved.machine, resolved.batch, resolved.flops
    world, tokens = batch.world, resolved.tokens_per_step
    peaks, known = _peaks(machine, resolved.recipe.train.precision)
    work, volume, fabric = work_of(resolved), volume_of(resolved), fabric_of(resolved)
    counted = work if resolved.rows is None else work_of(resolved, of_data=True)
    parts = limits(counted, peaks, tokens / world) if peaks else []
    if measured is None:
        time, source = _expected(resolved, work, peaks, known)
    else:
        each = "" if world == 1 else " on one card"
        time, source = StepTime(tokens / world / measured.tokens_per_s, 0.0), f"measured{each}"
    if time is not None and world > 1:
        time, source = among(time, volume, fabric, batch.accumulation), source + _between_cards(fabric)
    rate = tokens / time.total if time and time.total else None
    hours = _hours(resolved, rate)
    bf16_peak = machine.peak("bf16")
    return Forecast(
        tokens_per_s=rate,
        source=source,
        flops=(flops.useful, flops.executed),
        peak=bf16_peak * world if bf16_peak else None,
        physical=tokens / physical(parts) if parts and known else None,
        reachable=tokens / reachable(parts) if parts else None,
        parts=parts,
        peaks=peaks if known else None,
        hours=hours,
        cost_usd=None if hours is None or price is None else hours * price * world,
        mode=mode_of(resolved),
        volume=volume,
        fabric=fabric,
        time=time,
    )


def _between_cards(fabric: Fabric) -> str:
    if fabric.bandwidth is None:
        return "; between cards unknown"
    return "; between cards an estimate"


def kernels_of(recipe: Recipe, device: str, *, precision: str, compiled: bool, fused: bool) -> Kernels:
    gpu = device == "cuda"
    scores = recipe.data.seq_len if recipe.model.attention == "dense" else 0
    return Kernels(gpu, compiled, fused, fused and precision == "fp8", gpu and recipe.data.pack, scores)


def work_of(resolved: Resolved, *, of_data: bool = False) -> Work:
    """What a step has to do: with whole rows, as expected speeds are calibrated; or, for ceilings, `of_data`."""
    train, rows = resolved.recipe.train, resolved.rows if of_data else None
    work: Work = costs(resolved.recipe, rows, resolved.batch.micro).work(
        resolved.shape,
        resolved.recipe.data.seq_len,
        checkpointing=train.grad_checkpointing,
        bytes_per_value=4 if train.precision == "fp32" else 2,
        optimizer=train.optimizer,
        ema=train.ema is not None,
        muon_steps=train.muon_steps,
        kernels=kernels_of(
            resolved.recipe,
            resolved.machine.device,
            precision=train.precision,
            compiled=train.compile,
            fused=resolved.recipe.model.kernels == "fused",
        ),
    )
    return work


def _peaks(machine: Machine, precision: str) -> tuple[Peaks | None, bool]:
    """The card's peaks, and whether they are a known card's; a measured card's are worked back from its rates."""
    spec, measured = machine.spec, machine.measured or {}
    attention = "fp32" if precision == "fp32" else "bf16"
    if spec is not None:
        matmul, other = spec.peak(precision), spec.peak(attention)
        if matmul is None or other is None:
            fix = "Use train.precision=bf16."
            raise RecipeError("recipe", [Problem("train.precision", f"the {spec.name} has no {precision} units.", fix)])
        return Peaks(matmul, other, spec.bandwidth, precision), True
    if machine.device == "cuda" and {precision, attention, "copy"} <= set(measured):
        share = BEST_MATMUL_SHARE
        return (
            Peaks(
                measured[precision] / share[precision],
                measured[attention] / share[attention],
                measured["copy"] / COPY_SHARE,
                precision,
            ),
            False,
        )
    return None, False


def _expected(resolved: Resolved, work: Work, peaks: Peaks | None, known: bool) -> tuple[StepTime | None, str]:
    """One card's share of a step."""
    machine, batch = resolved.machine, resolved.batch
    micro_tokens = batch.micro * resolved.recipe.data.seq_len
    if machine.device == "cpu":
        if machine.cpu_flops is None:
            return None, "unknown"
        rate = CPU_SHARE * machine.cpu_flops / resolved.flops.computed
        return StepTime(micro_tokens * batch.accumulation / rate, 0.0), "prior: this CPU's measured matmul rate"
    if peaks is None:
        return None, "unknown"
    shards = batch.world if mode_of(resolved) == "fsdp" else 1
    time = expected(work, peaks, micro_tokens=micro_tokens, accumulation=batch.accumulation, shards=shards)
    spec = machine.spec
    own = spec is not None and spec.name == "h200"
    if not known:
        source = "prior: this card's measured rates"
    else:
        source = "prior: H200 kernel rates" + ("" if own else ", scaled to this card")
    return time, source + costs(resolved.recipe).assumed


def _hours(resolved: Resolved, rate: float | None) -> float | None:
    limit, steps = resolved.recipe.train.hours, resolved.horizon_steps
    by_tokens = steps * resolved.tokens_per_step / rate / 3600 if steps and rate else None
    return min((hours for hours in (limit, by_tokens) if hours), default=None)
