"""A row of a benchmark as a line."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def throughput_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:14} no figure: {row['error']}"
    known: dict[str, str] = {
        "mfu": "{:7.1%} MFU",
        "step_ms": "{:9.1f} ms a step",
        "memory_gib": "{:7.1f} GiB",
        "power_w": "{:6.0f} W",
        "joules_per_step": "{:7.1f} J a step",
        "sm_clock_mhz": "{:6.0f} MHz",
        "kernel_share": "{:6.1%} in kernels",
        "micro_batch": "   micro-batch {}",
        "redline_is": "   redline is {:.2f}×",
    }
    told = "".join(form.format(row[key]) for key, form in known.items() if row.get(key) is not None)
    return f"{row['name']:14}{row['tokens_per_s']:11,.0f} tok/s{told}"


def accuracy_line(row: Row) -> str:
    name = f"{row['name']:18}" + (f" {row['case']:76}" if row["case"] != row["name"] else "")
    if "error" in row:
        return f"{name} no figure: {row['error']}"
    planned, measured = row["planned"], row["measured"]
    memory, rate = (
        "" if row[key] is None else f"({row[key]:+.1%})" for key in ("memory_gib_error", "tokens_per_s_error")
    )
    speed = f"{planned['tokens_per_s']:,.0f} → " if planned["tokens_per_s"] else ""
    there = measured["memory_gib"] or 0.0
    return (
        f"{name} {planned['memory_gib']:.1f} → {there:.1f} GiB {memory}   "
        f"{speed}{measured['tokens_per_s']:,.0f} tok/s {rate}"
    )


def startup_line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:6} {row['error']}"
    return (
        f"{row['name']:6}{row['to_first_step_s']:7.1f} s to the first step: {row['imports_data_model_s']:.1f} imports, "
        f"data and model, {row['warmup_s']:.1f} warm-up, {row['evaluation_and_step_s']:.1f} evaluation and step"
    )
