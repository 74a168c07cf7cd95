"""What trackers are shown, under the names that the H100 and H200 guides watch."""

from __future__ import annotations

import io

from redline.monitor.console import Console, clean
from redline.monitor.events import Event, finite, number

STEP = {
    "loss": "train/loss",
    "tokens_per_s": "train/throughput",
    "samples_per_s": "train/samples_per_s",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "mfu": "train/mfu",
    "mfu_causal": "train/mfu_causal",
    "step_ms": "train/step_ms",
    "data_wait_ms": "train/data_wait_ms",
    "memory_gib": "system/gpu_memory_allocated",  # GiB, the peak so far; on a CPU that of the process
    "gpu_util": "system/gpu_util",
    "power_w": "system/power_w",
    "cost_usd": "cost/usd",
}
_NOT_METRICS = frozenset({"type", "time", "step", "tokens", "seconds", "hours"})


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a step or an evaluation by tag; what is not known is not shown."""
    if event["type"] == "step":
        terms = {key: f"train/{key}" for key in event if key.startswith("loss_")}
        tags = STEP | terms
    elif event["type"] == "eval":
        tags = {key: f"eval/{key}" for key in event if key not in _NOT_METRICS}
    else:
        return {}
    found = {tag: number(event, key) for key, tag in tags.items()}
    return {tag: value for tag, value in found.items() if value is not None}


def texts(event: Event) -> dict[str, str]:
    """The plan as the terminal prints it, and samples, by tag."""
    if event["type"] == "plan":
        page = io.StringIO()
        Console(page, interactive=False).event(event)
        return {"plan": page.getvalue().rstrip("\n")}
    if event["type"] == "sample":
        return {f"sample/{clean(event.get('label')) or 'text'}": clean(event.get("prompt")) + clean(event.get("text"))}
    return {}


def step_of(event: Event) -> int:
    return int(finite(event.get("step")) or 0)
