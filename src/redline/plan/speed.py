"""How fast a step can be, and how fast it will probably be: work over rates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from redline.plan.communication import Fabric, Volume, exposed
from redline.plan.rates import BEST_MATMUL_SHARE, COPY_SHARE, LAUNCH_SECONDS, attention_rate, fp8_lost, matmul_share
from redline.plan.work import Work


@dataclass(frozen=True)
class Peaks:
    """What a card can do at best: FLOP/s of matmuls in the precision used, and of attention and whatever else is never
    in fp8; bytes/s of its memory."""

    matmul: float
    attention: float
    bandwidth: float
    precision: str


@dataclass(frozen=True)
class Limit:
    """One kind of work: its time in a step at the dense peak, and at the best rate that kernels were seen to reach."""

    part: str
    at_peak: float | None  # seconds; None where a peak says nothing
    at_best: float


def limits(work: Work, peaks: Peaks, tokens: float) -> list[Limit]:
    """`tokens` is what one card handles in a step."""
    rate, bandwidth = attention_rate(work.head_dim), COPY_SHARE * peaks.bandwidth
    attention = work.attention / (rate.share * peaks.attention) + rate.passes * work.touched / bandwidth
    return [
        Limit(
            "matmul",
            tokens * work.matmul / peaks.matmul,
            tokens * work.matmul / (BEST_MATMUL_SHARE[peaks.precision] * peaks.matmul),
        ),
        Limit("attention", tokens * work.attention / peaks.attention, tokens * attention),
        Limit("memory-bound", None, (tokens * work.moved_least + work.update) / bandwidth),
    ]


def physical(parts: list[Limit]) -> float:
    """Seconds of a step at the dense peaks, all of the time: nothing can be faster."""
    return sum(part.at_peak or 0.0 for part in parts)


def reachable(parts: list[Limit]) -> float:
    """Seconds at the rates of the best kernels, if the memory-bound work hid entirely behind them."""
    return sum(part.at_best for part in parts if part.at_peak is not None)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on; None where the wires between cards are not known."""

    compute: float
    update: float
    communication: float | None = 0.0  # of all messages, if nothing hid them
    exposed: float | None = 0.0  # what remains of these

    @property
    def total(self) -> float | None:
        return None if self.exposed is None else self.compute + self.update + self.exposed


def expected(work: Work, peaks: Peaks, *, micro_tokens: int, accumulation: int, shards: int = 1) -> StepTime:
    """Of one card as redline runs it today, by prior; `shards` is how many share the update."""
    matmul, plain = _seconds_per_flop(work.width, peaks, micro_tokens)
    rate, bandwidth = attention_rate(work.head_dim, work.mask), COPY_SHARE * peaks.bandwidth
    again = work.attention_again / work.attention if work.attention else 0.0
    attention = work.attention / (rate.share * peaks.attention) + rate.passes * work.touched / bandwidth
    per_token = (work.matmul + work.recomputed) * matmul + attention * (1 + again) + work.moved / bandwidth
    micro = max(micro_tokens * per_token, work.kernels * LAUNCH_SECONDS)
    update = work.update / bandwidth + work.update_flops * plain
    return StepTime(accumulation * micro, update / shards)


def _seconds_per_flop(width: int, peaks: Peaks, micro_tokens: int) -> tuple[float, float]:
    """Of a layer's matmuls, and of those that are in no case in fp8."""
    quick, plain = (
        1 / (matmul_share(width, peaks.precision) * peaks.matmul),
        1 / (matmul_share(width) * peaks.attention),
    )
    if peaks.precision != "fp8":
        return quick, quick
    return quick + fp8_lost(micro_tokens, width) * max(0.0, plain - quick), plain


def among(time: StepTime, volume: Volume, fabric: Fabric, accumulation: int) -> StepTime:
    """The same step as one of a world of cards."""
    spoken = fabric.seconds(volume)
    return replace(time, communication=spoken, exposed=exposed(volume, fabric, time.compute / accumulation))
