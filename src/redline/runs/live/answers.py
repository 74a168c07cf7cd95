"""The questions one has about a run, answered in plain words: how far, how fast, is it well, what will it cost."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from redline.runs.console import one_line
from redline.runs.events import computed_flops, number, section
from redline.runs.state import RunState
from redline.units import format_count, format_seconds, format_usd
from redline.vocabulary import Status

Mood = Literal["good", "careful", "bad", "over"]

_QUIET_S, _LONG_WARMUP_S = 180.0, 900.0
_QUIET_LINES = 10  # log lines that are overdue
_WAITING = 0.02  # of a step


@dataclass(frozen=True)
class Answers:
    """Sentences for people. `mood` colours the third; a word says it, too."""

    far: str
    fast: str
    health: str
    cost: str
    mood: Mood

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def answer(state: RunState, status: Status, now: float, lock: Mapping[str, Any], name: str = "RUN") -> Answers:
    mood, health = _health(state, status, now, name)
    return Answers(_far(state, status, now), fast(state, lock), health, _cost(state, status, now), mood)


# --- how far


def _far(state: RunState, status: Status, now: float) -> str:
    if state.stop is not None and status != "running":
        return _ended(state, status)
    step, progress = number(state.step, "step"), number(state.step, "progress")
    if step is None:
        return "Not begun: " + (state.doing or "nothing is logged yet")
    of = f" of about {state.end_step:,.0f}" if state.end_step and state.end_step >= step else ""
    done = f"{100 * progress:.0f} % done: " if progress is not None else ""
    left = remaining_s(state, status, now)
    to_go = f", {format_seconds(left)} to go" if left is not None else ""
    return f"{done}step {step:,.0f}{of}{to_go}"


def _ended(state: RunState, status: Status) -> str:
    stop = state.stop or {}
    step, tokens, hours = (number(stop, key) for key in ("step", "tokens", "hours"))
    parts = [
        "" if step is None else f"{step:,.0f} steps",
        "" if tokens is None else f"{format_count(tokens)} tokens",
        "" if hours is None else format_seconds(3600 * hours),
    ]
    reason = one_line(stop.get("reason"))
    why = "" if reason == status else _REASONS.get(reason, reason)
    return f"{status.capitalize()}: {', '.join(filter(None, parts))}" + (f" ({why})" if why else "")


_REASONS = {
    "steps": "all its steps are done",
    "hours": "its time is up",
    "target_loss": "it reached its target loss",
    "patience": "the validation loss stopped improving",
    "requested": "as it was asked to",
    "moved": "its directory was moved away",
    "nonfinite": "too many updates in a row were not finite",
    "damaged_data": "a file of its training data is damaged",
}


def remaining_s(state: RunState, status: Status, now: float) -> float | None:
    """What the last step promised, less what passed since."""
    eta, said = number(state.step, "eta_s"), number(state.step, "time")
    if eta is None or status != "running":
        return None
    return max(0.0, eta - max(0.0, now - said)) if said is not None else eta


# --- how fast


def fast(state: RunState, lock: Mapping[str, Any]) -> str:
    rate = recent(state, "tokens_per_s")
    if rate is None:
        return "No speed is known before the first logged step"
    shares = [f"{100 * rate / limit:.0f} % of {name}" for name, limit in limits(state, lock).items()]
    mfu = recent(state, "mfu")
    parts = [f"{100 * mfu:.1f} % MFU" if mfu is not None else "", *shares]
    return f"{format_count(rate)} tokens/s" + (": " if any(parts) else "") + ", ".join(filter(None, parts))


def limits(state: RunState, lock: Mapping[str, Any]) -> dict[str, float]:
    """Tokens/s to compare with: what was planned, and what the machine could do. Only what is known."""
    plan, ceiling = section(state.plan, "throughput"), section(state.plan, "ceiling")
    flops, cpu = computed_flops(state.plan), section(lock, "machine")
    matmul = number(cpu, "cpu_flops")
    known = {
        "the plan": number(plan, "tokens_per_s"),
        "what the best kernels allow": number(ceiling, "best_kernels_tokens_per_s"),
        "the dense peak": number(ceiling, "tokens_per_s"),
    }
    if known["the dense peak"] is None and matmul and flops:
        known["what this CPU's matmul rate allows"] = matmul / flops
    return {name: limit for name, limit in known.items() if limit and limit > 0}


def recent(state: RunState, key: str) -> float | None:
    """The median of the last log lines; the first, in which things warm up, only where there is no other."""
    values = [value for event in list(state.recent)[-20:] if (value := number(event, key)) is not None]
    steady = values[1:] if len(values) > 1 and len(state.recent) < 20 else values
    return statistics.median(steady) if steady else number(state.step, key)


# --- is it well


def _health(state: RunState, status: Status, now: float, name: str) -> tuple[Mood, str]:
    age = None if state.last_time is None else max(0.0, now - state.last_time)
    if status == "running":
        return _running(state, age)
    go_on = f"Go on with: redline train --resume {shlex.quote(name)}"
    if state.stop is None:
        last = "" if age is None else f"the last event came {format_seconds(age)} ago, and "
        words = f"Its process is gone: {last}nobody holds the run."
        return "bad", f"{words} {go_on}"
    skipped = f" {state.skipped} updates were skipped." if state.skipped else ""
    if status == "finished":
        return "over", f"It ended well.{skipped}"
    if state.stop.get("reason") == "nonfinite":
        return "bad", f"It failed.{skipped} Going on would fail again: train anew with a lower train.lr."
    words = {"failed": "It failed.", "preempted": "It had to make room.", "stopped": "It was stopped."}[str(status)]
    return "bad" if status == "failed" else "careful", f"{words}{skipped} {go_on}"


def _running(state: RunState, age: float | None) -> tuple[Mood, str]:
    if age is None:
        return "good", "It is starting: a process holds the run, and nothing is logged yet"
    quiet = max(_QUIET_S, _QUIET_LINES * _line_seconds(state)) if state.recent else _LONG_WARMUP_S
    if age > quiet:
        return "careful", f"No event for {format_seconds(age)}: its process is there, but may hang"
    last = f"last event {format_seconds(age)} ago"
    if not state.recent:
        return "good", f"Warming up ({state.doing or 'compiling'}): {last}"
    if "loss" in state.step and number(state.step, "loss") is None:
        return "careful", f"The last loss is not finite: {last}"
    worries = _worries(state)
    return ("careful", f"{'; '.join(worries)}: {last}") if worries else ("good", f"Healthy: {last}")


def _worries(state: RunState) -> list[str]:
    """Of the last log lines."""
    lines = list(state.recent)
    skipped = int(sum(number(event, "skipped") or 0 for event in lines))
    wait, step = recent(state, "data_wait_ms"), recent(state, "step_ms")
    share = wait / step if wait is not None and step else 0.0
    hot = sum(any(word in str(event.get("throttle")) for word in ("thermal", "slowdown", "brake")) for event in lines)
    return [
        *([f"{skipped} updates skipped lately"] if skipped else []),
        *([f"{100 * share:.0f} % of a step is waiting for data"] if share > _WAITING else []),
        *(["heat or the power supply slows the card"] if 2 * hot > len(lines) else []),
    ]


def _line_seconds(state: RunState) -> float:
    """Between log lines, as usual lately."""
    times = [time for event in state.recent if (time := number(event, "time")) is not None]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    return statistics.median(gaps) if gaps else 0.0


# --- what will it cost


def _cost(state: RunState, status: Status, now: float) -> str:
    source = state.stop if state.stop is not None and number(state.stop, "hours") is not None else state.step
    hours, dollars = number(source, "hours"), number(source, "cost_usd")
    if hours is None:
        return "Nothing yet"
    spent = f"{format_seconds(3600 * hours)} of training"
    if dollars is None:
        return f"{spent}; no price is known (set monitor.price_per_hour or REDLINE_PRICE)"
    total = expected_usd(state, status, now)
    in_all = f", about {_usd(total)} in all" if total is not None else ""
    so_far = " so far" if status == "running" else ""
    return f"{_usd(dollars).capitalize()}{so_far}{in_all}: {spent}"


def _usd(dollars: float) -> str:
    return format_usd(dollars) if dollars >= 0.01 else "less than a cent"


def expected_usd(state: RunState, status: Status, now: float) -> float | None:
    hours, dollars = number(state.step, "hours"), number(state.step, "cost_usd")
    left = remaining_s(state, status, now)
    if left is None or not hours or dollars is None:
        return None
    return dollars * (hours + left / 3600) / hours
