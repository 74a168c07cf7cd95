"""The plan beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redline.monitor.events import Event, number, section
from redline.monitor.roofline import Standing
from redline.monitor.verdict import dollars
from redline.units import format_count, format_seconds


@dataclass(frozen=True)
class PlanRow:
    """Something that the plan foretold, that the run measured, or both."""

    what: str
    planned: float | None
    measured: float | None
    show: Callable[[float], str]

    @property
    def share(self) -> float | None:
        """Of the plan; None where there is nothing to divide."""
        return self.measured / self.planned if self.measured is not None and self.planned else None

    def data(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "show"} | {"share": self.share}

    def cells(self) -> tuple[str, str, str, str]:
        planned, measured = ("–" if v is None else self.show(v) for v in (self.planned, self.measured))
        return self.what, planned, measured, "–" if self.share is None else f"{100 * self.share:.0f} %"


def plan_rows_of(plan: Event, headline: Mapping[str, Any], standing: Standing) -> list[PlanRow]:
    """Only what the plan had a figure for."""
    speed, horizon = section(plan, "throughput"), section(plan, "horizon")
    by_the_clock = number(horizon, "expected_tokens") is not None  # then the horizon's tokens are all that there are
    rows = [
        PlanRow("tokens/s", number(speed, "tokens_per_s"), headline["tokens_per_s_median"], format_count),
        PlanRow("ms per step", standing.planned_ms, standing.step_ms, _ms),
        PlanRow("MFU", number(speed, "mfu"), headline["mfu_median"], _percent),
        PlanRow("mask-exact MFU", number(speed, "mfu_causal"), headline["mfu_causal_median"], _percent),
        PlanRow("peak memory", number(section(plan, "memory_gib"), "peak"), headline["peak_memory_gib"], _gib),
        PlanRow("steps", None if by_the_clock else number(horizon, "steps"), headline["step"], "{:,.0f}".format),
        PlanRow(
            "tokens",
            number(horizon, "expected_tokens" if by_the_clock else "tokens"),
            headline["tokens"],
            format_count,
        ),
        PlanRow("training time", number(plan, "hours"), headline["hours"], _hours),
        PlanRow("cost", number(plan, "cost_usd"), headline["cost_usd"], dollars),
    ]
    return [row for row in rows if row.planned is not None]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _gib(value: float) -> str:
    return f"{value:.1f} GiB" if value >= 1 else f"{value:.2f} GiB"


def _hours(value: float) -> str:
    return format_seconds(3600 * value)
