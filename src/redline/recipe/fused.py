"""Whether a block is the hand-written one, over our own kernels."""

from __future__ import annotations

from redline.errors import Problem, RecipeError
from redline.hardware.machine import Machine
from redline.jobs import costs
from redline.plan.shapes import DecoderShape
from redline.recipe.schema import Recipe


def not_fused(
    recipe: Recipe, machine: Machine, shape: DecoderShape, *, precision: str, checkpointing: str, sharded: bool
) -> str:
    """Why the blocks are not the hand-written ones; empty when they are."""
    model, backend = recipe.model, recipe.train.fp8
    missing = shape.not_fused(dropout=model.dropout, checkpointing=checkpointing)
    missing = missing or ("fsdp gathers a block when it is called, and these are not" if sharded else "")
    if model.kernels == "fused":
        if missing or (backend == "torchao" and precision == "fp8"):  # without fp8 a back-end of it says nothing
            what = missing or "torchao's fp8 is for the others"
            raise _problem("model.kernels", f"fused cannot be: {what}.", "Use model.kernels: torch.")
        return ""
    if model.kernels == "torch":
        if backend == "native" and precision == "fp8":
            fix = "Use model.kernels: auto, or train.fp8: torchao."
            raise _problem("train.fp8", "native fp8 is part of the fused kernels.", fix)
        return "as asked"
    reasons = {
        "the fused ones need a GPU": machine.device != "cuda",
        "the fused ones are measured on Hopper only": (machine.capability or (0, 0)) < (9, 0),
        "the fused ones are for half precision": precision == "fp32",
        (unmeasured := costs(recipe).unmeasured(shape)): bool(unmeasured),
        "torchao's fp8 is for these": backend == "torchao" and precision == "fp8",
    }
    return next((reason for reason, holds in reasons.items() if holds), missing)


def _problem(key: str, what: str, fix: str) -> RecipeError:
    return RecipeError("recipe", [Problem(key, what, fix)])
