"""causal_lm, without torch: predict the next token, from random weights or from a pretrained base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from redline.errors import Problem
from redline.fields import one_of
from redline.jobs.base import METHODS, AdapterCosts, Job, JobOptions, adapter_of, adapter_problems, base_defaults
from redline.planning.shapes import Adapter


class Options(JobOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("method",)

    method: Annotated[str, one_of(*METHODS)] = "full"  # how a base is trained; without a base always full


class CausalLMJob(Job):
    name = "causal_lm"
    Options: ClassVar[type[JobOptions]] = Options
    runtime = "redline.jobs.causal_lm.objective:CausalLMRuntime"
    exports = True
    whole_sequences = ""
    exact_likelihood = True

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        quantised = given.get("causal_lm.method") == "qlora" and given.get("model.base") is not None
        return base_defaults(given) | ({"model.quant": "nf4"} if quantised else {})

    def problems(self, recipe: Any) -> list[Problem]:
        return adapter_problems(recipe)

    def adapter(self, recipe: Any) -> Adapter | None:
        return adapter_of(recipe)

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> AdapterCosts:
        return AdapterCosts(recipe, rows, micro)
