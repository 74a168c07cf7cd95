"""A speed that somebody asks for, held against physics."""

from __future__ import annotations

import math

from redline.errors import UserError
from redline.jobs.base import costs
from redline.planning.speed import physical
from redline.recipe.forecast import Forecast
from redline.recipe.resolve import Resolved
from redline.units import format_count


def check_target(target: float, resolved: Resolved, forecast: Forecast) -> str | None:
    """Raises when the target is beyond the limit; else a warning when it is beyond what kernels reach, or None."""
    limit, name = forecast.physical, resolved.machine.name
    if limit is None:
        return f"the peak of {name} is not known: whether {target:,.0f} tokens/s is possible cannot be said"
    if target > limit and target <= (most := _whatever_the_data(limit, resolved, forecast)):
        return (
            f"{target:,.0f} tokens/s is above {limit:,.0f}, the limit where every token sees its whole row and is "
            f"scored. Short documents and long prompts raise it, to {most:,.0f} at the most: it depends on the data"
        )
    if target > limit:
        raise UserError(
            f"{target:,.0f} tokens/s is impossible.\n{_arithmetic(target, limit, resolved, forecast)}",
            where="--target-tokens-per-s",
            fix=_ways_out(target, limit, resolved),
        )
    if forecast.reachable is not None and target > forecast.reachable:
        return (
            f"{target:,.0f} tokens/s is below the physical limit of {limit:,.0f}, but above {forecast.reachable:,.0f}, "
            "what the best measured kernels would give with all memory-bound work hidden"
        )
    return None


def _whatever_the_data(limit: float, resolved: Resolved, forecast: Forecast) -> float:
    """Tokens/s that no data allow, by that part of the work which is the same for all."""
    matmul, attention = costs(resolved.recipe).certain(resolved.shape)
    at_peak = {part.part: part.at_peak or 0.0 for part in forecast.parts}
    return limit * physical(forecast.parts) / (matmul * at_peak["matmul"] + attention * at_peak["attention"])


def _arithmetic(target: float, limit: float, resolved: Resolved, forecast: Forecast) -> str:
    flops, world = resolved.flops.executed, resolved.batch.world
    cards = f"one {resolved.machine.name}" if world == 1 else f"{world} × {resolved.machine.name}"
    per_second = f"{target:,.0f}/s = {flops * target / 1e12:,.0f} TFLOP/s"
    needed = f"{flops / 1e9:.3f} GFLOP a token ({resolved.flops.formula_executed}) × {per_second}"
    if resolved.recipe.train.precision == "fp8":
        there, bound = _fp8_limit(limit, flops, cards, world, forecast)
    else:
        there, bound = _dense_limit(limit, cards, world, forecast)
    reach = f"best kernels {format_count(forecast.reachable)}" if forecast.reachable else ""
    plan = f"this plan {format_count(forecast.tokens_per_s)} ({forecast.source})" if forecast.tokens_per_s else ""
    rows = {
        "needed": needed,
        "there is": there,
        "limit": bound,
        "real": ", ".join(filter(None, [reach, plan])),
        "instead": "",
    }
    return "\n".join(f"  {label:<9}{text}" for label, text in rows.items()).rstrip(" ") + " "


def _dense_limit(limit: float, cards: str, world: int, forecast: Forecast) -> tuple[str, str]:
    peaks = forecast.peaks
    assert peaks is not None
    there = f"{world * peaks.matmul / 1e12:,.0f} TFLOP/s: the dense {peaks.precision} peak of {cards}"
    sparse = " (vendors' tables print twice that, for 2:4 sparsity, which training does not use)"
    return there + sparse, f"{limit:,.0f} tokens/s, at 100 % of the peak all of the time"


def _fp8_limit(limit: float, flops: float, cards: str, world: int, forecast: Forecast) -> tuple[str, str]:
    """Matmuls at the fp8 peak, attention at the bf16 one."""
    peaks = forecast.peaks
    assert peaks is not None
    matmul = (forecast.parts[0].at_peak or 0.0) / physical(forecast.parts)
    attention = f"{peaks.attention / 1e12:,.0f} in bf16 for attention"
    there = f"{peaks.matmul / 1e12:,.0f} TFLOP/s in fp8 for matmuls, {attention}"
    everything = f"{world * peaks.matmul / flops:,.0f} if attention were fp8 too"
    shares = f"{matmul:.0%} of the time in matmuls, {1 - matmul:.0%} in attention"
    return f"{there}: the dense peaks of {cards}", f"{limit:,.0f} tokens/s ({shares}); {everything}"


def _ways_out(target: float, limit: float, resolved: Resolved) -> str:
    cards = math.ceil(resolved.batch.world * target / limit)
    parameters = format_count(resolved.shape.matmul_parameters * limit / target)
    more = f"--gpus {cards} or more" if resolved.nodes == 1 else f"{cards} cards or more in all"
    return f"ask for less, plan with {more}, or take a model below {parameters} parameters."
