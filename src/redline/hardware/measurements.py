"""Measurements of this machine, stored in the cache so that later starts need not measure again.

Each file is one JSON object: `schema`, and `entries` by key. A key names the device, its driver and the version of
torch, so that a change of any of them measures anew. A file that cannot be read counts as empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

from redline.cache import cache_dir, write_atomically
from redline.hardware.host import cpu_name, cpu_threads

SCHEMA = 3  # changes when what is measured, or how, changes
RATES = "machine.json"
ATTENTION = "attention.json"
FLOAT8 = "float8.json"
KERNELS = "kernels.json"

# FLOP/s of a matmul under fp32, tf32, bf16, fp16 and fp8; bytes/s under copy, cached, to_device and to_host. What the
# device cannot do is missing.
Rates = dict[str, float]


def installed_torch_version() -> str:
    """Return the installed version of torch without importing it."""
    from importlib import metadata  # this import takes longer than the rest of a plan

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "missing"


# Variables that forbid torch's and oneDNN's kernels some of the CPU's instructions, and so change its rates.
_ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def cpu_key() -> str:
    limits = "".join(f", {name}={os.environ[name]}" for name in _ISA_VARIABLES if os.environ.get(name))
    return f"{cpu_name()}, {cpu_threads()} threads, torch {installed_torch_version()}{limits}"


def gpu_key(name: str, driver: str | None) -> str:
    return f"{name}, driver {driver or 'unknown'}, torch {installed_torch_version()}"


def read_measurement(file: str, key: str) -> dict[str, Any] | None:
    """Return the entry under a key, with the `date` of its measurement; None if there is none."""
    entry = _entries(file).get(key)
    return entry if isinstance(entry, dict) and isinstance(entry.get("date"), str) else None


def store_measurement(file: str, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Store an entry with today's date and return it.

    If the cache is not writable, the next start measures again; the run goes on.
    """
    dated = {"date": time.strftime("%Y-%m-%d"), **entry}
    content = {"schema": SCHEMA, "entries": {**_entries(file), key: dated}}
    with contextlib.suppress(OSError):
        write_atomically(cache_dir() / file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return dated


def read_rates(key: str) -> Rates | None:
    entry = read_measurement(RATES, key)
    rates = entry.get("rates") if entry else None
    if not isinstance(rates, dict) or not rates:
        return None
    if not all(isinstance(rate, int | float) and 0 < rate < 1e20 for rate in rates.values()):
        return None
    return {str(name): float(rate) for name, rate in rates.items()}


def store_rates(key: str, rates: Rates) -> Rates:
    """Store the rates and return them rounded, as `read_rates` will return them."""
    rounded = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    store_measurement(RATES, key, {"rates": rounded, "times": measurement_count(key) + 1})
    return rounded


def measurement_count(key: str) -> int:
    """Return how often the rates under a key have been measured."""
    entry = read_measurement(RATES, key) or {}
    times = entry.get("times", 1 if entry else 0)
    return times if isinstance(times, int) else 0


def _entries(file: str) -> dict[str, Any]:
    try:
        content = json.loads((cache_dir() / file).read_text(encoding="utf-8"))
        entries = content["entries"] if content["schema"] == SCHEMA else {}
        return dict(entries)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
