"""Replace every `auto` of a recipe by a value, and record the reason.

`resolve` is a pure function: it reads neither the machine nor the data, but takes facts about them (`Machine`,
`DataFacts`). So a plan for another machine, a dry run and a training run all make the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from redline.errors import Problem, RecipeError
from redline.fields import AUTO, none_if_auto
from redline.hardware.compiled_kernels import kernels_off, objection
from redline.hardware.machine import Machine
from redline.jobs.base import costs, job
from redline.planning.batch import BatchPlan, indivisible_batch, largest_micro_batch, round_to_divisible, solve_batch
from redline.planning.communication import BUCKET, ROWS, SHARDED, WHOLE
from redline.planning.context import indivisible_world, kept_bytes
from redline.planning.flops import FlopsPerToken
from redline.planning.memory import LOW_BIT, MUON, MemoryParts
from redline.planning.schedule import ONE_CYCLE, PCT_START, sqrt_scaled_lr
from redline.planning.shapes import SHAPE_KEYS, SIZES, DecoderShape, padded_vocab
from redline.planning.shards import sharded_memory
from redline.recipe.forecast import (
    CPU_SHARE,
    UNKNOWN_WARMUP,
    ProbeResult,
    default_warmup,
    epoch_tokens,
    forecast,
    horizon_fields,
    horizon_warnings,
    planned_kernels,
    recipe_steps,
    requested_batch,
    token_limit,
    units_of,
    warmup_warnings,
)
from redline.recipe.load import preset_factor, preset_text, row_copies
from redline.recipe.schema import Data, Recipe
from redline.units import GIB, format_count

# ----------------------------------------------------------------------------------------------------
# Which implementation of a decoder block to use: the fused kernels or plain torch.


def reason_not_fused(
    recipe: Recipe, machine: Machine, shape: DecoderShape, *, precision: str, checkpointing: str, sharded: bool
) -> str:
    """Return why the blocks are not the fused kernels, or "" if they are."""
    model, backend = recipe.model, recipe.train.fp8
    unsupported = shape.not_fused(dropout=model.dropout, checkpointing=checkpointing)
    if not unsupported and sharded:
        # FSDP gathers the parameters of a block in a hook on its forward call; the fused blocks bypass that call.
        unsupported = "fused blocks do not work with shards (fsdp, hsdp)"
    if model.kernels == "fused":
        # train.fp8 matters only with precision fp8, so it contradicts nothing without.
        if unsupported or (backend == "torchao" and precision == "fp8"):
            what = unsupported or "torchao's fp8 works with torch kernels only"
            raise _problem("model.kernels", f"fused is not possible: {what}.", "Use model.kernels=torch.")
        return ""
    if model.kernels == "torch":
        if backend == "native" and precision == "fp8":
            fix = "Use model.kernels=auto, or train.fp8=torchao."
            raise _problem("train.fp8", "native fp8 is part of the fused kernels.", fix)
        return "set in the recipe"
    reasons = {
        "the fused kernels need a GPU": machine.device == "cpu",
        "the fused kernels need an NVIDIA GPU": machine.device == "mps",
        f"the fused kernels failed their trial on this card: {machine.fused_failure}": bool(machine.fused_failure),
        "the fused kernels are measured on Hopper only": (machine.capability or (0, 0)) < (9, 0),
        "the fused kernels support half precision only": precision == "fp32",
        (off := _kernel_off(machine, shape, precision)): bool(off),
        (unmeasured := costs(recipe).unmeasured(shape)): bool(unmeasured),
        "torchao's fp8 works with torch kernels only": backend == "torchao" and precision == "fp8",
    }
    return next((reason for reason, holds in reasons.items() if holds), unsupported)


def _kernel_off(machine: Machine, shape: DecoderShape, precision: str) -> str:
    """Return why a kernel that the fused blocks consist of may not run on this card, or "" if all may."""
    if machine.device != "cuda":
        return ""
    up = "swiglu" if shape.gated else "relu2"
    names = ["rms_norm._forward", "rms_norm._backward", f"activations._{up}", f"activations._{up}_backward"]
    names += ["rotary._rotate", "rotary._merge", "cross_entropy._softmax_loss"]
    names += [f"qk_norm.{name}" for name in ("_forward", "_backward") if shape.qk_norm]
    names += [f"skip.{name}" for name in ("_forward", "_backward") if shape.skips != "none"]
    off = kernels_off(machine.capability)
    if precision == "fp8":
        # The kernels of fp8 that a recipe uses depend on choices that come later; all of them must be usable.
        names += [name for name in off if name.startswith(("float8.", "rms_norm.")) or "8 on fp8" in name]
    return next((off[name] for name in names if name in off), "")


def _kernels_outside_blocks(recipe: Recipe, shape: DecoderShape) -> list[str]:
    """Return the Triton kernels that a run uses whichever blocks it has. Each falls back to plain torch by itself."""
    names = []
    if recipe.train.optimizer in MUON:
        names += ["muon._nesterov", "muon._descend", "muon._times_transposed"]
    if recipe.model.quant == "nf4":
        names.append("nf4._dequantise")
    parameters = costs(recipe).parameters(shape)
    if recipe.model.quant == "nf4" or parameters["trainable"] < parameters["total"]:
        names += ["low_rank._project_down", "low_rank._weight_gradient", "low_rank._input_gradient"]
    return names


def _problem(key: str, what: str, fix: str) -> RecipeError:
    return RecipeError("recipe", [Problem(key, what, fix)])


# ----------------------------------------------------------------------------------------------------
# How several GPUs share a run: each holds a copy of the model (ddp), a shard of it (fsdp), or a shard of the copy that
# its group holds (hsdp).


DDP, FSDP, HSDP = "ddp", "fsdp", "hsdp"


def choose_parallel_mode(
    recipe: Recipe, world: int, nodes: int, *, needed: Callable[[int], float], available: float
) -> tuple[str, str]:
    """Return the mode and the reason for it.

    `needed` is the least memory (bytes) of a rank by the number of ranks that share a copy, and `available` what a rank
    has.
    """
    mode = recipe.parallel.mode
    if mode != AUTO:
        return mode, "set in the recipe"
    if world == 1:
        return DDP, ""
    whole = needed(1)
    memory = f"a copy of the model needs {whole / GIB:.1f} of {available / GIB:.1f} GiB with one sequence"
    if whole <= available:
        return DDP, memory
    share = f"{memory}: each GPU holds a share of 1"
    if nodes > 1 and (size := shard_size(recipe, world, nodes)) < world and needed(size) <= available:
        return HSDP, f"{share}/{size}, and each node a copy, so that only gradients pass between nodes"
    return FSDP, f"{share}/{world}"


def with_bucket(parts: MemoryParts, world: int) -> MemoryParts:
    """Return the memory of a rank of ddp: gradients are copied into the bucket that is sent."""
    return replace(parts, gradients=parts.gradients + min(float(BUCKET), parts.gradients)) if world > 1 else parts


def shard_size(recipe: Recipe, world: int, nodes: int) -> int:
    """Return how many ranks share one copy under hsdp: `parallel.shard_size`, or those of a node."""
    size: int = none_if_auto(recipe.parallel.shard_size) or world // nodes
    return size


def _hsdp_problem(recipe: Recipe, world: int, nodes: int) -> Problem | None:
    """Return why the ranks cannot form groups for hsdp."""
    stated, size = none_if_auto(recipe.parallel.shard_size), shard_size(recipe, world, nodes)
    if stated is None and nodes == 1:
        what = f"hsdp shards within a node and copies between nodes, but the {world} ranks are on one node."
        fix = "Use parallel.mode=fsdp, or set parallel.shard_size to the ranks that share a copy."
        return Problem("parallel.mode", what, fix)
    if world % size:
        fits = [number for number in range(1, world + 1) if world % number == 0]
        what = f"groups of {size} ranks cannot be formed of {world}."
        return Problem("parallel.shard_size", what, f"Use one of {', '.join(map(str, fits))}.")
    return None


def adapt_to_world(recipe: Recipe, world: int) -> Recipe:
    """Return a resolved recipe for another number of ranks.

    The global batch stays the same. If micro-batch and accumulation do not fit it any more, they become `auto`, the
    micro-batch only if it has to. If the ranks cannot form groups of `parallel.context` or `parallel.shard_size`, the
    groups become smaller.
    """
    if world % recipe.parallel.context:
        smaller = recipe.parallel.model_copy(update={"context": math.gcd(world, recipe.parallel.context)})
        recipe = recipe.model_copy(update={"parallel": smaller})
    if world % (none_if_auto(recipe.parallel.shard_size) or 1):
        other = math.gcd(world, recipe.parallel.shard_size)
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"shard_size": other})})
    train, world = recipe.train, world // recipe.parallel.context
    total, micro, accumulation = (none_if_auto(x) for x in (train.global_batch, train.micro_batch, train.accumulation))
    if not total or not micro or micro * (accumulation or 0) * world == total:
        return recipe
    keep_micro = total % (micro * world) == 0
    update = {"accumulation": AUTO, "micro_batch": micro if keep_micro else AUTO}
    parallel = recipe.parallel.model_copy(update={"accumulate": AUTO})  # chosen for another accumulation
    return recipe.model_copy(update={"train": train.model_copy(update=update), "parallel": parallel})


# ----------------------------------------------------------------------------------------------------
# Warnings about the data: no or little validation data, keys without effect, weights that are not stated.


FEW_ROWS = 30  # a score of fewer rows says little: each row is worth more than 3 %
_KEYS_FOR_TEXT = ("val_fraction", "text_key", "dedup")  # they have no effect on a source of prepared tokens


def _no_validation_warnings(recipe: Recipe, train_tokens: int, val_tokens: int, *, made: bool) -> list[str]:
    """Warn if known data have no validation tokens, unless the recipe asks for none and nothing depends on them."""
    if not train_tokens or val_tokens:
        return []
    effects = {"train.target_loss will not be reached": recipe.train.target_loss}
    effects["eval.patience will not stop the run"] = recipe.eval.patience
    if without_effect := [text for text, value in effects.items() if value is not None]:
        return [f"no data are held out, so there is no validation loss: {', and '.join(without_effect)}"]
    if recipe.data.val_fraction:
        larger = "a larger --val-fraction for `redline prepare`" if made else "a larger data.val_fraction"
        return [f"no text is held out, so there will be no validation loss. Use more text, or {larger}"]
    return []


def _few_rows_warnings(rows: int | None) -> list[str]:
    if not rows or rows >= FEW_ROWS:
        return []
    what = f"only {rows} rows are held out, fewer than {FEW_ROWS}: the validation loss is a rough estimate"
    return [f"{what}. Raise data.val_fraction, or use more rows"]


def _unused_key_warnings(recipe: Recipe) -> list[str]:
    """Warn about keys that only apply while text is turned into tokens, for a source that holds tokens already."""
    defaults = Data()
    unused = [key for key in _KEYS_FOR_TEXT if getattr(recipe.data, key) != getattr(defaults, key)]
    what = "has no effect: the source holds prepared tokens. Use the option of `redline prepare` instead"
    return [f"data.{key} {what}" for key in unused]


def _weight_warnings(data: Data) -> list[str]:
    """Explain weights of sources that have no effect, or that the recipe does not state."""
    stated = [part for part in data.parts if part.weight is not None]
    if stated and len(data.parts) == 1:
        return ["the weight of a single source has no effect: all samples come from it"]
    unstated = [part.source for part in data.parts if part.weight is None]
    if not stated or not unstated:
        return []
    total = sum(part.weight or 1.0 for part in data.parts)
    shares = ", ".join(f"{part.source} {(part.weight or 1.0) / total:.1%}" for part in data.parts)
    names = " and ".join(unstated)
    verb = "states no weight and counts" if len(unstated) == 1 else "state no weight and count"
    return [f"data.source: {names} {verb} as 1. Shares of the samples: {shares}"]


# The share of the peak that training is assumed to reach before the shape of the model is known.
PRIOR_SHARE = {"cuda": 0.35, "mps": 0.35, "cpu": CPU_SHARE}
# For model.size=auto: a larger model learns more from each token, until it is too large for the tokens it will see.
TOKENS_PER_PARAMETER = {"cuda": 0.3, "mps": 0.6, "cpu": 0.9}
CPU_MICRO_TOKENS = 2048  # larger micro-batches fall out of a CPU's cache and gain nothing
ENOUGH_STEPS = 1000  # a short run learns by its number of updates, so global_batch=auto leaves about so many
WORTH_COMPILING = 600.0  # seconds of a CPU run: compiling takes 20 and then saves about a tenth
UNKNOWN_GPU_FLOPS = 20e12  # only sizes the model of model.size=auto, on a card that is not in the table
UNKNOWN_MPS_FLOPS = 2.6e12  # the same on a Mac: fp32 of the smallest Apple GPU, the M1, as Apple states it


@dataclass(frozen=True)
class DataFacts:
    """What the plan has to know about the data."""

    vocab_size: int
    train_tokens: int
    val_tokens: int
    fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    estimated: bool = False  # computed from the sizes of files; then `train_tokens` 0 means unknown
    made: bool = False  # the source holds prepared tokens
    content: str = ""  # digest of the rows, independent of seed and packing; empty for text
    text_bytes: list[int] | None = None  # bytes of training and validation text, independent of the tokenizer
    val_rows: int | None = None  # held-out rows; None for text, or if not read yet
    rows: dict[str, Any] | None = None  # means over the training rows, from which a job counts FLOPs; None if not read


@dataclass(frozen=True)
class Choice:
    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """A recipe without any `auto` that is read, the reasons for what was chosen, and the arithmetic behind it."""

    recipe: Recipe
    shape: DecoderShape
    batch: BatchPlan
    flops: FlopsPerToken
    memory: MemoryParts
    machine: Machine
    horizon_steps: int | None
    nodes: int = 1
    choices: list[Choice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    epoch_tokens: int = 0  # 0: not known before the data are prepared
    rows: dict[str, Any] | None = None  # as in DataFacts
    warmup_warned: bool = False  # `warnings` has one about a long train.warmup_steps; the trainer does not repeat it

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch * int(self.recipe.data.seq_len)

    def plan_event(self, *, price: float | None = None, measured: ProbeResult | None = None) -> dict[str, Any]:
        """Return the fields of the `plan` event. `measured` replaces the estimated speed by a measurement."""
        train, predicted = self.recipe.train, forecast(self, price=price, measured=measured)
        counted = self.horizon_steps * self.tokens_per_step if self.horizon_steps else None
        horizon = horizon_fields(
            steps=self.horizon_steps,
            hours=train.hours,
            expected_tokens=predicted.tokens_by_clock(train.hours, counted),
            tokens_per_step=self.tokens_per_step,
            epoch=self.epoch_tokens,
        )
        return {
            "objective": self.recipe.objective,
            "gpu": self.machine.name,
            "gpus": self.batch.world,
            "parameters": self.parameters(),
            "flops_per_token": self.flops.as_dict(),
            "memory_gib": {**self.memory.gib(), "available": round(self.machine.memory_bytes / GIB, 2)},
            "batch": {
                "micro": self.batch.micro,
                "accumulation": self.batch.accumulation,
                "global": self.batch.global_batch,
                "tokens_per_step": self.tokens_per_step,
            },
            "learning_rate": train.lr,
            "horizon": horizon,
            **predicted.event(),
            "choices": [asdict(choice) for choice in self.choices],
            "warnings": [*self.warnings, *horizon_warnings(horizon, embedded=self.recipe.data.source == "embedded")],
        }

    def parameters(self) -> dict[str, int]:
        counts: dict[str, int] = costs(self.recipe).parameters(self.shape)
        return counts


class _Resolver:
    """Choose one key after the other, and collect the values, reasons and warnings.

    Later choices depend on earlier ones, so the order in `resolve` matters.
    """

    def __init__(self, recipe: Recipe, machine: Machine, data: DataFacts, world: int, nodes: int = 1) -> None:
        self.recipe, self.machine, self.data, self.world, self.nodes = recipe, machine, data, world, nodes
        self.context = recipe.parallel.context
        if problem := indivisible_world(self.context, world):
            raise RecipeError("recipe", [problem])
        if recipe.parallel.context_backend == "ring" and self.context > 1 and machine.device != "cuda":
            fix = "Use parallel.context_backend=gather."
            raise _problem(
                "parallel.context_backend", "ring needs GPUs: torch's ring attention has no CPU kernel.", fix
            )
        self.data_ranks = world // self.context  # those that read different rows
        self.values: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "data": {}, "parallel": {}}
        self.choices: list[Choice] = []
        self.warnings: list[str] = []
        self.warmup_warned = False

    def choose(self, key: str, value: Any, reason: str) -> Any:
        section, name = key.split(".")
        self.values[section][name] = value
        self.choices.append(Choice(key, value, reason))
        return value

    def get(self, key: str) -> Any:
        section, name = key.split(".")
        return self.values[section].get(name, getattr(getattr(self.recipe, section), name))

    # --- model

    def vocab(self) -> int:
        given, needed = none_if_auto(self.recipe.model.vocab), self.data.vocab_size
        if given is None:
            # A tokenizer that is still to be trained may find fewer pieces in its text than were asked for.
            most = "at most " if self.data.estimated and self.data.tokenizer.startswith("train:") else ""
            why = f"{most}{needed:,} entries, rounded up to a multiple of 64"
            return int(self.choose("model.vocab", padded_vocab(needed), why))
        added = job(self.recipe.objective).added_tokens(self.recipe)
        if self.recipe.model.base is not None and needed - added <= given < needed:
            new = f"{added} new token{'s' if added > 1 else ''}"
            why = f"the base's {given:,} rows and {new}, rounded up to a multiple of 64"
            return int(self.choose("model.vocab", padded_vocab(needed), why))
        if given < needed:
            fix = f"Use at least {needed}, or model.vocab=auto."
            if self.recipe.model.base:
                fix = "Put the tokenizer that belongs to the base into its folder."
            raise _problem("model.vocab", f"{given} is less than the tokenizer's {needed} entries.", fix)
        return int(given)

    def shape(self) -> DecoderShape:
        vocab = self.vocab()
        model = self.recipe.model
        size = self.size(vocab) if model.size == AUTO else model.size
        if size:
            for key, value in zip(("layers", "d_model", "heads", "d_ff"), SIZES[size], strict=True):
                if getattr(model, key) == AUTO:
                    self.values["model"][key] = value
        d_model, heads = self.get("model.d_model"), self.get("model.heads")
        derived = {
            "kv_heads": heads,
            "head_dim": d_model // heads,
            "d_ff": max(64, round(8 * d_model / 3 / 64) * 64),
        }
        for key, value in derived.items():
            if self.get(f"model.{key}") == AUTO:
                self.values["model"][key] = value
        return DecoderShape(**{key: self.get(f"model.{key}") for key in SHAPE_KEYS})

    def size(self, vocab: int) -> str:
        """Choose the largest model that sees enough tokens within the budget of the recipe."""
        ratio = TOKENS_PER_PARAMETER[self.machine.device]
        best, seen = "", 0.0
        for name, (layers, d_model, heads, d_ff) in SIZES.items():
            shape = DecoderShape(layers, d_model, heads, heads, d_model // heads, d_ff, vocab)
            tokens = self.expected_tokens(shape)
            if best and tokens < ratio * shape.parameters:
                break
            best, seen = name, tokens
        largest = f"the largest that sees {ratio:g} tokens per parameter"
        reason = f"{largest}: {format_count(seen)} within the budget, at {self.rate() / 1e12:.3g} TFLOP/s"
        return str(self.choose("model.size", best, reason))

    def rate(self) -> float:
        """Return the FLOP/s that training is assumed to reach on one card."""
        machine = self.machine
        peak = machine.cpu_flops if machine.device == "cpu" else machine.peak("bf16")
        if machine.device != "cpu" and not peak:
            peak = UNKNOWN_MPS_FLOPS if machine.device == "mps" else UNKNOWN_GPU_FLOPS
        return (peak or 1e11) * PRIOR_SHARE[machine.device]

    # --- training

    def precision(self) -> str:
        precision, machine = self.recipe.train.precision, self.machine
        why_not_fp8 = ""  # part of the choice's reason, where benchmarks read why a row cannot be called fp8
        if precision == "fp8" and not machine.fp8:
            self.warnings.append(f"fp8 is off: {machine.name} has no fp8 units")
            precision, why_not_fp8 = AUTO, f"{machine.name} has no fp8 units; "
        if precision == AUTO:
            if machine.fast_bf16:
                native = "the tensor cores compute in bf16" if machine.device == "cuda" else "this CPU computes in bf16"
                return str(self.choose("train.precision", "bf16", why_not_fp8 + native))
            if machine.device == "cuda":
                older = "the card is older than Ampere: no bf16 units"
                return str(self.choose("train.precision", "fp16", why_not_fp8 + older))
            if machine.device == "mps":
                untested = "the safe choice on MPS, where redline was never run; bf16 and fp16 can be set"
                return str(self.choose("train.precision", "fp32", why_not_fp8 + untested))
            return str(self.choose("train.precision", "fp32", f"{why_not_fp8}this CPU has no fast bf16"))
        if precision == "fp16" and machine.device == "cpu":
            raise _problem("train.precision", "fp16 is for GPUs; CPUs only emulate it.", "Use bf16 or fp32.")
        return precision

    def compile(self, shape: DecoderShape) -> bool:
        if self.recipe.train.compile != AUTO:
            return bool(self.recipe.train.compile)
        against = self._reason_not_compiled(shape) if self.machine.device != "cuda" else ""
        benefit = "fuses memory-bound operations; cached after the first run"
        return bool(self.choose("train.compile", not against, against or benefit))

    def compile_mode_warnings(self, compiled: bool) -> list[str]:
        """Warn if `train.compile_mode` has no effect."""
        mode, fused = self.recipe.train.compile_mode, self.get("model.kernels") == "fused"
        if mode == "default" or (compiled and not fused):
            return []
        why = (
            "the decoder's blocks are fused kernels (model.kernels=torch compiles them)" if fused else "compile is off"
        )
        return [f"train.compile_mode={mode} has no effect: {why}"]

    def _reason_not_compiled(self, shape: DecoderShape) -> str:
        """Return why a run without an NVIDIA GPU is not compiled, or "" if it is."""
        if self.machine.device == "mps":
            return "torch.compile for MPS is a prototype"
        if not self.machine.compiler:
            return "no C++ compiler (g++ or clang++) on this machine"
        tokens = token_limit(self.recipe, self.data.train_tokens, self.data_ranks)
        by_tokens = 6.0 * shape.matmul_parameters * tokens / self.rate()
        short = 3600 * (self.recipe.train.hours or 0.0) < WORTH_COMPILING or by_tokens < WORTH_COMPILING
        return "on a CPU it pays off only in runs of more than ten minutes" if short else ""

    def batch(self, shape: DecoderShape, precision: str, compiled: bool) -> tuple[BatchPlan, str, MemoryParts]:
        """Choose parallel mode, gradient checkpointing and batch; return batch, checkpointing and memory.

        Splitting the batch into micro-batches is preferred to recomputing activations.
        """
        train, seq_len = self.recipe.train, self.recipe.data.seq_len
        requested, wide = train.grad_checkpointing, 4 if precision == "fp32" else 2

        def memory(micro: int, checkpointing: str, accumulates: bool = True) -> MemoryParts:
            parts: MemoryParts = costs(self.recipe).memory(
                shape,
                tokens=micro * seq_len // self.context,
                bytes_per_value=wide,
                optimizer=train.optimizer,
                ema=train.ema is not None,
                checkpointing=checkpointing,
                accumulates=accumulates,
                kernels=planned_kernels(
                    self.recipe,
                    self.machine.device,
                    precision=precision,
                    compiled=compiled,
                    fused=not self.reason_not_fused(shape, precision, checkpointing),
                ),
            )
            if self.context > 1:
                kept = kept_bytes(shape, micro * sum(row_copies(self.recipe)), self.context, wide, checkpointing)
                parts = replace(parts, activations=parts.activations + kept)
            return parts

        available = train.memory_fraction * self.machine.memory_bytes
        if train.memory_gb is not None:
            available = min(1e9 * train.memory_gb, self.machine.memory_bytes)
        supported = ("none",) if self.recipe.model.kernels == "fused" else ("none", "selective", "full")
        levels = supported if requested == AUTO else (requested,)

        def in_shards(micro: int, checkpointing: str, ranks: int, *, whole: bool = False) -> MemoryParts:
            device = self.machine.device
            kernels = planned_kernels(self.recipe, device, precision=precision, compiled=compiled, fused=False)
            units = units_of(self.recipe, shape, precision, checkpointing, kernels)
            return sharded_memory(memory(micro, checkpointing), units, ranks, whole=whole)

        def needed(ranks: int) -> float:
            return (memory(1, levels[-1]) if ranks == 1 else in_shards(1, levels[-1], ranks)).peak

        ranks = self.shards(shape, needed, available)

        def rank_memory(micro: int, checkpointing: str, accumulates: bool = True) -> MemoryParts:
            if ranks:
                whole = accumulates and self.recipe.parallel.accumulate == WHOLE
                return in_shards(micro, checkpointing, ranks, whole=whole)
            return with_bucket(memory(micro, checkpointing, accumulates), self.world)

        checkpointing = next((level for level in levels if rank_memory(1, level).peak <= available), levels[-1])
        if requested == AUTO:
            reason = "one sequence fits without recomputation" if checkpointing == "none" else "less would not fit"
            if rank_memory(1, checkpointing).peak > available:
                reason = "nothing fits by estimate"
            self.choose("train.grad_checkpointing", checkpointing, reason)

        batch = solve_batch(*requested_batch(self.recipe), self.data_ranks)
        if isinstance(batch, Problem):
            raise RecipeError("recipe", [batch])
        if batch is None:
            batch = self._choose_batch(
                shape, lambda micro: rank_memory(micro, checkpointing).peak <= available, available
            )
        batch = replace(batch, world=self.world, context=self.context)
        self.values["train"] |= {
            "micro_batch": batch.micro,
            "accumulation": batch.accumulation,
            "global_batch": batch.global_batch,
        }
        if not ranks:
            return batch, checkpointing, rank_memory(batch.micro, checkpointing, batch.accumulation > 1)
        whole = in_shards(batch.micro, checkpointing, ranks, whole=True)
        if not self.sums_whole(batch.accumulation, whole.peak, available):
            return batch, checkpointing, in_shards(batch.micro, checkpointing, ranks)
        return batch, checkpointing, whole

    def sums_whole(self, micros: int, needed: float, available: float) -> bool:
        """Choose how shards sum gradients: whole, which needs so many bytes, or as rows after every micro-batch."""
        if self.recipe.parallel.accumulate != AUTO:
            return bool(micros > 1 and self.recipe.parallel.accumulate == WHOLE)
        if micros == 1:
            self.values["parallel"]["accumulate"] = ROWS
            return False
        sums = f"whole gradients need {needed / GIB:.1f} of {available / GIB:.1f} GiB"
        if needed <= available:
            self.choose("parallel.accumulate", WHOLE, f"{sums}, and are sent once a step instead of {micros} times")
            return True
        self.choose("parallel.accumulate", ROWS, sums)
        return False

    def shards(self, shape: DecoderShape, needed: Callable[[int], float], available: float) -> int:
        """Choose the parallel mode; return how many ranks share a copy of the model, or 0 if each has its own."""
        mode = self.parallel_mode(needed, available)
        if mode == HSDP and self.world > 1:
            if problem := _hsdp_problem(self.recipe, self.world, self.nodes):
                raise RecipeError("recipe", [problem])
            size = shard_size(self.recipe, self.world, self.nodes)
            self.values["parallel"]["shard_size"] = size
            return size
        if mode == HSDP:  # a run that is resumed on one GPU
            self.values["parallel"]["shard_size"] = 1
        return self.world if mode == FSDP else 0

    def parallel_mode(self, needed: Callable[[int], float], available: float) -> str:
        """Choose ddp, fsdp or hsdp. `needed` is the least memory of a rank by how many ranks share a copy."""
        mode, reason = choose_parallel_mode(self.recipe, self.world, self.nodes, needed=needed, available=available)
        self.values["parallel"]["mode"] = mode
        if self.context > 1:
            positions = sum(row_copies(self.recipe)) // self.context
            reason = f"set in the recipe: each GPU computes {positions:,} positions of a sequence"
            self.choices.append(Choice("parallel.context", self.context, reason))
        if self.world > 1 and self.recipe.parallel.mode == AUTO:
            self.choices.append(Choice("parallel.mode", mode, reason))
        return mode

    def kernels(self, shape: DecoderShape, precision: str, checkpointing: str) -> None:
        """Choose the implementation of a decoder block. Also raise if the recipe asks for one that is not possible."""
        reason = self.reason_not_fused(shape, precision, checkpointing)
        if self.recipe.model.kernels == AUTO:
            value, why = ("torch", reason) if reason else ("fused", "reads and writes each value between matmuls once")
            self.choose("model.kernels", value, why)
            if self.machine.fused_failure:
                self.warnings.append(f"model.kernels is torch, which is slower: {why}")

    def reason_not_fused(self, shape: DecoderShape, precision: str, checkpointing: str) -> str:
        sharded = self.values["parallel"].get("mode") in SHARDED
        return reason_not_fused(
            self.recipe, self.machine, shape, precision=precision, checkpointing=checkpointing, sharded=sharded
        )

    def expected_tokens(self, shape: DecoderShape) -> float:
        """Return how many tokens the run will see: its counted limit, or train.hours at the assumed speed."""
        hours = self.recipe.train.hours
        by_clock = hours * 3600 * self.rate() / (6.0 * shape.matmul_parameters) if hours else math.inf
        return min(token_limit(self.recipe, self.data.train_tokens, self.data_ranks), by_clock)

    def _choose_global_batch(self, shape: DecoderShape, multiple: int) -> int:
        """Choose a batch that leaves a short run about ENOUGH_STEPS updates, and that is a multiple of `multiple`."""
        base, seq_len = self.recipe.train.batch_base, self.recipe.data.seq_len
        expected = self.expected_tokens(shape)
        wanted = base if math.isinf(expected) else max(base, expected / (ENOUGH_STEPS * seq_len))
        total = preset_factor(self.recipe.train.preset) * base * 2 ** min(6, round(math.log2(wanted / base)))
        total = round_to_divisible(total / multiple) * multiple
        if math.isinf(expected):
            return int(self.choose("train.global_batch", total, "the batch that train.lr_base was tuned for"))
        reason = f"leaves about {expected / (total * seq_len):.0f} steps of an expected {format_count(expected)} tokens"
        return int(self.choose("train.global_batch", total, reason))

    def _choose_batch(self, shape: DecoderShape, fits: Callable[[int], bool], available: float) -> BatchPlan:
        train = self.recipe.train
        micro, accumulation = none_if_auto(train.micro_batch), none_if_auto(train.accumulation)
        multiple = (micro or accumulation or 1) * self.data_ranks
        total = none_if_auto(train.global_batch) or self._choose_global_batch(shape, multiple)
        solved = solve_batch(total, micro, accumulation, self.data_ranks)
        if isinstance(solved, BatchPlan):
            return solved
        cap = max(1, CPU_MICRO_TOKENS // self.recipe.data.seq_len) if self.machine.device == "cpu" else None
        if problem := indivisible_batch(total, self.data_ranks):
            raise RecipeError("recipe", [problem])
        batch = largest_micro_batch(total, self.data_ranks, fits, cap)
        reason = f"the largest divisor of {total // self.data_ranks} that fits {available / GIB:.0f} GiB by estimate"
        if not fits(batch.micro):
            reason = f"nothing fits {available / GIB:.1f} GiB by estimate"
        if cap is not None:
            reason = f"about {CPU_MICRO_TOKENS} tokens suit a CPU"
        self.choose("train.micro_batch", batch.micro, reason)
        return batch

    def lr(self, batch: int) -> float:
        train = self.recipe.train
        if train.lr != AUTO:
            return float(train.lr)
        value = sqrt_scaled_lr(train.lr_base, batch, train.batch_base)
        reason = f"{train.lr_base:g}·√({batch}/{train.batch_base})"
        return float(self.choose("train.lr", float(f"{value:.6g}"), reason))

    def warmup(self, steps: int | None, flops: FlopsPerToken, tokens_per_step: int) -> int:
        expected = steps or math.inf
        if self.recipe.train.hours:
            speed = self.rate() / flops.executed / tokens_per_step
            expected = min(expected, self.recipe.train.hours * 3600 * speed)
        if (share := self.pct_start()) is not None:
            rising = UNKNOWN_WARMUP if math.isinf(expected) else round(share * expected)
            if self.recipe.train.warmup_steps != AUTO:
                given = f"train.warmup_steps={self.recipe.train.warmup_steps}"
                self.warnings.append(f"train.pct_start={share:g} sets the warm-up, so {given} has no effect")
            return int(self.choose("train.warmup_steps", rising, f"train.pct_start={share:g} of the run"))
        if self.recipe.train.warmup_steps != AUTO:
            requested = int(self.recipe.train.warmup_steps)
            too_long = warmup_warnings(requested, expected)
            self.warmup_warned = bool(too_long)
            self.warnings += too_long
            return requested
        return int(self.choose("train.warmup_steps", *default_warmup(expected)))

    def job_options(self, steps: int | None) -> None:
        """Choose the job's own options."""
        name = self.recipe.objective
        for key, value, reason in job(name).choices(self.recipe, steps):
            self.values.setdefault(name, {})[key] = value
            if reason:
                self.choices.append(Choice(f"{name}.{key}", value, reason))

    def pct_start(self) -> float | None:
        """Return the share of the run in which one_cycle rises; None if train.warmup_steps sets the length instead."""
        train = self.recipe.train
        if train.schedule != ONE_CYCLE or train.pct_start is not None or train.warmup_steps != AUTO:
            return train.pct_start
        return PCT_START


def _learning_rates(recipe: Recipe, lr: float) -> dict[str, float]:
    """Return the learning rate of every parameter role as a number; a tied head has that of the embedding."""
    train = recipe.train.model_copy(update={"lr": lr})
    rates = {role: train.role_lr(role) for role in ("embedding", "head", "scalar")}
    if recipe.model.tied:
        rates["head"] = rates["embedding"]
    return {"lr": lr, **{f"{role}_lr": rate for role, rate in rates.items()}}


def _check_mps(recipe: Recipe, world: int) -> str:
    """Return a warning about MPS. Raise RecipeError if the recipe asks for something that MPS does not have."""
    if world > 1:
        what = f"{world} processes cannot share the GPU of a Mac."
        raise _problem("train.device", what, "Use train.device=cpu, or one process.")
    if recipe.train.optimizer in LOW_BIT:
        what = f"{recipe.train.optimizer} needs float64, which MPS does not have."
        raise _problem("train.optimizer", what, "Use train.optimizer=adamw, or train.device=cpu.")
    return "MPS is untested: redline was never run on a Mac. If a loss looks wrong, compare with train.device=cpu"


def resolve(recipe: Recipe, machine: Machine, data: DataFacts, *, gpus: int = 1, nodes: int = 1) -> Resolved:
    """Choose everything that the recipe leaves `auto`, for `nodes` machines with `gpus` cards each.

    Raise a RecipeError if the recipe is impossible on this machine or with these data.
    """
    r = _Resolver(recipe, machine, data, gpus * nodes, nodes)
    r.choose("train.device", machine.device, machine.name)
    if recipe.train.preset:
        r.choices.append(Choice("train.preset", recipe.train.preset, preset_text(recipe.train.preset)))
    shape = r.shape()
    precision = r.precision()
    compiled = r.compile(shape)
    batch, checkpointing, memory = r.batch(shape, precision, compiled)
    r.kernels(shape, precision, checkpointing)
    flops: FlopsPerToken = costs(recipe, data.rows, batch.micro).flops(shape, recipe.data.seq_len, checkpointing)
    tokens_per_step = batch.global_batch * recipe.data.seq_len
    steps = recipe_steps(recipe, data.train_tokens, tokens_per_step)
    r.values["train"] |= {
        "precision": precision,
        "compile": compiled,
        "grad_checkpointing": checkpointing,
        **_learning_rates(recipe, r.lr(batch.global_batch)),
        "warmup_steps": r.warmup(steps, flops, tokens_per_step),
        "pct_start": r.pct_start(),
    }
    r.job_options(steps)
    r.warnings += r.compile_mode_warnings(compiled)
    held_out = 1 if data.estimated else data.val_tokens
    r.warnings += _no_validation_warnings(recipe, data.train_tokens, held_out, made=data.made)
    r.warnings += [*(_unused_key_warnings(recipe) if data.made else []), *_few_rows_warnings(data.val_rows)]
    r.warnings += _weight_warnings(recipe.data)
    if machine.device == "cuda" and (off := objection(machine.capability, _kernels_outside_blocks(recipe, shape))):
        r.warnings.append(f"plain torch, which is slower, does the work of a Triton kernel: {off}")
    if machine.device == "mps":
        r.warnings.append(_check_mps(recipe, gpus * nodes))
    if recipe.train.optimizer.startswith("paged") and machine.device == "cpu":
        r.warnings.append("a CPU does not page optimizer states: paged_adamw_8bit runs as adamw_8bit")
    if memory.peak > machine.memory_bytes:
        advice = "use more cards, a card with more memory or a smaller model"
        if batch.micro > 1:
            advice = "training will reduce the micro-batch"
        r.warnings.append(
            f"by estimate this needs {memory.peak / GIB:.1f} GiB and {machine.name} has "
            f"{machine.memory_bytes / GIB:.1f} GiB: {advice}"
        )
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in r.values.items() if values}
    return Resolved(
        recipe=recipe.model_copy(update=sections),
        shape=shape,
        batch=batch,
        flops=flops,
        memory=memory,
        machine=machine,
        horizon_steps=steps,
        nodes=nodes,
        choices=r.choices,
        warnings=r.warnings,
        epoch_tokens=epoch_tokens(recipe, data.train_tokens),
        rows=data.rows,
        warmup_warned=r.warmup_warned,
    )


def resolve_tried(
    recipe: Recipe,
    machine: Machine,
    data: DataFacts,
    try_blocks: Callable[[DecoderShape, str], str],
    *,
    falls_back: bool = False,
    **ranks: int,
) -> Resolved:
    """Resolve the recipe; if that gives the fused blocks on a GPU, try them, and do without them if they fail.

    `try_blocks` is `models.fused_trial.fused_failure`, a parameter because this module does without torch. A recipe
    that asks for the fused blocks by name is refused if they fail, unless it `falls_back`: a run that was trained with
    them can be resumed and evaluated on a card that cannot use them.
    """
    resolved = resolve(recipe, machine, data, **ranks)
    if machine.device != "cuda" or resolved.recipe.model.kernels != "fused":
        return resolved
    failure = try_blocks(resolved.shape, "fp16" if resolved.recipe.train.precision == "fp16" else "bf16")
    if not failure:
        return resolved
    if recipe.model.kernels == "fused" and not falls_back:
        what = f"the fused kernels failed their trial on this {machine.name}: {failure}."
        raise _problem("model.kernels", what, "Use model.kernels=torch.")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kernels": AUTO})})
    return resolve(recipe, replace(machine, fused_failure=failure), data, **ranks)
