"""causal_lm: predict the next token. Its costs are the decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redline.errors import Problem
from redline.fields import Section
from redline.planning.flops import ASSUMES_FULL_ROWS, FlopsPerToken, Passes, causal_passes, decoder_flops
from redline.planning.memory import MemoryParts, training_memory
from redline.planning.shapes import DecoderShape
from redline.planning.speed import Work, decoder_work

_OF_A_BASE = ("base", "quant", "quant_double", "lora")


class Options(Section):
    """Plain next-token prediction has none of its own."""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that have another default in this job, by what was given."""
    return {}


def added_tokens(recipe: Any) -> int:
    """Ids that the job needs besides the tokenizer's."""
    return 0


def problems(recipe: Any) -> list[Problem]:
    """What this job does not read."""
    fields, what = type(recipe.model).model_fields, f"does nothing with objective={recipe.objective}."
    idle = [name for name in _OF_A_BASE if getattr(recipe.model, name) != fields[name].default]
    return [Problem(f"model.{name}", what, "Take it away, or use objective=finetune.") for name in idle]


class Costs:
    """Of a recipe, from the shape of its decoder."""

    assumed = ""  # what the expected speed takes from another kind of work

    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        self.recipe, self.rows, self.micro = recipe, rows or {}, micro

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        """All, those that learn, and those that multiply a token."""
        total = shape.parameters
        return {"total": total, "trainable": total, "matmul": shape.matmul_parameters}

    def unmeasured(self, shape: DecoderShape) -> str:
        """What the hand-written blocks can compute, but have not on a GPU yet: they are not chosen for it, unless fp8
        is asked for, which is theirs."""
        if self.recipe.train.precision == "fp8":
            return ""
        found = " and ".join(part for part, there in self.not_timed(shape).items() if there)
        return f"with {found} the fused ones are not measured yet" if found else ""

    def not_timed(self, shape: DecoderShape) -> dict[str, bool]:
        return {
            "QK norm": shape.qk_norm,
            "squared ReLU": shape.mlp != "swiglu",
            "value embeddings": shape.value_embeddings > 0,
            "skips": shape.skips != "none",
            "a bias": shape.qkv_bias,
            "a base": self.recipe.model.base is not None,
        }

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        assumed = ASSUMES_FULL_ROWS if self.recipe.data.pack and not self.rows else ""
        return decoder_flops(shape, self.document(seq_len), checkpointing, scored=self.scored, assumed=assumed)

    def document(self, seq_len: int) -> float:
        """The mean length of the document that a token stands in; all of its row, unless rows are packed."""
        return float(self.rows.get("document", seq_len))

    @property
    def scored(self) -> float:
        """The share of the positions that have a target."""
        return float(self.rows.get("scored", 1.0))

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Shares of the matmuls and of the attention counted above that any data need: in packed rows documents see
        themselves alone, and how short they are is for the data to say."""
        return 1.0, 0.0 if self.recipe.data.pack else 1.0

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        return training_memory(shape, **how)

    def passes(self, seq_len: int) -> Passes:
        """How often a token of data is read and scored."""
        return causal_passes(self.document(seq_len), self.scored)

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        return decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))
