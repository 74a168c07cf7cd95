"""Where a run's step stands against its ceilings: the plan's parts at their peaks, and the step as it was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from redline.errors import UserError
from redline.fields import AUTO
from redline.hardware.specs import spec_of
from redline.jobs.base import Costs, costs
from redline.planning.flops import Passes
from redline.planning.shapes import SHAPE_KEYS, DecoderShape
from redline.planning.speed import Work
from redline.recipe.load import validate
from redline.recipe.schema import Recipe
from redline.runs.events import Event, computed_flops, number, section
from redline.runs.report.figures import Figure, drawing, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


# ----------------------------------------------------------------------------------------------------
# FLOPs and bytes of a run's step, by the plan's counts: where its parts stand under a classical roofline.


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


def _costs(lock: Mapping[str, Any], recipe: Recipe) -> Costs:
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


# ----------------------------------------------------------------------------------------------------
# The roofline of a run: its step's time beside what ceilings leave of it, and the classical diagram.


_PART_INKS = {"matmul": "second", "attention": "warn", "memory-bound": "faint", "optimizer": "good"}
_OTHER_INKS = ("second", "warn", "good", "faint")
_MEASURED = "this run"


def draw_roofline(standing: Standing) -> list[Figure]:
    """At most two figures; none without a measured step and a ceiling to hold it against."""
    figures = []
    if standing.bars and standing.step_ms:
        svg = drawing(lambda canvas: _draw_bars(canvas, standing))
        figures.append(Figure("A step against its ceilings", svg))
    if standing.points:
        svg = drawing(lambda canvas: _draw_roofline(canvas, standing))
        figures.append(Figure("Roofline, by the plan's counts of FLOPs and bytes", svg))
    return figures


def _draw_bars(canvas: Canvas, standing: Standing) -> None:
    ax = canvas.subplots()
    bars, step_ms = standing.bars, standing.step_ms or 0.0
    inks = _inks(part for bar in bars for part in (*bar.ms, *bar.may_hide))
    most = max([step_ms, *(bar.total + sum(bar.may_hide.values()) for bar in bars)])
    for row, bar in enumerate(bars):
        _draw_bar(ax, row, bar, inks, most)
    ax.barh(len(bars), step_ms, height=0.56, color=ink("accent"))
    share = "" if standing.mfu is None else f" · {standing.mfu:.1%} MFU"
    _inside_or_beside(ax, len(bars), step_ms, f"{_format_ms(step_ms)} ms{share}", most)
    if standing.planned_ms is not None and standing.planned_ms < 1.25 * most:
        ax.plot([standing.planned_ms] * 2, [len(bars) - 0.4, len(bars) + 0.4], color=ink("ink"), linewidth=1.2)
        _note(ax, standing.planned_ms, len(bars) + 0.46, f"planned: {_format_ms(standing.planned_ms)}", "center", "top")
    ax.set_yticks(range(len(bars) + 1), [*(bar.name for bar in bars), _MEASURED])
    for label in ax.get_yticklabels():
        label.set_color(ink("ink"))
    ax.set_ylim(len(bars) + 0.85, -0.55)
    ax.set_xlim(0, 1.12 * most)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("ms per step")
    _legend(canvas, inks)


def _draw_bar(ax: Axes, row: int, bar: Bar, inks: dict[str, str], most: float) -> None:
    """The parts that cannot hide behind each other, then outlined what may."""
    left = 0.0
    for part, ms in bar.ms.items():
        ax.barh(row, ms, left=left, height=0.56, color=ink(inks[part]))
        if ms > 0.09 * most:
            ax.text(left + ms / 2, row, _format_ms(ms), ha="center", va="center", color=ink("card"), size=8.5)
        left += ms
    for part, ms in bar.may_hide.items():
        ax.barh(row, ms, left=left, height=0.56, color=ink(inks[part]), alpha=0.25)
        if ms > 0.09 * most:
            ax.text(left + ms / 2, row, _format_ms(ms), ha="center", va="center", color=ink("ink"), size=8.5)
        left += ms
    _note(ax, left + 0.012 * most, row, f"{_format_ms(bar.total)} ms", "left", "center", "ink")


def _inside_or_beside(ax: Axes, row: int, ms: float, text: str, most: float) -> None:
    inside = ms > 0.45 * most
    x = 0.02 * most if inside else ms + 0.02 * most
    ax.text(x, row, text, ha="left", va="center", color=ink("card" if inside else "accent"), size=8.5, weight="bold")


def _legend(canvas: Canvas, inks: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    hides = {"memory-bound": "memory-bound (may hide)"}
    patches = [
        Patch(color=ink(name), alpha=0.25 if part in hides else 1.0, label=hides.get(part, part))
        for part, name in inks.items()
    ]
    canvas.legend(handles=patches, loc="outside upper right", ncols=len(patches), handlelength=1.0, columnspacing=1.2)


def _draw_roofline(canvas: Canvas, standing: Standing) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    ax = canvas.subplots()
    bandwidth, *peaks = standing.roofs
    low, high = _span(standing.points, bandwidth, peaks)
    top = max(peak.rate for peak in peaks)
    for peak in peaks:
        ridge = peak.rate / bandwidth.rate
        ax.plot([ridge, high], [peak.rate / 1e12] * 2, color=ink("faint"))
        known = f"{peak.name} {_rate(peak.rate / 1e12)} TFLOP/s{', measured' if peak.measured else ''}"
        above = peak.rate == top  # below the others, whose points stand above them
        _note(ax, high, (1.06 if above else 0.94) * peak.rate / 1e12, known, "right", "bottom" if above else "top")
    ax.plot([low, top / bandwidth.rate], [low * bandwidth.rate / 1e12, top / 1e12], color=ink("faint"))
    for point in standing.points:
        at_a_roof = any(0.9 < 1e12 * point.tflops / peak.rate < 1.1 for peak in peaks)
        _draw_point(ax, point, below=9 if at_a_roof else 0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(min([low * bandwidth.rate / 1e12, *(0.6 * p.tflops for p in standing.points)]), 1.8 * top / 1e12)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("FLOP per byte of memory traffic")
    ax.set_ylabel("TFLOP/s")
    _along_the_slope(ax, low, bandwidth, top)


def _span(points: list[Point], bandwidth: Roof, peaks: list[Roof]) -> tuple[float, float]:
    """From well left of the first ridge to right of everything."""
    ridges = [peak.rate / bandwidth.rate for peak in peaks]
    places = [*ridges, *(point.flops_per_byte for point in points)]
    return min(places) / 6, max(places) * 10  # names stand to the right


def _draw_point(ax: Axes, point: Point, below: float) -> None:
    """With its name beside it, `below` the roof that would cross it out."""
    name = "accent" if point.measured else _PART_INKS.get(point.name, "second")
    label = f"{point.name if point.measured else f'{point.name} at best'}: {_rate(point.tflops)}"
    ax.plot(point.flops_per_byte, point.tflops, "o", color=ink(name), markersize=8 if point.measured else 6, zorder=3)
    ax.annotate(
        label,
        (point.flops_per_byte, point.tflops),
        xytext=(9, -below),
        textcoords="offset points",
        va="center",
        size=8.5,
        color=ink(name),
        weight="bold" if point.measured else "normal",
    )


def _along_the_slope(ax: Axes, low: float, bandwidth: Roof, top: float) -> None:
    """The bandwidth's figure, written along its roof."""
    place = math.sqrt(low * top / bandwidth.rate)
    rate = f"{bandwidth.rate / 1e12:.3g} TB/s" if bandwidth.rate >= 1e12 else f"{bandwidth.rate / 1e9:.3g} GB/s"
    ax.text(
        place,
        1.08 * place * bandwidth.rate / 1e12,
        rate,
        rotation=math.degrees(math.atan(bandwidth.rate / 1e12)),  # as data go; the axes turn it with them
        rotation_mode="anchor",
        transform_rotates_text=True,
        ha="center",
        va="bottom",
        size=8.5,
        color=ink("faint"),
    )


def _note(ax: Axes, x: float, y: float, text: str, ha: str, va: str, name: str = "faint") -> None:
    ax.text(x, y, text, ha=ha, va=va, size=8.5, color=ink(name))


def _inks(parts: Iterable[str]) -> dict[str, str]:
    names = list(dict.fromkeys(parts))
    return {part: _PART_INKS.get(part, _OTHER_INKS[i % len(_OTHER_INKS)]) for i, part in enumerate(names)}


def _rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _format_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
