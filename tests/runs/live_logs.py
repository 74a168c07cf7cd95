"""Event logs for tests of the live page, with made-up readings of a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLAN: dict[str, Any] = {
    "type": "plan",
    "time": 1001.0,
    "flops_per_token": {"useful": 2.4e9, "executed": 2.2e9, "formula": "6N"},
    "memory_gib": {"weights": 1.3, "gradients": 1.3, "activations": 61.2, "peak": 79.8, "available": 139.8},
    "batch": {"tokens_per_step": 1000},
    "throughput": {"tokens_per_s": 300_000, "mfu": 0.52},
    "ceiling": {"tokens_per_s": 400_000, "best_kernels_tokens_per_s": 350_000, "mfu": 0.7, "limits": []},
    "horizon": {"steps": 200},
    "warnings": ["the data are few"],
}  # fmt: skip


def start(time: float = 1000.0, resumed_from: int | None = None) -> dict[str, Any]:
    device = "a card"
    return {"type": "start", "time": time, "resumed_from": resumed_from, "recipe": "toy", "device": device}


def step(number: int, **fields: Any) -> dict[str, Any]:
    """Return a step event with made-up readings; they are no measurement."""
    return {
        "type": "step", "time": 1010.0 + number, "step": number, "tokens": 1000 * number, "lr": 1e-3,
        "loss": 3 + 6 * math.exp(-number / 50), "grad_norm": 1.5, "tokens_per_s": 285_000.0, "mfu": 0.5,
        "mfu_causal": 0.48, "step_ms": 500.0, "data_wait_ms": 1.0, "memory_gib": 77.5, "gpu_util": 99.0,
        "power_w": 650.0, "sm_clock_mhz": 1750.0, "temperature_c": 64.0, "throttle": "power_cap" if number % 3 else "",
        "hours": number / 3600, "cost_usd": number / 100, "progress": number / 200, "eta_s": 200.0 - number,
        "skipped": 0, **fields,
    }  # fmt: skip


def evaluation(number: int, loss: float = 4.0) -> dict[str, Any]:
    return {"type": "eval", "time": 1010.0 + number, "step": number, "tokens": 1000 * number, "loss": loss}


def sample(number: int, text: str) -> dict[str, Any]:
    return {"type": "sample", "time": 1010.0 + number, "step": number, "label": "mid", "prompt": "The ", "text": text}


def lines(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def write_run(run: Path, events: Iterable[dict[str, Any]]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "lock.json").write_text(json.dumps({"recipe_name": "toy", "machine": {"name": "a card"}}))
    (run / "events.jsonl").write_bytes(lines(events))
    return run
