"""Options, checks and costs of the two diffusion jobs, computed from shapes without torch.

`block_diffusion` (BD3-LM, arXiv 2503.09573) denoises a sequence in equal blocks, from left to right.
`hierarchical_diffusion` (HDP) denoises a plan as one coarse block, then its execution in fine blocks. They differ
only in their options and in the layout of a sequence; the objective (objective.py) is the same.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from redline.errors import Problem
from redline.fields import AUTO, AutoFlag, AutoWhole, Count, Flag, MaybeCount, NonNegative, Share, one_of
from redline.jobs.base import DecoderCosts, Job, JobOptions, base_defaults, base_problems
from redline.planning.flops import ASSUMES_FULL_LOSS, FlopsPerToken, Passes, layout_flops, layout_passes
from redline.planning.layout import Layout, Segment, growing_layouts, uniform
from redline.planning.memory import Kernels, MemoryParts, training_memory
from redline.planning.shapes import DecoderShape
from redline.planning.speed import Work, decoder_work
from redline.units import parse_count

SAMPLERS = ("first_hitting", "ancestral")
# Token ids that a job adds behind those of the tokenizer.
TEXT_IDS = 1  # <|mask|>
RECORD_IDS = 5  # <|plan|>, <|execution|>, <|answer|>, <|pad|> and <|mask|>
SEGMENTS = ("question", "plan", "execution")
CAUSAL_WARMUP = 0.2  # of the run: measured on a small base (docs/decisions/0029-a-base-for-every-job.md)
UNKNOWN_CAUSAL_WARMUP = 1000  # steps, if the length of the run is not known


class DiffusionOptions(JobOptions):
    """The options that both diffusion jobs have."""

    settable_after_training: ClassVar[tuple[str, ...]] = ("sampler", "sampler_steps")
    defaults_in_older_locks: ClassVar[dict[str, Any]] = {"loss_per": "learnt", "shift": False, "causal_warmup": 0}

    # The mask probability p of a block is drawn from [clip_low, clip_high]; the loss at a masked position is weighted
    # by 1 / p.
    clip_low: Share = 1e-3
    clip_high: Share = 1.0
    clip_search: Flag = False  # choose both anew at each evaluation, for the least variance of a block's loss
    sampler: Annotated[str, one_of(*SAMPLERS)] = "first_hitting"
    sampler_steps: MaybeCount = None  # ancestral sampler: forward passes per block; default: positions per block
    # Predict a hidden token from the state at the position before it, where an autoregressive model predicts it; auto:
    # with a base. Otherwise from the state at its own position.
    shift: AutoFlag = AUTO
    # Steps in which blocks grow from one position to their size, so that attention goes from causal to bidirectional
    # within blocks.
    causal_warmup: AutoWhole = AUTO
    # Records: the number of tokens that the loss is divided by. `learnt` also counts the padding that ends a segment,
    # as older runs did.
    loss_per: Annotated[str, one_of("content", "learnt")] = "content"


class BlockOptions(DiffusionOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("block_size", "question", "shift")

    block_size: Count = 16  # positions that are denoised together; data.seq_len gives MDLM, one block per sequence
    question: MaybeCount = None  # records: positions of the question, which is never masked; None: plain text


class HierarchicalOptions(DiffusionOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("question", "plan", "execution", "plan_block", "execution_block", "shift")

    question: Count = 128  # positions of each segment; the question is never masked
    plan: Count = 128
    execution: Count = 256  # includes the answer
    plan_block: MaybeCount = None  # positions that are denoised together; default: the whole plan
    execution_block: Count = 16
    plan_weight: NonNegative = 1.0  # coefficient of this segment's loss
    execution_weight: NonNegative = 1.0


# ----------------------------------------------------------------------------------------------------
# Costs of a decoder that reads a noisy and a clean copy of a sequence.


class DiffusionCosts(DecoderCosts):
    """FLOPs, memory and work of a decoder that reads a noisy and a clean copy, and scores the masked positions."""

    casts_weights = True

    def __init__(self, recipe: Any, layout: Layout, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, rows, micro)
        self.layout = layout
        options = getattr(recipe, recipe.objective)
        # The mean share of the noised positions that are masked, times the share of those that carry a loss.
        self.hidden = (options.clip_low + options.clip_high) / 2 * float(self.rows.get("learnt", 1.0))

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        records = any(segment.given for segment in self.layout.segments)
        assumed = ASSUMES_FULL_LOSS if records and not self.rows else ""
        return layout_flops(shape, self.layout, self.hidden, checkpointing, assumed)

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        """Return the memory of the worst batch, in which every position that can be masked is masked."""
        tokens, kernels, length = how.pop("tokens"), how.pop("kernels"), self.layout.length
        return training_memory(
            shape,
            tokens=tokens * self.layout.read // length,
            scored=tokens * self.layout.denoised // length,
            kernels=self._kernels(kernels),
            **how,
        )

    def _kernels(self, kernels: Kernels) -> Kernels:
        """Return the kernels with the keys of a row of both copies, in which no tile is skipped."""
        read = self.layout.read
        return replace(kernels, scores=read if kernels.scores else 0, keys=float(read) if kernels.keys else 0.0)

    def passes(self, seq_len: int) -> Passes:
        return layout_passes(self.layout, self.hidden)

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        how["kernels"] = self._kernels(how.get("kernels", Kernels()))
        return decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))


# ----------------------------------------------------------------------------------------------------
# What both jobs refuse.


def _shared_problems(recipe: Any) -> list[Problem]:
    name, options, problems = recipe.objective, getattr(recipe, recipe.objective), base_problems(recipe)
    low, high = options.clip_low, options.clip_high
    if low >= high:
        what = f"{low:g} is not below {name}.clip_high {high:g}."
        problems.append(Problem(f"{name}.clip_low", what, "Use 0.001 and 1 to train on every mask probability."))
    if options.sampler_steps and options.sampler != "ancestral":
        fix = f"Remove it, or set {name}.sampler=ancestral."
        problems.append(Problem(f"{name}.sampler_steps", f"has no effect with {name}.sampler={options.sampler}.", fix))
    if recipe.data.pack:
        what = f"{name} has no document masks: every block of a sequence sees all blocks before it."
        problems.append(Problem("data.pack", what, "Remove it."))
    return problems


def _stream_problems(recipe: Any) -> list[Problem]:
    if not recipe.data.stream:
        return []
    return [Problem("data.stream", "works with text, not with records of question and answer.", "Remove it.")]


def _block_problems(key: str, block: int, length: int, what: str, longer: str) -> list[Problem]:
    """Check that blocks of `block` positions divide `length`; `what` describes the length in the message, and `longer`
    is the recipe key that raises it."""
    if block > length:
        return [Problem(key, f"{block} is longer than {what}.", f"Use at most {length}.")]
    if length % block == 0:
        return []
    fix = f"Use {math.gcd(block, length)}, or make {longer} {-length % block} longer."
    return [Problem(key, f"{block} does not divide {what}.", fix)]


# ----------------------------------------------------------------------------------------------------
# The two jobs.


class DiffusionJob(Job):
    """What both diffusion jobs have in common; they differ in options, checks and layout."""

    runtime = "redline.jobs.diffusion.objective:DiffusionRuntime"
    whole_sequences = ""
    exports_code = True

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return base_defaults(given)

    @abstractmethod
    def layout(self, recipe: Any) -> Layout: ...

    def problems(self, recipe: Any) -> list[Problem]:
        problems = [*_shared_problems(recipe), *self.layout_problems(recipe)]
        name, warmup = recipe.objective, getattr(recipe, recipe.objective).causal_warmup
        if not problems and warmup not in (0, AUTO) and not self.layout(recipe).clean:
            what = f"{warmup} needs blocks to grow to, and here a sequence is one block: it has no clean copy to read."
            problems.append(Problem(f"{name}.causal_warmup", what, "Use 0, or a smaller block."))
        return problems

    @abstractmethod
    def layout_problems(self, recipe: Any) -> list[Problem]:
        """Return what is wrong with the division of a sequence into segments and blocks."""

    def choices(self, recipe: Any, steps: int | None) -> list[tuple[str, Any, str]]:
        options, from_base = getattr(recipe, recipe.objective), recipe.model.base is not None
        found: list[tuple[str, Any, str]] = []
        if options.shift == AUTO:
            reason = "the base predicts each token at the position before it" if from_base else ""
            found.append(("shift", from_base, reason))
        if options.causal_warmup == AUTO:
            found.append(("causal_warmup", *self._causal_warmup(recipe, steps)))
        return found

    def _causal_warmup(self, recipe: Any, steps: int | None) -> tuple[int, str]:
        """Return the steps of the warm-up and the reason; without a base, or after a first phase, there is none."""
        layout = self.layout(recipe)
        if recipe.model.base is None or recipe.model.init_from is not None:
            return 0, ""
        if not layout.clean:
            return 0, "a sequence is one block, so there are no smaller blocks to begin with"
        warmup = UNKNOWN_CAUSAL_WARMUP if steps is None else round(CAUSAL_WARMUP * steps)
        share = "the length of the run is not known" if steps is None else f"{CAUSAL_WARMUP:.0%} of {steps:,} steps"
        sizes = [stage.segments[-1].block for stage in growing_layouts(layout)]
        return warmup, f"{share}: blocks of {', '.join(map(str, sizes[:-1]))}, then {sizes[-1]}"

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> DiffusionCosts:
        return DiffusionCosts(recipe, self.layout(recipe), rows, micro)


class BlockDiffusionJob(DiffusionJob):
    """Denoise a text, or the solution of a question, in equal blocks from left to right."""

    name = "block_diffusion"
    Options: ClassVar[type[JobOptions]] = BlockOptions

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        return given.get("block_diffusion.question") is not None

    def can_answer(self, recipe: Any) -> bool:
        return recipe.block_diffusion.question is not None

    def added_tokens(self, recipe: Any) -> int:
        return TEXT_IDS if recipe.block_diffusion.question is None else RECORD_IDS

    def layout_problems(self, recipe: Any) -> list[Problem]:
        options, length, problems = recipe.block_diffusion, recipe.data.seq_len, list[Problem]()
        question = options.question
        if question is None:
            denoised, what = length, f"data.seq_len {length}"
        elif question < length:
            denoised = length - question
            what = f"the {denoised} positions after the question (data.seq_len {length} − question {question})"
        else:
            what = f"{question} leaves nothing of data.seq_len {length} for the answer."
            return [Problem("block_diffusion.question", what, f"Use less than {length}.")]
        problems += _block_problems("block_diffusion.block_size", options.block_size, denoised, what, "data.seq_len")
        return problems if question is None else problems + _stream_problems(recipe)

    def layout(self, recipe: Any) -> Layout:
        """Return the layout of a text in equal blocks, or of a question and its solution in equal blocks."""
        options, length = recipe.block_diffusion, recipe.data.seq_len
        question, block = options.question, options.block_size
        if question is None:
            return uniform(length, block)
        return Layout(
            (Segment("question", question, question, given=True), Segment("solution", length - question, block))
        )


class HierarchicalDiffusionJob(DiffusionJob):
    """From a question, denoise a plan (coarse blocks), then its execution with the answer (fine blocks)."""

    name = "hierarchical_diffusion"
    Options: ClassVar[type[JobOptions]] = HierarchicalOptions

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        return True

    def can_answer(self, recipe: Any) -> bool:
        return True

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Default `data.seq_len` to the total length of the segments."""
        fields = HierarchicalOptions.model_fields
        stated = [given.get(f"hierarchical_diffusion.{name}", fields[name].default) for name in SEGMENTS]
        tokenizer = base_defaults(given)
        try:
            lengths = [parse_count(length) for length in stated]
        except (ValueError, TypeError):
            return tokenizer  # validation of the keys themselves reports this
        return {**tokenizer, "data.seq_len": sum(lengths)} if min(lengths) > 0 else tokenizer

    def added_tokens(self, recipe: Any) -> int:
        return RECORD_IDS

    def layout_problems(self, recipe: Any) -> list[Problem]:
        options, problems = recipe.hierarchical_diffusion, list[Problem]()
        lengths = [getattr(options, name) for name in SEGMENTS]
        if recipe.data.seq_len != sum(lengths):
            parts = " + ".join(f"{name} {length}" for name, length in zip(SEGMENTS, lengths, strict=True))
            what = f"{recipe.data.seq_len} is not {parts} = {sum(lengths)}."
            problems.append(Problem("data.seq_len", what, "Leave it out, or change hierarchical_diffusion.execution."))
        for name, block in (("plan", options.plan_block), ("execution", options.execution_block)):
            length, key = getattr(options, name), f"hierarchical_diffusion.{name}"
            problems += _block_problems(
                f"{key}_block", block or length, length, f"the {name}'s {length} positions", key
            )
        if not options.plan_weight and not options.execution_weight:
            what = "is 0, and so is plan_weight: nothing would be trained."
            problems.append(Problem("hierarchical_diffusion.execution_weight", what, "Use 1 for both."))
        return problems + _stream_problems(recipe)

    def layout(self, recipe: Any) -> Layout:
        options = recipe.hierarchical_diffusion
        question, plan, execution = (getattr(options, name) for name in SEGMENTS)
        return Layout(
            (
                Segment("question", question, question, given=True),
                Segment("plan", plan, options.plan_block or plan, weight=options.plan_weight),
                Segment("execution", execution, options.execution_block, weight=options.execution_weight),
            )
        )
