"""One look at a run as text: what the page's headline says, for a terminal or a log."""

from __future__ import annotations

from typing import Any

from redline.monitor.console import one_line, plan_rows, step_facts
from redline.monitor.live.watched import WatchedRun

_NOTES = 5
_TOLD = frozenset({"warning", "recovery", "resumed", "skipped"})


def snapshot(run: WatchedRun, now: float) -> tuple[dict[str, Any], list[str]]:
    """The run's figures, and lines to print."""
    run.read_on()
    summary, state = run.summary(now), run.state
    answers = summary["answers"]
    title = " · ".join(filter(None, (one_line(summary[key]) for key in ("status", "recipe", "device"))))
    validation = "" if summary["val_loss"] is None else f"validation {summary['val_loss']:.4f}"
    best = "" if summary["best_val_loss"] in (None, summary["val_loss"]) else f"best {summary['best_val_loss']:.4f}"
    rows = [
        ("how far", answers["far"]),
        ("how fast", answers["fast"]),
        ("health", answers["health"]),
        ("cost", answers["cost"]),
        ("last step", "  ".join([*step_facts(state.step), *filter(None, [validation, best])])),
        ("memory", next((text for label, text in plan_rows(state.plan) if label == "memory"), "")),
    ]
    told = [note for note in state.notes if note["kind"] in _TOLD][-_NOTES:]
    lines = [f"{run.path}  {title}", *(f"  {label:<11}{text}" for label, text in rows if text)]
    return summary, [*lines, *(f"  {note['kind']:<11}{note['message']}" for note in told)]
