"""Every `auto` becomes a value with a reason. Pure: the machine and the data come in as facts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from redline.errors import Problem, RecipeError
from redline.fields import AUTO, none_if_auto
from redline.hardware.machine import Machine
from redline.jobs.base import costs
from redline.planning.batch import BatchPlan, indivisible_batch, largest_micro_batch, round_to_divisible, solve_batch
from redline.planning.flops import FlopsPerToken
from redline.planning.memory import MemoryParts, fsdp_rank_memory
from redline.planning.schedule import ONE_CYCLE, PCT_START, sqrt_scaled_lr
from redline.planning.shapes import SHAPE_KEYS, SIZES, DecoderShape, padded_vocab
from redline.recipe.forecast import CPU_SHARE, ProbeResult, forecast, planned_kernels
from redline.recipe.horizon import (
    UNKNOWN_WARMUP,
    default_warmup,
    epoch_tokens,
    horizon_fields,
    horizon_warnings,
    recipe_steps,
    requested_batch,
    token_limit,
    warmup_warnings,
)
from redline.recipe.load import preset_factor, preset_text
from redline.recipe.parallel import FSDP, choose_mode
from redline.recipe.schema import Data, Recipe
from redline.units import GIB, format_count

# ----------------------------------------------------------------------------------------------------
# Whether a block is the hand-written one, over our own kernels.


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


# ----------------------------------------------------------------------------------------------------
# What a run's data lack or leave unread: validation, and keys that only text obeys.


FEW_ROWS = 30  # below this a score says little: one row is worth more than 3 %
_OF_TEXT = ("val_fraction", "text_key", "dedup")


def nothing_held_out(recipe: Recipe, train_tokens: int, val_tokens: int, *, made: bool) -> list[str]:
    """Of data that are known; nobody who asked for none is told so, unless something waits for it."""
    if not train_tokens or val_tokens:
        return []
    waiting = {"train.target_loss will not be reached": recipe.train.target_loss}
    waiting["eval.patience will not stop the run"] = recipe.eval.patience
    if told := [text for text, value in waiting.items() if value is not None]:
        return [f"nothing is held out, so no validation loss is known: {', and '.join(told)}"]
    if recipe.data.val_fraction:
        larger = "a larger --val-fraction to `redline prepare`" if made else "a larger data.val_fraction"
        more = f"Give more text, or {larger}"
        return [f"nothing of the text is held out, so no validation loss will be known. {more}"]
    return []


def few_held_out(rows: int | None) -> list[str]:
    """Return a warning where a validation loss would be that of a few rows."""
    if not rows or rows >= FEW_ROWS:
        return []
    what = f"only {rows} rows are held out, fewer than {FEW_ROWS}: the validation loss is a rough estimate"
    return [f"{what}. Raise data.val_fraction, or use more rows"]


def unread(recipe: Recipe) -> list[str]:
    """Of tokens that were made before: whoever made them has cut, chosen and held out."""
    plain = Data()
    asked = [key for key in _OF_TEXT if getattr(recipe.data, key) != getattr(plain, key)]
    how = "`redline prepare` has an option for each"
    return [f"data.{key} does nothing: the source holds tokens, which are taken as they are; {how}" for key in asked]


def weight_notes(data: Data) -> list[str]:
    """Say what becomes of weights that the recipe leaves to a rule: some are unstated, or there is nothing to share."""
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


# Share of the peak that training reaches, before even the shape is known.
PRIOR_SHARE = {"cuda": 0.35, "cpu": CPU_SHARE}
# quickstart: a larger model learns more from each token, until it is too large for the tokens it will see.
TOKENS_PER_PARAMETER = {"cuda": 0.3, "cpu": 0.6}
CPU_MICRO_TOKENS = 2048
ENOUGH_STEPS = 1000
WORTH_COMPILING = 600.0  # seconds of a CPU run: compiling takes 20 and then saves about a tenth
UNKNOWN_GPU_FLOPS = 20e12  # only to size the demonstration model on a card without a spec


@dataclass(frozen=True)
class DataFacts:
    """What the plan must know of the data."""

    vocab_size: int
    train_tokens: int
    val_tokens: int
    fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    estimated: bool = False  # true: from the sizes of files; then `train_tokens` 0 means unknown
    made: bool = False  # true: the source is tokens that somebody made before
    content: str = ""  # of rows: a digest of what they say, whatever the seed and the packing; of text empty
    text_bytes: list[int] | None = None  # of the training and the validation text, whatever the tokenizer
    val_rows: int | None = None  # rows that are held out; None: the data are text, or not read yet
    rows: dict[str, Any] | None = None  # means over the rows to train on, by which a job counts FLOPs; None: not read


@dataclass(frozen=True)
class Choice:
    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """A recipe without a single `auto`, why each was chosen, and the arithmetic behind it."""

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

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch * int(self.recipe.data.seq_len)

    def plan_event(self, *, price: float | None = None, measured: ProbeResult | None = None) -> dict[str, Any]:
        """The plan as programs and the console read it; `measured` is what a few real steps showed."""
        train, ahead = self.recipe.train, forecast(self, price=price, measured=measured)
        counted = self.horizon_steps * self.tokens_per_step if self.horizon_steps else None
        horizon = horizon_fields(
            steps=self.horizon_steps,
            hours=train.hours,
            expected_tokens=ahead.tokens_by_clock(train.hours, counted),
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
            **ahead.event(),
            "choices": [asdict(choice) for choice in self.choices],
            "warnings": [*self.warnings, *horizon_warnings(horizon, embedded=self.recipe.data.source == "embedded")],
        }

    def parameters(self) -> dict[str, int]:
        found: dict[str, int] = costs(self.recipe).parameters(self.shape)
        return found


class _Resolver:
    """Collects values and reasons, one key after the other."""

    def __init__(self, recipe: Recipe, machine: Machine, data: DataFacts, world: int) -> None:
        self.recipe, self.machine, self.data, self.world = recipe, machine, data, world
        self.values: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "data": {}, "parallel": {}}
        self.choices: list[Choice] = []
        self.warnings: list[str] = []

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
            # a tokenizer that is still to be trained finds as many pieces as its text has
            most = "at most " if self.data.estimated and self.data.tokenizer.startswith("train:") else ""
            why = f"{most}{needed:,} entries, to a multiple of 64"
            return int(self.choose("model.vocab", padded_vocab(needed), why))
        if given < needed:
            theirs = "Put the tokenizer that belongs to the base beside it."
            fix = theirs if self.recipe.model.base else f"Use at least {needed}, or model.vocab: auto."
            raise RecipeError("recipe", [Problem("model.vocab", f"{given} is below the tokenizer's {needed}.", fix)])
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
        """The largest model that sees enough tokens within the budget."""
        ratio = TOKENS_PER_PARAMETER[self.machine.device]
        best, seen = "", 0.0
        for name, (layers, d_model, heads, d_ff) in SIZES.items():
            shape = DecoderShape(layers, d_model, heads, heads, d_model // heads, d_ff, vocab)
            tokens = self.expected_tokens(shape)
            if best and tokens < ratio * shape.parameters:
                break
            best, seen = name, tokens
        fits = f"the largest that sees {ratio:g} tokens per parameter"
        reason = f"{fits}: {format_count(seen)} at {self.rate() / 1e12:.3g} TFLOP/s within the budget"
        return str(self.choose("model.size", best, reason))

    def rate(self) -> float:
        machine = self.machine
        peak = machine.cpu_flops if machine.device == "cpu" else machine.peak("bf16") or UNKNOWN_GPU_FLOPS
        return (peak or 1e11) * PRIOR_SHARE[machine.device]

    # --- training

    def precision(self) -> str:
        asked, machine = self.recipe.train.precision, self.machine
        if asked == "fp8" and not machine.fp8:
            self.warnings.append(f"fp8 is off: {machine.name} has no units for it")
            asked = AUTO
        if asked == AUTO:
            if machine.fast_bf16:
                native = "native tensor-core bf16" if machine.device == "cuda" else "this CPU multiplies bf16 natively"
                return str(self.choose("train.precision", "bf16", native))
            if machine.device == "cuda":
                return str(self.choose("train.precision", "fp16", "the card is older than Ampere: no bf16 units"))
            return str(self.choose("train.precision", "fp32", "this CPU has no fast bf16"))
        if asked == "fp16" and machine.device == "cpu":
            fix = "Use bf16 or fp32."
            raise RecipeError("recipe", [Problem("train.precision", "fp16 is for GPUs; CPUs emulate it.", fix)])
        return asked

    def compile(self, shape: DecoderShape) -> bool:
        if self.recipe.train.compile != AUTO:
            return bool(self.recipe.train.compile)
        against = self._against_compiling(shape) if self.machine.device != "cuda" else ""
        fuses = "fuses the memory-bound work; cached after the first run"
        return bool(self.choose("train.compile", not against, against or fuses))

    def idle_compile_mode(self, compiled: bool) -> list[str]:
        """Return a warning where `train.compile_mode` has nothing to act on."""
        mode, fused = self.recipe.train.compile_mode, self.get("model.kernels") == "fused"
        if mode == "default" or (compiled and not fused):
            return []
        why = (
            "the decoder's blocks are fused kernels (model.kernels=torch compiles them)" if fused else "compile is off"
        )
        return [f"train.compile_mode={mode} does nothing: {why}"]

    def _against_compiling(self, shape: DecoderShape) -> str:
        if not self.machine.compiler:
            return "no C++ compiler (g++ or clang++) on this machine"
        tokens = token_limit(self.recipe, self.data.train_tokens, self.world)
        by_tokens = 6.0 * shape.matmul_parameters * tokens / self.rate()
        short = 3600 * (self.recipe.train.hours or 0.0) < WORTH_COMPILING or by_tokens < WORTH_COMPILING
        return "on a CPU it pays only where train.hours gives over ten minutes" if short else ""

    def batch(self, shape: DecoderShape, precision: str, compiled: bool) -> tuple[BatchPlan, str, MemoryParts]:
        """Micro-batch and checkpointing: no recomputation if the batch can be split instead."""
        train, seq_len = self.recipe.train, self.recipe.data.seq_len
        asked = train.grad_checkpointing

        def memory(micro: int, checkpointing: str, accumulates: bool = True) -> MemoryParts:
            parts: MemoryParts = costs(self.recipe).memory(
                shape,
                tokens=micro * seq_len,
                bytes_per_value=4 if precision == "fp32" else 2,
                optimizer=train.optimizer,
                ema=train.ema is not None,
                checkpointing=checkpointing,
                accumulates=accumulates,
                kernels=planned_kernels(
                    self.recipe,
                    self.machine.device,
                    precision=precision,
                    compiled=compiled,
                    fused=not self.not_fused(shape, precision, checkpointing),
                ),
            )
            return parts

        room = train.memory_fraction * self.machine.memory_bytes
        if train.memory_gb is not None:
            room = min(1e9 * train.memory_gb, self.machine.memory_bytes)
        every = ("none",) if self.recipe.model.kernels == "fused" else ("none", "selective", "full")
        levels = every if asked == AUTO else (asked,)
        sharded = self.mode(shape, memory(1, levels[-1]).peak, room) == FSDP

        def memory_of_a_rank(micro: int, checkpointing: str, accumulates: bool = True) -> MemoryParts:
            if sharded:
                return fsdp_rank_memory(memory(micro, checkpointing), shape, self.world, accumulates=accumulates)
            return memory(micro, checkpointing, accumulates)

        needs = memory_of_a_rank
        checkpointing = next((c for c in levels if needs(1, c).peak <= room), levels[-1])
        if asked == AUTO:
            fits = needs(1, checkpointing).peak <= room
            reason = "one sequence fits without recomputation" if checkpointing == "none" else "less would not fit"
            self.choose("train.grad_checkpointing", checkpointing, reason if fits else "nothing fits by estimate")

        batch = solve_batch(*requested_batch(self.recipe), self.world)
        if isinstance(batch, Problem):
            raise RecipeError("recipe", [batch])
        if batch is None:
            batch = self._choose_batch(shape, lambda micro: needs(micro, checkpointing).peak <= room, room)
        self.values["train"] |= {
            "micro_batch": batch.micro,
            "accumulation": batch.accumulation,
            "global_batch": batch.global_batch,
        }
        return batch, checkpointing, needs(batch.micro, checkpointing, batch.accumulation > 1)

    def mode(self, shape: DecoderShape, copy: float, room: float) -> str:
        """How the ranks share the model; `copy` bytes is the least for all of it, of `room`."""
        counted = costs(self.recipe).parameters(shape)
        frozen = counted["trainable"] < counted["total"]
        mode, reason = choose_mode(self.recipe, self.world, frozen=frozen, copy=copy, room=room)
        self.values["parallel"]["mode"] = mode
        if self.world > 1 and self.recipe.parallel.mode == AUTO:
            self.choices.append(Choice("parallel.mode", mode, reason))
        return mode

    def kernels(self, shape: DecoderShape, precision: str, checkpointing: str) -> None:
        """Which implementation of a block; the other is always there for what it cannot do."""
        reason = self.not_fused(shape, precision, checkpointing)
        if self.recipe.model.kernels == AUTO:
            found, why = ("torch", reason) if reason else ("fused", "each value between matmuls is moved once")
            self.choose("model.kernels", found, why)

    def not_fused(self, shape: DecoderShape, precision: str, checkpointing: str) -> str:
        how = {"precision": precision, "checkpointing": checkpointing}
        sharded = self.values["parallel"].get("mode") == FSDP
        return not_fused(self.recipe, self.machine, shape, sharded=sharded, **how)

    def expected_tokens(self, shape: DecoderShape) -> float:
        """How many tokens the run will see: by its limits, or by the clock at the speed one may expect."""
        hours = self.recipe.train.hours
        by_clock = hours * 3600 * self.rate() / (6.0 * shape.matmul_parameters) if hours else math.inf
        return min(token_limit(self.recipe, self.data.train_tokens, self.world), by_clock)

    def _choose_global_batch(self, shape: DecoderShape, multiple: int) -> int:
        """A short run learns by its number of updates: as large as leaves about a thousand of them."""
        base, seq_len = self.recipe.train.batch_base, self.recipe.data.seq_len
        expected = self.expected_tokens(shape)
        wanted = base if math.isinf(expected) else max(base, expected / (ENOUGH_STEPS * seq_len))
        total = preset_factor(self.recipe.train.preset) * base * 2 ** min(6, round(math.log2(wanted / base)))
        total = round_to_divisible(total / multiple) * multiple
        if math.isinf(expected):
            return int(self.choose("train.global_batch", total, "the batch that lr_base was tuned for"))
        reason = f"leaves about {expected / (total * seq_len):.0f} steps of an expected {format_count(expected)} tokens"
        return int(self.choose("train.global_batch", total, reason))

    def _choose_batch(self, shape: DecoderShape, fits: Callable[[int], bool], room: float) -> BatchPlan:
        train = self.recipe.train
        micro, accumulation = none_if_auto(train.micro_batch), none_if_auto(train.accumulation)
        multiple = (micro or accumulation or 1) * self.world
        total = none_if_auto(train.global_batch) or self._choose_global_batch(shape, multiple)
        settled = solve_batch(total, micro, accumulation, self.world)
        if isinstance(settled, BatchPlan):
            return settled
        # on a CPU large micro-batches fall out of the cache and gain nothing
        cap = max(1, CPU_MICRO_TOKENS // self.recipe.data.seq_len) if self.machine.device == "cpu" else None
        if problem := indivisible_batch(total, self.world):
            raise RecipeError("recipe", [problem])
        batch = largest_micro_batch(total, self.world, fits, cap)
        where = f"the largest divisor of {total // self.world} that fits {room / GIB:.0f} GiB by estimate"
        if not fits(batch.micro):
            where = f"nothing fits {room / GIB:.1f} GiB by estimate"
        self.choose(
            "train.micro_batch", batch.micro, where if cap is None else f"about {CPU_MICRO_TOKENS} tokens suit a CPU"
        )
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
            steps_up = UNKNOWN_WARMUP if math.isinf(expected) else round(share * expected)
            if self.recipe.train.warmup_steps != AUTO:
                given = f"train.warmup_steps={self.recipe.train.warmup_steps}"
                self.warnings.append(f"train.pct_start={share:g} sets the warm-up, so {given} has no effect")
            return int(self.choose("train.warmup_steps", steps_up, f"train.pct_start={share:g} of the run"))
        if self.recipe.train.warmup_steps != AUTO:
            asked = int(self.recipe.train.warmup_steps)
            self.warnings += warmup_warnings(asked, expected)
            return asked
        return int(self.choose("train.warmup_steps", *default_warmup(expected)))

    def pct_start(self) -> float | None:
        """Return the share of the run in which one_cycle rises; None if train.warmup_steps says how long it does."""
        train = self.recipe.train
        if train.schedule != ONE_CYCLE or train.pct_start is not None or train.warmup_steps != AUTO:
            return train.pct_start
        return PCT_START


def _learning_rates(recipe: Recipe, lr: float) -> dict[str, float]:
    """Every rate as a number, where `lr` is the one for all. A tied head has the embedding's."""
    train = recipe.train.model_copy(update={"lr": lr})
    rates = {role: train.role_lr(role) for role in ("embedding", "head", "scalar")}
    if recipe.model.tied:
        rates["head"] = rates["embedding"]
    return {"lr": lr, **{f"{role}_lr": rate for role, rate in rates.items()}}


def resolve(recipe: Recipe, machine: Machine, data: DataFacts, *, gpus: int = 1, nodes: int = 1) -> Resolved:
    """`gpus` is how many there are in each of the `nodes`."""
    r = _Resolver(recipe, machine, data, gpus * nodes)
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
    r.warnings += r.idle_compile_mode(compiled)
    held_out = 1 if data.estimated else data.val_tokens
    r.warnings += nothing_held_out(recipe, data.train_tokens, held_out, made=data.made)
    r.warnings += [*(unread(recipe) if data.made else []), *few_held_out(data.val_rows)]
    r.warnings += weight_notes(recipe.data)
    if recipe.train.optimizer.startswith("paged") and machine.device == "cpu":
        r.warnings.append("on a CPU the 8-bit moments are not paged: paged_adamw_8bit is adamw_8bit here")
    if memory.peak > machine.memory_bytes:
        smaller = "more cards, one with more memory or a smaller model would help"
        r.warnings.append(
            f"by estimate this needs {memory.peak / GIB:.1f} GiB and {machine.name} has "
            f"{machine.memory_bytes / GIB:.1f} GiB: {'expect smaller micro-batches' if batch.micro > 1 else smaller}"
        )
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in r.values.items() if values}
    done = recipe.model_copy(update=sections)
    epoch = epoch_tokens(recipe, data.train_tokens)
    notes = (r.choices, r.warnings)
    return Resolved(done, shape, batch, flops, memory, machine, steps, nodes, *notes, epoch, data.rows)
