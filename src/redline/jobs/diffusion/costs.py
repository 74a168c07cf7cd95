"""What the jobs that denoise have in common: options of the noise and of sampling, what goes wrong, and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from redline.errors import Problem
from redline.fields import Flag, MaybeCount, Section, Share, one_of
from redline.jobs.causal_lm import costs as causal_lm
from redline.planning.flops import ASSUMES_FULL_LOSS, FlopsPerToken, Passes, layout_flops, layout_passes
from redline.planning.layout import Layout
from redline.planning.memory import MemoryParts, training_memory
from redline.planning.shapes import DecoderShape
from redline.planning.speed import Work, decoder_work

SAMPLERS = ("first_hitting", "ancestral")
TEXT_IDS, RECORD_IDS = 1, 5  # besides the tokenizer's: the mask; and the marks of plan, execution, answer and padding


class DiffusionOptions(Section):
    afterwards: ClassVar[tuple[str, ...]] = ("sampler", "sampler_steps")  # may be others when the model is used
    in_older_locks: ClassVar[dict[str, Any]] = {"loss_per": "learnt"}  # what a lock without the key means

    # a block's positions are hidden with a probability p between these; a loss is weighted by 1 / p
    clip_low: Share = 1e-3
    clip_high: Share = 1.0
    clip_search: Flag = False  # both chosen anew at each evaluation: where a block's loss varies least
    sampler: Annotated[str, one_of(*SAMPLERS)] = "first_hitting"
    sampler_steps: MaybeCount = None  # ancestral: looks at a block; as many as it has positions if not given
    # records: tokens that the loss is divided by; `learnt` counts the padding that ends a segment, as older runs did
    loss_per: Annotated[str, one_of("content", "learnt")] = "content"


def shared_problems(recipe: Any) -> list[Problem]:
    """What none of these jobs can do."""
    name, options, found = recipe.objective, getattr(recipe, recipe.objective), causal_lm.problems(recipe)
    low, high = options.clip_low, options.clip_high
    if low >= high:
        what = f"{low:g} is not below {name}.clip_high {high:g}."
        found.append(Problem(f"{name}.clip_low", what, "Use 0.001 and 1 to hide anything between little and all."))
    if options.sampler_steps and options.sampler != "ancestral":
        fix = f"Take it away, or use {name}.sampler=ancestral."
        found.append(Problem(f"{name}.sampler_steps", f"does nothing with {name}.sampler={options.sampler}.", fix))
    if recipe.data.pack:
        what = f"{name} has no masks between documents: the blocks of a sequence see those before them."
        found.append(Problem("data.pack", what, "Take it away."))
    return found


def stream_problems(recipe: Any) -> list[Problem]:
    if not recipe.data.stream:
        return []
    return [Problem("data.stream", "is for text, not for questions with their answers.", "Take it away.")]


def block_problems(key: str, block: int, length: int, what: str, longer: str) -> list[Problem]:
    """Of blocks that `what`, of this length, is to be cut into; `longer` is the key that would lengthen it."""
    if block > length:
        return [Problem(key, f"{block} is longer than {what}.", f"Use at most {length}.")]
    if length % block == 0:
        return []
    fix = f"Use {math.gcd(block, length)}, or make {longer} {-length % block} longer."
    return [Problem(key, f"{block} does not divide {what}.", fix)]


class DiffusionCosts(causal_lm.Costs):
    """Of a decoder that reads a noisy and a clean copy of what it learns, and scores what is hidden."""

    def __init__(self, recipe: Any, layout: Layout, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, rows, micro)
        self.layout = layout
        options = getattr(recipe, recipe.objective)
        # the mean share of the noised positions that are hidden, times the share of these that have a loss
        self.hidden = (options.clip_low + options.clip_high) / 2 * float(self.rows.get("learnt", 1.0))

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        records = any(segment.given for segment in self.layout.segments)
        assumed = ASSUMES_FULL_LOSS if records and not self.rows else ""
        return layout_flops(shape, self.layout, self.hidden, checkpointing, assumed)

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        """At worst everything that may be hidden is."""
        sequences, kernels = how.pop("tokens") // self.layout.length, how.pop("kernels")
        scores = self.layout.read if kernels.scores else 0
        return training_memory(
            shape,
            tokens=sequences * self.layout.read,
            scored=sequences * self.layout.denoised,
            kernels=replace(kernels, scores=scores),
            **how,
        )

    def passes(self, seq_len: int) -> Passes:
        return layout_passes(self.layout, self.hidden)

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        return decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))
