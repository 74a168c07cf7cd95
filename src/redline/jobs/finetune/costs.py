"""finetune, without torch: train a pretrained model further, by adapters on a frozen base or with all its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from redline.errors import Problem
from redline.fields import MaybeText, one_of
from redline.jobs.base import BASE_TOKENIZER, METHODS, AdapterCosts, Job, JobOptions, adapter_of, method_problems
from redline.planning.shapes import Adapter, DecoderShape

SCORED_ALL = "every token sees its whole row and has a target"


class Options(JobOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("method",)

    method: Annotated[str, one_of(*METHODS)] = "qlora"
    learn: Annotated[str, one_of("answers", "all")] = "answers"  # the tokens that the loss is taken over
    template: MaybeText = None  # of chats: chatml or a .jinja file; the base's own if not given
    overlong: Annotated[str, one_of("drop", "cut", "error")] = "drop"  # samples longer than data.seq_len


class FinetuneJob(Job):
    name = "finetune"
    Options: ClassVar[type[JobOptions]] = Options
    runtime = "redline.jobs.finetune.objective:FinetuneRuntime"
    exports = True
    whole_sequences = ""
    reads_stream = False  # all conversations are read, and packed, before training starts
    overlong_key = "finetune.overlong"

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        quantised = given.get("finetune.method", "qlora") == "qlora"
        return {
            "data.tokenizer": BASE_TOKENIZER,
            "data.pack": True,
            "data.val_fraction": 0.02,
            "model.quant": "nf4" if quantised else "none",
        }

    def problems(self, recipe: Any) -> list[Problem]:
        found = []
        if recipe.model.base is None:
            found.append(Problem("model.base", "is missing.", "Name a folder, a .gguf file or a hub id."))
        if recipe.data.tokenizer != BASE_TOKENIZER:
            what = "fine-tuning uses the tokenizer of its base."
            found.append(Problem("data.tokenizer", what, "Leave it out, or write base."))
        if recipe.train.precision == "fp8" and recipe.finetune.method == "full":
            found.append(Problem("train.precision", "fp8 is for a frozen base.", "Use bf16, or finetune.method=qlora."))
        return found + method_problems(recipe)

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        return True

    def can_answer(self, recipe: Any) -> bool:
        return True

    def adapter(self, recipe: Any) -> Adapter | None:
        return adapter_of(recipe)

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Costs:
        return Costs(recipe, rows, micro)


class Costs(AdapterCosts):
    """The costs of rows of which only a part may be scored."""

    def assumption(self) -> str:
        return "" if self.rows else SCORED_ALL

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Leave out the head where prompts are not scored: the data decide how much of a row the answers are."""
        matmul, attention = super().certain(shape)
        if self.recipe.finetune.learn == "answers":
            matmul -= shape.head_parameters / shape.matmul_parameters
        return matmul, attention
