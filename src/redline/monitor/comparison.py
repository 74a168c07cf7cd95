"""Runs side by side: what each reached, and how fast."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.monitor.events import number, read_events
from redline.monitor.runs import EVENTS, last_number, run_status


@dataclass(frozen=True)
class Row:
    """One run of a comparison. What its log does not say is None."""

    name: str
    values: dict[str, str]
    status: str
    exit_code: int | None  # None: it was not started this time
    step: int | None = None
    loss: float | None = None
    best_val: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_run(run: Path, values: dict[str, str], exit_code: int | None) -> Row:
    """The row of a run, or of what never became one."""
    if not (run / EVENTS).is_file():
        return Row(run.name, values, "waiting" if exit_code is None else "failed", exit_code)
    events = read_events(run / EVENTS)
    steps = [e for e in events if e["type"] == "step"]
    counted = [e for e in events if e["type"] in ("step", "stop")]
    losses = [loss for e in events if e["type"] == "eval" and (loss := number(e, "loss")) is not None]
    rates = [rate for e in steps if (rate := number(e, "tokens_per_s")) is not None]
    reached = last_number(counted, "step")
    return Row(
        run.name,
        values,
        run_status(run, events),
        exit_code,
        step=None if reached is None else int(reached),
        loss=last_number(steps, "loss"),
        best_val=min(losses, default=None),
        tokens_per_s=statistics.median(rates) if rates else None,
        hours=last_number(counted, "hours"),
    )
