"""A run in plain words: what it reached, at what speed and price, and where there is head-room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redline.runs.console import one_line
from redline.runs.events import Event, number, section
from redline.runs.report.roofline import Standing
from redline.units import format_count, format_seconds, format_usd

_WORSE = 1.002  # of the best loss: below it the last is as good
_APART = 0.1  # of a speed: the usual step's, and that of the whole run
_WORTH_NAMING = 0.05  # of a step

_ENDS = {
    "running": "Still running",
    "preempted": "Had to make room",
    "stopped": "Was stopped",
    "failed": "Failed",
    "crashed": "Broke off without a word",
}


def verdict(data: Mapping[str, Any], steps: Sequence[Event], plan: Event, standing: Standing) -> str:
    """One paragraph of sentences; `data` is the report's, as far as it is known by now."""
    reached = _reached(data["headline"])
    end = _end(data, plan)
    if reached is None:
        return f"{end or 'Ended'} before anything was measured."
    said = [end or "", f"{'it had ' if end else ''}{reached}", _speed(data["headline"], plan, standing)]
    said += [_loader(steps), _binds(standing), head_room(standing), _trouble(data)]
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in said if sentence)


def _end(data: Mapping[str, Any], plan: Event) -> str | None:
    """None for a run that did what it was asked to."""
    words = _ENDS.get(str(data["status"]))
    step, steps = data["headline"]["step"], number(section(plan, "horizon"), "steps")
    if words is None or step is None:
        return words
    return f"{words} at step {step:,}" + (f" of {steps:,.0f}" if steps and steps > step else "")


def _reached(headline: Mapping[str, Any]) -> str | None:
    """The loss, and what it took."""
    last, best, train = headline["val_loss"], headline["best_val_loss"], headline["train_loss"]
    if last is not None:
        loss = f"reached validation loss {last:.4g}"
    elif train is not None:
        loss = f"reached training loss {train:.4g} (nothing was held out)"
    else:
        return None
    hours, tokens, cost = headline["hours"], headline["tokens"], headline["cost_usd"]
    took = [
        f"in {format_seconds(3600 * hours)}" if hours else "",
        f"on {format_count(tokens)} tokens" if tokens else "",
        f"for {dollars(cost)}" if cost is not None else "",
        f"at {100 * headline['mfu_median']:.1f} % MFU" if headline["mfu_median"] is not None else "",
    ]
    worse = f"; its best was {best:.4g}" if best is not None and last is not None and last > _WORSE * best else ""
    return " ".join(filter(None, [loss, *took])) + worse


def _speed(headline: Mapping[str, Any], plan: Event, standing: Standing) -> str:
    """Against the plan, or what the hardware allows."""
    rate, planned = headline["tokens_per_s_median"], number(section(plan, "throughput"), "tokens_per_s")
    if rate is None:
        return ""
    parts = [f"{100 * rate / planned:.0f} % of the planned speed{_overall(headline, rate, planned)}"] if planned else []
    ceiling = standing.bars[-1] if standing.bars else None
    if ceiling is not None and ceiling.total and standing.step_ms:
        share = 100 * ceiling.total / standing.step_ms
        parts.append(f"{share:.0f} % of what {_ALLOWED[ceiling.name]}")
    return f"that is {' and '.join(parts)}" if parts else ""


def _overall(headline: Mapping[str, Any], rate: float, planned: float) -> str:
    """Most of its steps were so fast; where all of its time says something else, that too."""
    hours, tokens = headline["hours"], headline["tokens"]
    whole = tokens / (3600 * hours) if hours and tokens else rate
    return f" ({100 * whole / planned:.0f} % over all its time)" if abs(whole / rate - 1) > _APART else ""


_ALLOWED = {
    "dense peak": "the dense peak allows",
    "best kernels": "the best kernels seen allow",
    "matmul rate": "this CPU's matmul rate allows",
}


def _loader(steps: Sequence[Event]) -> str:
    share = loader_share(steps)
    return "" if share is None else f"the data loader cost {100 * share:.1f} % of the time"


def loader_share(steps: Sequence[Event]) -> float | None:
    """Of all time in logged steps, what went by waiting for data."""
    pairs = [(number(step, "data_wait_ms"), number(step, "step_ms")) for step in steps]
    known = [(wait, whole) for wait, whole in pairs if wait is not None and whole is not None]
    whole = sum(ms for _, ms in known)
    return sum(wait for wait, _ in known) / whole if whole > 0 else None


def _binds(standing: Standing) -> str:
    """What outside of the kernels held the step back, in a word; the roofline's sentences say more."""
    return next((said.partition(" binds:")[0] + " binds" for said in standing.sentences if " binds:" in said), "")


def head_room(standing: Standing) -> str:
    """Where most of a step's time above the dense peak is, by the plan's parts: slow kernels, or time beside them."""
    bars = {bar.name: bar for bar in standing.bars}
    peak, best = bars.get("dense peak"), bars.get("best kernels")
    if peak is None or best is None or not standing.step_ms:
        return ""
    above = {f"{part} kernels": ms - peak.ms[part] for part, ms in best.ms.items() if part in peak.ms}
    beside = "memory-bound work and whatever else is beside the kernels" if best.may_hide else "time beside the kernels"
    above[beside] = standing.step_ms - best.total
    name, ms = max(above.items(), key=lambda item: item[1])
    share = ms / standing.step_ms
    if share < _WORTH_NAMING:
        return "there is little head-room: each part is near the dense peak"
    return f"most head-room: {name} ({100 * share:.0f} % of a step)"


def _trouble(data: Mapping[str, Any]) -> str:
    kinds = [incident["kind"] for incident in data["incidents"]]
    skipped, resumed = data["skipped_steps"], kinds.count("resumed")
    parts = [
        _times(kinds.count("recovery"), "recovery", "recoveries"),
        _times(resumed, "resume", "resumes"),
        _times(skipped, "skipped update", "skipped updates"),
        _times(kinds.count("warning"), "warning", "warnings"),
    ]
    told = [part for part in parts if part]
    return f"on the way: {', '.join(told)}" if told else ""


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}" if count else ""


def resume_line(data: Mapping[str, Any], run: str) -> str | None:
    """What goes on with a run that ended early."""
    if data["status"] not in ("crashed", "preempted", "stopped", "failed") or data.get("reason") == "nonfinite":
        return None  # what diverged would diverge again
    import shlex

    return f"redline train --resume {shlex.quote(one_line(run))}"


def dollars(cost: float) -> str:
    return format_usd(cost) if cost >= 0.005 or cost <= 0 else "less than a cent"
