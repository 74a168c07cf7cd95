"""The jobs' pure halves: the recipe options of each, and its costs from shapes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from redline.fields import Section

JOBS = ("causal_lm",)


def job(name: str) -> Any:
    """The module of a job: `Options`, `flops(…)`, `memory(…)`, `work(…)`."""
    return import_module(f"redline.jobs.{name}")


def options_of(name: str) -> type[Section]:
    options: type[Section] = job(name).Options
    return options
