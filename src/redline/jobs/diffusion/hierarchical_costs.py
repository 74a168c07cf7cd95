"""hierarchical_diffusion: a plan denoised as a whole, then its execution block by block, from a question (HDP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from redline.errors import Problem
from redline.fields import Count, MaybeCount, NonNegative
from redline.jobs.diffusion.costs import (
    RECORD_IDS,
    DiffusionCosts,
    DiffusionOptions,
    block_problems,
    shared_problems,
    stream_problems,
)
from redline.planning.layout import Layout, Segment
from redline.units import parse_count

NAME = "hierarchical_diffusion"
SEGMENTS = ("question", "plan", "execution")


class Options(DiffusionOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("question", "plan", "execution", "plan_block", "execution_block")

    question: Count = 128  # positions of each segment; the question is never noised
    plan: Count = 128
    execution: Count = 256  # the answer included
    plan_block: MaybeCount = None  # positions that are denoised together; the whole plan if not given
    execution_block: Count = 16
    plan_weight: NonNegative = 1.0  # of its part of the loss
    execution_weight: NonNegative = 1.0


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """A sequence is as long as its segments together."""
    asked = [given.get(f"{NAME}.{name}", Options.model_fields[name].default) for name in SEGMENTS]
    try:
        lengths = [parse_count(length) for length in asked]
    except (ValueError, TypeError):
        return {}  # validation says what is wrong with them
    return {"data.seq_len": sum(lengths)} if min(lengths) > 0 else {}


def added_tokens(recipe: Any) -> int:
    return RECORD_IDS


def problems(recipe: Any) -> list[Problem]:
    options, found = recipe.hierarchical_diffusion, shared_problems(recipe)
    lengths = [getattr(options, name) for name in SEGMENTS]
    if recipe.data.seq_len != sum(lengths):
        parts = " + ".join(f"{name} {length}" for name, length in zip(SEGMENTS, lengths, strict=True))
        what = f"{recipe.data.seq_len} is not {parts} = {sum(lengths)}."
        found.append(Problem("data.seq_len", what, f"Leave it out, or change {NAME}.execution."))
    for name, block in (("plan", options.plan_block), ("execution", options.execution_block)):
        length = getattr(options, name)
        what = f"the {name}'s {length} positions"
        found += block_problems(f"{NAME}.{name}_block", block or length, length, what, f"{NAME}.{name}")
    if not options.plan_weight and not options.execution_weight:
        what = "is 0 like plan_weight: nothing would be learnt."
        found.append(Problem(f"{NAME}.execution_weight", what, "Use 1 for both."))
    return found + stream_problems(recipe)


def layout(recipe: Any) -> Layout:
    options = recipe.hierarchical_diffusion
    question, plan, execution = (getattr(options, name) for name in SEGMENTS)
    return Layout(
        (
            Segment("question", question, question, given=True),
            Segment("plan", plan, options.plan_block or plan, weight=options.plan_weight),
            Segment("execution", execution, options.execution_block, weight=options.execution_weight),
        )
    )


class Costs(DiffusionCosts):
    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, layout(recipe), rows, micro)
