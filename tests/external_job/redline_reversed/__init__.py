"""A job of another package: read texts from right to left. This half needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from redline.fields import Count
from redline.jobs.base import DecoderCosts, Job, JobOptions


class Options(JobOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("span",)

    span: Count = 8  # tokens that are reversed together


class ReversedJob(Job):
    name = "reversed_lm"
    Options = Options
    runtime = "redline_reversed.objective:ReversedRuntime"

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> DecoderCosts:
        return DecoderCosts(recipe, rows, micro)
