"""A job that classifies texts: its options and costs, for recipes and plans. objective.py is the half with torch."""

from typing import Any

from pydantic import Field

from redline.errors import Problem
from redline.jobs.base import DecoderCosts, Job, JobOptions


class Options(JobOptions):
    model_keys = ("labels",)  # checkpoints record these keys: with other labels the weights mean something else
    labels: tuple[str, ...] = Field(("negative", "positive"), min_length=2, description="the classes, in any order")


class ClassifierCosts(DecoderCosts):
    """The costs of the decoder without a head for the vocabulary. Memory is planned as for a language model."""

    scored = 0.0  # the share of positions with logits over the vocabulary, from which FLOPs of that head are counted

    def parameters(self, shape: Any) -> dict[str, int]:
        head = len(self.recipe.classifier.labels) * shape.d_model
        matmul = shape.matmul_parameters - shape.vocab * shape.d_model + head
        return {"total": shape.parameters + head, "trainable": shape.parameters + head, "matmul": matmul}


class ClassifierJob(Job):
    name = "classifier"  # the value of `objective`, the name of the section of options, and the entry point
    Options = Options
    runtime = "redline_classifier.objective:ClassifierRuntime"
    exports = True  # ClassifierRuntime has the method `export`
    reads_stream = False  # all rows are read before training starts

    def defaults(self, given: Any) -> dict[str, Any]:
        return {"data.tokenizer": "bytes"}

    def problems(self, recipe: Any) -> list[Problem]:
        """Refuse keys that this job would ignore. redline reports them with all other mistakes in a recipe."""
        model, data = recipe.model, recipe.data
        unused = {"model.base": model.base, "model.tied": not model.tied}
        unused |= {"data.pack": data.pack, "data.tokenizer": data.tokenizer != "bytes"}
        return [Problem(key, "does nothing with this job.", "Remove it.") for key, is_set in unused.items() if is_set]

    def reads_rows(self, given: Any) -> bool:
        return True  # the source holds rows, not plain text

    def costs(self, recipe: Any, rows: Any = None, micro: int = 1) -> ClassifierCosts:
        return ClassifierCosts(recipe, rows, micro)
