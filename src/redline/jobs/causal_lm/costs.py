"""causal_lm, without torch: predict the next token. Its costs are those of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from redline.errors import Problem
from redline.jobs.base import DecoderCosts, Job, JobOptions, unused_base_keys


class Options(JobOptions):
    """Next-token prediction has no options of its own."""


class CausalLMJob(Job):
    name = "causal_lm"
    Options: ClassVar[type[JobOptions]] = Options
    runtime = "redline.jobs.causal_lm.objective:CausalLMRuntime"
    exports = True
    exact_likelihood = True

    def problems(self, recipe: Any) -> list[Problem]:
        return unused_base_keys(recipe)

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> DecoderCosts:
        return DecoderCosts(recipe, rows, micro)
