"""What it costs to train the one decoder: the costs of causal_lm, which other jobs that train a decoder adapt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redline.errors import Problem
from redline.jobs.base import BASE_MODEL_JOB
from redline.planning.flops import ASSUMES_FULL_ROWS, FlopsPerToken, Passes, causal_passes, decoder_flops
from redline.planning.memory import MemoryParts, training_memory
from redline.planning.shapes import DecoderShape
from redline.planning.speed import Work, decoder_work

_BASE_KEYS = ("base", "quant", "quant_double", "lora")


def unused_base_keys(recipe: Any) -> list[Problem]:
    """Report keys about a pretrained base, for a job that trains a model from random weights."""
    fields, what = type(recipe.model).model_fields, f"does nothing with objective={recipe.objective}."
    unused = [name for name in _BASE_KEYS if getattr(recipe.model, name) != fields[name].default]
    fix = f"Remove it, or use objective={BASE_MODEL_JOB}."
    return [Problem(f"model.{name}", what, fix) for name in unused]


class DecoderCosts:
    """Parameters, FLOPs, memory and work of training a decoder of a given shape with a recipe."""

    assumed = ""  # appended to the source of an expected speed that was measured on another kind of work

    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        self.recipe, self.rows, self.micro = recipe, rows or {}, micro

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        """Return counts of parameters: `total`, `trainable` and `matmul` (those that multiply a token)."""
        total = shape.parameters
        return {"total": total, "trainable": total, "matmul": shape.matmul_parameters}

    def unmeasured(self, shape: DecoderShape) -> str:
        """Return why the fused blocks are not chosen by themselves for this recipe; "" if they may be.

        The fused blocks can compute these features, but have not been timed with them on a GPU. With fp8 they are
        chosen anyway, since fp8 exists only there.
        """
        if self.recipe.train.precision == "fp8":
            return ""
        features = " and ".join(name for name, used in self.untimed_features(shape).items() if used)
        return f"with {features} the fused ones are not measured yet" if features else ""

    def untimed_features(self, shape: DecoderShape) -> dict[str, bool]:
        """Return which features without a measurement of the fused blocks exist, and whether this model uses them."""
        return {
            "QK norm": shape.qk_norm,
            f"the {shape.mlp} activation": shape.mlp != "swiglu",
            "value embeddings": shape.value_embeddings > 0,
            "skips": shape.skips != "none",
            "a bias": shape.qkv_bias,
            "a base": self.recipe.model.base is not None,
        }

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        assumed = ASSUMES_FULL_ROWS if self.recipe.data.pack and not self.rows else ""
        return decoder_flops(shape, self.document(seq_len), checkpointing, scored=self.scored, assumed=assumed)

    def document(self, seq_len: int) -> float:
        """Return the mean length of the document that a token is in: the whole row, unless rows are packed."""
        return float(self.rows.get("document", seq_len))

    @property
    def scored(self) -> float:
        """The share of positions that have a target."""
        return float(self.rows.get("scored", 1.0))

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Return the shares of the matmul and attention FLOPs that every data set needs, whatever its row lengths.

        In packed rows each document sees only itself, so the attention depends on how short the documents are.
        """
        return 1.0, 0.0 if self.recipe.data.pack else 1.0

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        return training_memory(shape, **how)

    def passes(self, seq_len: int) -> Passes:
        """Return how often a token of data is read and scored."""
        return causal_passes(self.document(seq_len), self.scored)

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        return decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))
