"""Where a run's step stands against its ceilings: the plan's parts at their peaks, and the step as it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from redline.monitor.counts import Point, Roof, limits_ms, step_points, step_roofs
from redline.monitor.events import Event, computed_flops, number, section

_WAITING = 0.02  # of a step: below it the loader is no ceiling
_MOSTLY = 0.5  # of the log lines
_HEAT = frozenset({"thermal", "hw_thermal", "hw_slowdown", "power_brake"})


@dataclass(frozen=True)
class Bar:
    """A step's time at some rate, by part; a part that can hide behind the others is set apart."""

    name: str
    ms: dict[str, float]
    may_hide: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.ms.values())


@dataclass(frozen=True)
class Standing:
    """What the report shows; empty where nothing is known."""

    bars: list[Bar]
    step_ms: float | None
    mfu: float | None
    planned_ms: float | None
    sentences: list[str]
    roofs: list[Roof]
    points: list[Point]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def standing(steps: Sequence[Event], plan: Event, lock: Mapping[str, Any]) -> Standing:
    steady = steps[1:] or steps
    step_ms, mfu = _median(steady, "step_ms"), _median(steady, "mfu")
    bars = _bars(plan, lock)
    roofs = step_roofs(lock)
    points = step_points(lock, plan, _median(steady, "tokens_per_s")) if roofs else []
    sentences = [] if step_ms is None else [*_distance(step_ms, bars, plan, lock), _binding(steady, step_ms, bars)]
    return Standing(bars, step_ms, mfu, _planned_ms(plan), sentences, roofs if points else [], points)


def _bars(plan: Event, lock: Mapping[str, Any]) -> list[Bar]:
    """The ceilings that are known, the highest first."""
    peak, best = limits_ms(plan, "ms_at_peak"), limits_ms(plan, "ms_per_step")
    bars = []
    if peak and number(section(plan, "ceiling"), "tokens_per_s") is not None:  # else worked back from measured rates
        bars.append(Bar("dense peak", peak))
    if best:
        hides = {part: ms for part, ms in best.items() if part not in peak}
        bars.append(Bar("best kernels", {part: ms for part, ms in best.items() if part in peak}, hides))
    return bars or _cpu_bar(plan, lock)


def _cpu_bar(plan: Event, lock: Mapping[str, Any]) -> list[Bar]:
    """A CPU's own matmul rate, as it was measured before the run, is the one ceiling known of it."""
    rate = number(section(lock, "machine"), "cpu_flops")
    flops = computed_flops(plan)
    tokens = number(section(plan, "batch"), "tokens_per_step")
    if not rate or not flops or not tokens:
        return []
    return [Bar("matmul rate", {"all FLOPs": 1e3 * tokens * flops / rate})]


def _planned_ms(plan: Event) -> float | None:
    rate = number(section(plan, "throughput"), "tokens_per_s")
    tokens = number(section(plan, "batch"), "tokens_per_step")
    return 1e3 * tokens / rate if rate and tokens else None


def _distance(step_ms: float, bars: Sequence[Bar], plan: Event, lock: Mapping[str, Any]) -> list[str]:
    """How far the step is from each ceiling, in one sentence; another says what is not known."""
    name = str(section(lock, "machine").get("name") or "this machine")
    if not section(plan, "ceiling"):
        return ["The log holds no plan: there is no ceiling to draw."]
    if not bars:
        return [f"No table has a peak of {name} and none of its rates was measured: there is no ceiling to draw."]
    parts = [f"{step_ms / bar.total:.2f} times the {_ms(bar.total)} {_WORDS[bar.name]}" for bar in bars if bar.total]
    said = [f"A step takes {_ms(step_ms)}: {' and '.join(parts)}."] if parts else []
    if bars[0].name == "matmul rate":
        said.append(f"No table has a peak of {name}; the matmul rate is the one that was measured on it.")
    elif bars[0].name != "dense peak":
        said.append(f"No table has a peak of {name}; its kernels' rates are those that were measured on it.")
    return said


_WORDS = {
    "dense peak": "of the dense peak",
    "best kernels": "that the best kernels seen need when memory-bound work hides behind them",
    "matmul rate": "that its FLOPs take at this CPU's matmul rate",
}


def _binding(steps: Sequence[Event], step_ms: float, bars: Sequence[Bar]) -> str:
    """Which ceiling binds, in one sentence."""
    waiting = (_median(steps, "data_wait_ms") or 0.0) / step_ms if step_ms else 0.0
    if waiting > _WAITING:
        return f"The loader binds: {waiting:.0%} of a step is waiting for data."
    told = [set(str(step["throttle"]).split("+")) for step in steps if isinstance(step.get("throttle"), str)]
    hot, capped = sum(bool(words & _HEAT) for words in told), sum("power_cap" in words for words in told)
    if told and hot > _MOSTLY * len(told):
        return f"Heat or the power supply binds: it slowed the card in {_of_lines(hot, told)}{_card(steps)}."
    if told and capped > _MOSTLY * len(told):
        how = "a step now gets shorter by fewer joules, not by faster kernels alone"
        return f"Power binds: the card was at its power limit in {_of_lines(capped, told)}{_card(steps)}; {how}."
    calm = "" if not told else f"Neither power nor heat held the card back in most log lines{_card(steps)}. "
    return calm + _kernels_bind(step_ms, bars)


def _kernels_bind(step_ms: float, bars: Sequence[Bar]) -> str:
    best = next((bar for bar in bars if bar.name == "best kernels"), None)
    if best is None or not best.ms:
        return "What binds is not known: nothing outside the step was seen to hold it back."
    most, ms = max(best.ms.items(), key=lambda part: part[1])
    left = max(0.0, step_ms - best.total)
    if left < 0.1 * step_ms:
        return f"The kernels' rates bind, those of {most} most ({_ms(ms)} of the step at best)."
    hides = sum(best.may_hide.values())
    beside = f", of which memory-bound work explains {_ms(hides)} at the least" if hides else ""
    return (
        f"The kernels bind: {most} needs {_ms(ms)} at best, and {_ms(left)} of the step are beyond the "
        f"best kernels' time{beside}."
    )


def _of_lines(count: int, lines: Sequence[Any]) -> str:
    return f"{count} of {len(lines)} log lines"


def _card(steps: Sequence[Event]) -> str:
    watts, clock = _median(steps, "power_w"), _median(steps, "sm_clock_mhz")
    told = [f"{watts:.0f} W" if watts else "", f"{clock:,.0f} MHz" if clock else ""]
    return f" (median {' at '.join(filter(None, told))})" if any(told) else ""


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _median(steps: Sequence[Event], key: str) -> float | None:
    values = [value for step in steps if (value := number(step, key)) is not None]
    return statistics.median(values) if values else None
