"""Before the run: how fast, how long, how dear, and how far from what the hardware allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redline.errors import Problem, RecipeError
from redline.hardware.machine import Machine
from redline.jobs import costs
from redline.plan.flops import mfu
from redline.plan.memory import Kernels
from redline.plan.rates import BEST_MATMUL_SHARE, COPY_SHARE
from redline.plan.speed import Limit, Peaks, expected, limits, physical, reachable
from redline.plan.work import Work
from redline.recipe.schema import Recipe

if TYPE_CHECKING:
    from redline.recipe.resolve import Resolved

CPU_SHARE = 0.28  # of a CPU's measured matmul rate, that a training step of a small model reaches
BETWEEN_NODES = 50e9  # bytes/s a card: a 400 Gbit/s adapter for each


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

    def event(self) -> dict[str, Any]:
        palm, causal = self.flops
        return {
            "throughput": {
                "tokens_per_s": _rounded(self.tokens_per_s),
                "mfu": self._share(self.tokens_per_s, palm),
                "mfu_causal": self._share(self.tokens_per_s, causal),
                "source": self.source,
            },
            "ceiling": {
                "tokens_per_s": _rounded(self.physical),
                "mfu": self._share(self.physical, palm),
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
            "hours": None if self.hours is None else round(self.hours, 4),
            "cost_usd": None if self.cost_usd is None else round(self.cost_usd, 2),
        }

    def tokens_by_clock(self, hours: float | None, counted: int | None) -> int | None:
        """What the clock leaves time for, when it stops the run before the counted limits do."""
        if hours is None or self.tokens_per_s is None:
            return None
        tokens = round(hours * 3600 * self.tokens_per_s)
        return None if counted is not None and counted <= tokens else tokens

    def _share(self, rate: float | None, flops: float) -> float | None:
        share = None if rate is None else mfu(rate, flops, self.peak)
        return None if share is None else round(share, 4)


def _rounded(rate: float | None) -> int | None:
    return None if rate is None else round(rate)


def forecast(resolved: Resolved, *, price: float | None = None, measured: Measured | None = None) -> Forecast:
    """`price` is for one card an hour; `measured` replaces the prior."""
    machine, batch, flops = resolved.machine, resolved.batch, resolved.flops
    world, tokens = batch.world, resolved.tokens_per_step
    peaks, known = _peaks(machine, resolved.recipe.train.precision, resolved.nodes)
    work = _work(resolved)
    parts = limits(work, peaks, tokens / world) if peaks else []
    rate, source = _expected(resolved, work, peaks, known)
    if measured is not None:
        rate, source = measured.tokens_per_s * world, "measured"
    hours = _hours(resolved, rate)
    bf16_peak = machine.peak("bf16")
    return Forecast(
        tokens_per_s=rate,
        source=source,
        flops=(flops.useful, flops.causal),
        peak=bf16_peak * world if bf16_peak else None,
        physical=tokens / physical(parts) if parts and known else None,
        reachable=tokens / reachable(parts) if parts else None,
        parts=parts,
        peaks=peaks if known else None,
        hours=hours,
        cost_usd=None if hours is None or price is None else hours * price * world,
    )


def kernels_of(recipe: Recipe, device: str, *, precision: str, compiled: bool, fused: bool) -> Kernels:
    gpu = device == "cuda"
    scores = recipe.data.seq_len if recipe.model.attention == "dense" else 0
    return Kernels(gpu, compiled, fused, fused and precision == "fp8", gpu and recipe.data.pack, scores)


def _work(resolved: Resolved) -> Work:
    train = resolved.recipe.train
    work: Work = costs(resolved.recipe).work(
        resolved.shape,
        resolved.recipe.data.seq_len,
        checkpointing=train.grad_checkpointing,
        bytes_per_value=4 if train.precision == "fp32" else 2,
        optimizer=train.optimizer,
        ema=train.ema is not None,
        kernels=kernels_of(
            resolved.recipe,
            resolved.machine.device,
            precision=train.precision,
            compiled=train.compile,
            fused=resolved.recipe.model.kernels == "fused",
        ),
    )
    return work


def _peaks(machine: Machine, precision: str, nodes: int) -> tuple[Peaks | None, bool]:
    """The card's peaks, and whether they are a known card's; a measured card's are worked back from its rates."""
    spec, measured = machine.spec, machine.measured or {}
    attention = "fp32" if precision == "fp32" else "bf16"
    if spec is not None:
        matmul, other = spec.peak(precision), spec.peak(attention)
        if matmul is None or other is None:
            fix = "Use train.precision=bf16."
            raise RecipeError("recipe", [Problem("train.precision", f"the {spec.name} has no {precision} units.", fix)])
        return Peaks(matmul, other, spec.bandwidth, precision, spec.link if nodes == 1 else BETWEEN_NODES), True
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


def _expected(resolved: Resolved, work: Work, peaks: Peaks | None, known: bool) -> tuple[float | None, str]:
    machine, batch = resolved.machine, resolved.batch
    if machine.device == "cpu":
        if machine.cpu_flops is None:
            return None, "unknown"
        return CPU_SHARE * machine.cpu_flops / resolved.flops.executed, "prior: this CPU's measured matmul rate"
    if peaks is None:
        return None, "unknown"
    micro_tokens = batch.micro * resolved.recipe.data.seq_len
    step = expected(work, peaks, micro_tokens=micro_tokens, accumulation=batch.accumulation, world=batch.world)
    spec = machine.spec
    own = spec is not None and spec.name == "h200"
    if not known:
        source = "prior: this card's measured rates"
    else:
        source = "prior: H200 kernel rates" + ("" if own else ", scaled to this card")
    return resolved.tokens_per_step / step, source + costs(resolved.recipe).assumed


def _hours(resolved: Resolved, rate: float | None) -> float | None:
    limit, steps = resolved.recipe.train.hours, resolved.horizon_steps
    by_tokens = steps * resolved.tokens_per_step / rate / 3600 if steps and rate else None
    return min((hours for hours in (limit, by_tokens) if hours), default=None)
