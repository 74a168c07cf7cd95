"""block_diffusion: denoise a block at a time, from left to right (BD3-LM, arXiv 2503.09573)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from redline.errors import Problem
from redline.fields import Count, MaybeCount
from redline.jobs.diffusion.costs import (
    RECORD_IDS,
    TEXT_IDS,
    DiffusionCosts,
    DiffusionOptions,
    block_problems,
    shared_problems,
    stream_problems,
)
from redline.planning.layout import Layout, Segment, uniform


class Options(DiffusionOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("block_size", "question")

    block_size: Count = 16  # positions that are denoised together; all of them is plain masked diffusion
    question: MaybeCount = None  # records: positions of what is given; not given: plain text


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def added_tokens(recipe: Any) -> int:
    return TEXT_IDS if recipe.block_diffusion.question is None else RECORD_IDS


def problems(recipe: Any) -> list[Problem]:
    options, length, found = recipe.block_diffusion, recipe.data.seq_len, shared_problems(recipe)
    question = options.question
    if question is None:
        cut, what = length, f"data.seq_len {length}"
    elif question < length:
        cut = length - question
        what = f"the {cut} positions after the question (data.seq_len {length} − question {question})"
    else:
        what = f"{question} leaves nothing of data.seq_len {length} for the answer."
        return [*found, Problem("block_diffusion.question", what, f"Use less than {length}.")]
    found += block_problems("block_diffusion.block_size", options.block_size, cut, what, "data.seq_len")
    return found if question is None else found + stream_problems(recipe)


def layout(recipe: Any) -> Layout:
    """A text in equal blocks; or a question, and its solution in equal blocks."""
    question, block, length = recipe.block_diffusion.question, recipe.block_diffusion.block_size, recipe.data.seq_len
    if question is None:
        return uniform(length, block)
    return Layout((Segment("question", question, question, given=True), Segment("solution", length - question, block)))


class Costs(DiffusionCosts):
    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, layout(recipe), rows, micro)
