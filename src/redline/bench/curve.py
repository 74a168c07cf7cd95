"""A training as a curve: what the validation loss was after how many seconds of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from redline.runs.events import Event, number

Point = dict[str, Any]  # step, tokens, seconds, loss

LOOKS = 12  # evaluations of a run, besides the one before it
MOST_UNLOGGED = 10  # steps
OFF_BUDGET = 0.03  # of it: a run that took more or less says so


@dataclass(frozen=True)
class Looks:
    """When a run of so many steps is evaluated. The log waits for the GPU at each of those steps, and at some between:
    the clock that an evaluation is put down with has no queued step in it, and misses none."""

    steps: int
    log_every: int
    every: int

    @classmethod
    def over(cls, steps: int) -> Looks:
        apart = max(1, round(steps / LOOKS))
        log_every = min(MOST_UNLOGGED, apart)
        return cls(steps, log_every, log_every * max(1, round(apart / log_every)))

    def at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps


def fitted_steps(budget_s: float, step_ms: float) -> int:
    return max(1, round(1e3 * budget_s / step_ms))


def curve_of(events: Sequence[Event]) -> list[Point]:
    """From a run's log. Its `step_ms` are without evaluations and checkpoints, and add up to the training's seconds."""
    points: list[Point] = []
    seconds, logged = 0.0, 0
    for event in events:
        if event["type"] == "step":
            seconds += (number(event, "step_ms") or 0.0) * (event["step"] - logged) / 1e3
            logged = event["step"]
        elif event["type"] == "eval":
            points.append(point(event["step"], event["tokens"], seconds, number(event, "loss")))
    return points


def median_step_ms(events: Sequence[Event]) -> float:
    """Of the logged windows but the first, in which clocks and loader still settle; one that stumbled says nothing."""
    windows = [event["step_ms"] for event in events if event["type"] == "step"]
    return float(median(windows[1:] or windows))


def typical_step_ms(curve: Sequence[Point]) -> float:
    """The median between two evaluations: a stretch in which something held the host up says nothing of the card."""
    apart = [(b["step"] - a["step"], b["seconds"] - a["seconds"]) for a, b in pairwise(curve)]
    return float(median(1e3 * seconds / steps for steps, seconds in apart if steps))


def point(step: int, tokens: int, seconds: float, loss: float | None) -> Point:
    known = loss is not None and math.isfinite(loss)
    return {"step": step, "tokens": tokens, "seconds": round(seconds, 4), "loss": loss if known else None}


def figures(curve: Sequence[Point], train_tokens: int) -> dict[str, Any]:
    """What a whole training comes to."""
    last = curve[-1]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_s": last["tokens"] / last["seconds"],
        "step_ms": 1e3 * last["seconds"] / last["step"],
        "epochs": last["tokens"] / train_tokens if train_tokens else None,
        "final_loss": last["loss"],
        "evaluations": list(curve),
    }


def seconds_to(loss: float, curve: Sequence[Point]) -> float | None:
    """When the curve first passes the loss, linear between evaluations; None if it never does."""
    before: Point | None = None
    for after in curve:
        if after["loss"] is not None and after["loss"] <= loss:
            if before is None or before["loss"] is None:
                return float(after["seconds"])
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))
        before = after
    return None
