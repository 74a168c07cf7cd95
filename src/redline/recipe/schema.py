"""The schema of a recipe: sections, keys, types and defaults. Recipes are immutable, and unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, create_model

from redline.errors import UserError, did_you_mean
from redline.fields import (
    AUTO,
    MOST_REPEATS,
    AutoCount,
    AutoFlag,
    AutoPositive,
    AutoSequences,
    AutoWhole,
    Count,
    Flag,
    Fraction,
    MaybeCount,
    MaybeFraction,
    MaybeHours,
    MaybePositive,
    MaybeProbability,
    MaybeRepeat,
    MaybeText,
    MaybeWords,
    NonNegative,
    NsSteps,
    Positive,
    Prefetch,
    Probability,
    Rule,
    Section,
    Sequences,
    Share,
    Text,
    Whole,
    Words,
    Workers,
    none_or,
    one_of,
)
from redline.jobs.base import JOBS, is_job, job_names, options_of
from redline.planning.batch import PRESETS
from redline.planning.communication import MODES as PARALLEL_MODES
from redline.planning.communication import ROWS, WHOLE
from redline.planning.context import BACKENDS as CONTEXT_BACKENDS
from redline.planning.memory import LOW_BIT, MUON
from redline.planning.schedule import SCHEDULES
from redline.planning.shapes import ACTIVATIONS, ROPE_SCALING, SIZES, TARGETS, checked_rope_scaling
from redline.remote import MIRROR_SCHEMES, SOURCE_SCHEMES, is_url, url_problem

# torch's modes reduce-overhead and max-autotune are left out: they record CUDA graphs of their own, and the next
# micro-batch would overwrite their gradients. train.graph records the whole step instead.
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
# matmul is for CPUs, split for block diffusion
ATTENTION = (AUTO, "cudnn", "flash", "efficient", "flex", "split", "matmul", "dense")
CHECKPOINTING = (AUTO, "none", "selective", "full")


def _checkpointing(value: Any) -> Any:
    """Convert true and false, as the guides write them, to the names of the levels."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _pair(value: Any) -> tuple[float, float]:
    numbers = value if isinstance(value, list | tuple) else ()
    valid = [isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in numbers]
    if valid != [True, True]:
        raise ValueError(f"{value!r} is not a list of two numbers, each at least 0 and below 1.")
    return float(numbers[0]), float(numbers[1])


def _momenta(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = _pair(value)
    if low > high:
        raise ValueError(f"{value!r} is not in order. Write the lower momentum first, as in [0.85, 0.95].")
    return low, high


def _project(value: Any) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError(f"{value!r} is not true, false or the name of a project.")


CHECKPOINTING_RULE = Rule(_checkpointing, accepts={"enum": [*CHECKPOINTING, True, False]})


def _targets(value: Any) -> tuple[str, ...]:
    names = list(TARGETS) if value == "all-linear" else [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"{value!r} is not a list of matrices. Choose from {', '.join(TARGETS)}.")
    for name in names:
        if not isinstance(name, str) or name not in TARGETS:
            hint = did_you_mean(str(name), TARGETS)
            raise ValueError(f"{name!r} is not a matrix of a block: {', '.join(TARGETS)}. {hint}".rstrip())
    return tuple(name for name in TARGETS if name in names)


_TARGETS = Rule(
    _targets,
    accepts={
        "anyOf": [{"enum": ["all-linear"]}, {"type": "array", "minItems": 1, "items": {"enum": list(TARGETS)}}],
    },
)


class Lora(Section):
    """Low-rank adapters: their rank, scale and target matrices."""

    r: Count = 16
    alpha: Positive = 16.0
    dropout: Probability = 0.05
    target_modules: Annotated[tuple[str, ...], _TARGETS] = tuple(TARGETS)
    rslora: Flag = False  # scaled by alpha / √r instead of alpha / r


_ROPE = Rule(
    checked_rope_scaling,
    accepts={
        "type": "object",
        "properties": {"rope_type": {"enum": list(ROPE_SCALING)}},
        "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
        "required": ["rope_type", "factor"],
    },
)


class Model(Section):
    """The model: the shape of the decoder, and the base or run that it starts from."""

    # Sets layers, d_model, heads and d_ff, where they are auto.
    size: Annotated[str | None, one_of(AUTO, *SIZES)] | None = None
    layers: AutoCount = AUTO
    d_model: AutoCount = AUTO
    heads: AutoCount = AUTO
    kv_heads: AutoCount = AUTO  # auto: as many as heads
    head_dim: AutoCount = AUTO  # auto: d_model / heads
    d_ff: AutoCount = AUTO  # auto: 8/3·d_model, to a multiple of 64
    vocab: AutoCount = AUTO  # auto: the tokenizer's, to a multiple of 64
    mlp: Annotated[str, one_of(*ACTIVATIONS)] = "swiglu"
    tied: Flag = True
    qk_norm: Flag = False
    qkv_bias: Flag = False
    softcap: MaybePositive = None  # logits ← cap·tanh(logits / cap)
    rope_theta: Positive = 10000.0
    rope_scaling: Annotated[dict[str, Any] | None, none_or(_ROPE)] = None  # for a longer context
    norm_eps: Positive = 1e-5
    dropout: Probability = 0.0
    attention: Annotated[str, one_of(*ATTENTION)] = AUTO
    kernels: Annotated[str, one_of(AUTO, "torch", "fused")] = AUTO  # fused: Triton kernels with a hand-written backward
    value_embeddings: Whole = 0  # tables of token embeddings, added to the values in the first and last layers
    skips: Annotated[str, one_of("none", "x0", "unet")] = "none"  # earlier states that are added to the residual stream
    # zero: the matrices that write to the residual stream, and an untied head, start at zero.
    init: Annotated[str, one_of("gpt2", "zero")] = "gpt2"
    embedding_std: Positive = 0.02
    base: MaybeText = None  # finetune: a folder, a .gguf file or a hub id
    quant: Annotated[str, one_of("none", "nf4")] = "none"  # of the base model; nf4 with finetune.method=qlora
    quant_double: Flag = True  # also quantise the scales of NF4
    lora: Annotated[Lora, BeforeValidator(lambda value: {} if value is None else value)] = Lora()  # null: the default
    init_from: MaybeText = None  # RUN[@step|@best] or an exported folder: weights only


class Part(Section):
    """One source of a mixture, with a share of the samples or a number of repeats per epoch."""

    source: Text
    weight: MaybePositive = None  # share of the samples, relative to the other weights
    repeat: MaybeRepeat = None  # how often an epoch reads each row or window; null: once

    @property
    def reads_per_epoch(self) -> float:
        """Return how often an epoch reads the source, if no weights are stated."""
        return 1.0 if self.repeat is None else self.repeat


def _checked_url(source: str) -> str:
    """Return a source; raise ValueError if it is a URL that cannot be read or that holds a secret."""
    if is_url(source) and (problem := url_problem(source, SOURCE_SCHEMES)):
        raise ValueError(problem)
    return source


def _source(value: Any) -> Any:
    """Validate a source or a list of sources: names, {source, weight} or {source, repeat}."""
    if value == "":
        raise ValueError("is empty.")
    if isinstance(value, str):
        return _checked_url(value)
    if not isinstance(value, list | tuple) or not value:
        fix = "Put it in quotes, or write a list: [{source: ./a, weight: 3}, ./b]."
        raise ValueError(f"{value!r} is not a source. {fix}")
    parts = []
    for item in value:
        entry = item if isinstance(item, Part) else {"source": item} if isinstance(item, str) else item
        try:
            parts.append(Part.model_validate(entry))
        except ValidationError:
            fix = "Write PATH, {source: PATH, weight: NUMBER} or {source: PATH, repeat: NUMBER}."
            limits = f"Numbers are above 0; repeat is at most {MOST_REPEATS:,}."
            raise ValueError(f"{item!r} is not a source. {fix} {limits}") from None
    names = [_checked_url(part.source) for part in parts]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{duplicates[0]!r} is in the list twice. List it once, with repeat: 2.")
    if any(part.weight is not None for part in parts) and any(part.repeat is not None for part in parts):
        what = "weight (a share of the samples) and repeat (how often an epoch reads the rows) cannot be combined."
        raise ValueError(f"{what} Use one of them for all sources.")
    return tuple(parts)


_ENTRY = {
    "type": "object",
    "properties": {"source": {"type": "string"}, "weight": {"type": "number"}, "repeat": {"type": "number"}},
}
_SOURCE = Rule(
    _source,
    accepts={
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _ENTRY]}},
        ]
    },
)


class Data(Section):
    # embedded, text (a file, folder, JSONL, Parquet, dataset id), prepared shards, .bin tokens, word problems
    # (problems:LEVEL), facts (facts:SIZE), or a list of those
    source: Annotated[str | tuple[Part, ...], _SOURCE] = "embedded"
    tokenizer: Text = "train:4096"  # train:N, bytes, gpt2, or a tokenizer.json
    seq_len: Count = 1024
    pack: Flag = False  # true: no attention between documents in a sequence
    shuffle: Flag = True
    workers: Workers = 2
    prefetch: Prefetch = 4  # steps whose batches are loaded ahead, by all workers together
    val_fraction: Probability = 0.05
    text_key: Text = "text"  # the column or key of a table that holds the text
    dedup: Flag = False  # true: drop documents whose text occurred before
    stream: Flag = False  # true: train while the text is still being prepared
    # latent_prefix: what happens to texts with too many bytes; null: cut
    overlong: Annotated[str | None, none_or(one_of("cut", "drop", "error"))] = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources as a list, whether the recipe names one or several."""
        return (Part(source=self.source),) if isinstance(self.source, str) else self.source


class Train(Section):
    device: Annotated[str, one_of(AUTO, "cuda", "mps", "cpu")] = AUTO
    # The run stops at the first of these that is reached; the LR schedule ends at the earliest of the first four.
    steps: MaybeCount = None
    tokens: MaybeCount = None
    epochs: MaybePositive = None
    hours: MaybeHours = None
    target_loss: MaybePositive = None  # of the validation set
    global_batch: AutoSequences = AUTO  # in sequences
    micro_batch: AutoSequences = AUTO
    accumulation: AutoSequences = AUTO
    optimizer: Annotated[str, one_of("adamw", *MUON, *LOW_BIT)] = "adamw"
    lr: AutoPositive = AUTO  # a number is used as it is; auto: lr_base·√(batch / batch_base)
    lr_base: Positive = 4e-4
    batch_base: Sequences = 128
    embedding_lr: AutoPositive = AUTO  # AdamW's learning rates by role; auto: lr
    head_lr: AutoPositive = AUTO
    scalar_lr: AutoPositive = AUTO
    muon_lr: Positive = 0.02  # for the hidden matrices; other parameters use `lr`
    muon_momentum: Probability = 0.95
    muon_momentum_warmup: Whole = 0  # steps in which the momentum rises from 0.85
    muon_beta2: Probability = 0.95  # normuon: decay of the second moments of rows
    muon_steps: NsSteps = 5  # Newton-Schulz iterations: fewer are cheaper and less exact
    betas: Annotated[tuple[float, float], BeforeValidator(_pair)] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1  # on matrices only
    cautious: Flag = False  # muon, normuon: decay only where the update makes the weight smaller too
    clip: MaybePositive = 1.0
    schedule: Annotated[str, one_of(*SCHEDULES)] = "cosine"
    warmup_steps: AutoWhole = AUTO
    pct_start: MaybeFraction = None  # one_cycle: the share of the run in which the LR rises
    cycle_momentum: Annotated[tuple[float, float] | None, BeforeValidator(_momenta)] = None  # one_cycle: low, high
    decay_fraction: Share = 0.4  # wsd: the share of the run in which the LR falls
    min_lr_ratio: Fraction = 0.1
    ema: MaybeProbability = None
    precision: Annotated[str, one_of(AUTO, "bf16", "fp16", "fp32", "fp8")] = AUTO
    fp8: Annotated[str, one_of(AUTO, "native", "torchao")] = AUTO  # which implementation, if precision is fp8
    compile: AutoFlag = AUTO
    compile_mode: Annotated[str, one_of(*COMPILE_MODES)] = "default"  # torch.compile(mode=…)
    graph: Flag = False  # record the step as one CUDA graph, unless that is slower
    # pydantic runs the last validator of the annotation first
    grad_checkpointing: Annotated[str, one_of(*CHECKPOINTING), CHECKPOINTING_RULE] = AUTO
    preset: Annotated[str | None, one_of(*PRESETS)] | None = None  # sets memory_fraction, scales global_batch
    memory_fraction: Share = 0.9
    memory_gb: MaybePositive = None  # a limit in GB, instead of memory_fraction
    max_nonfinite: Count = 20  # so many steps in a row without a finite loss and gradient stop the run
    seed: Whole = 1337
    deterministic: Flag = False

    def role_lr(self, role: str) -> float:
        """Return AdamW's peak learning rate for a parameter role (embedding, head, scalar or any other)."""
        own = {"embedding": self.embedding_lr, "head": self.head_lr, "scalar": self.scalar_lr}.get(role, AUTO)
        return float(self.lr if own == AUTO else own)


class Eval(Section):
    every: Count = 1000  # steps; also at the end
    sequences: Count = 256  # of the validation split
    samples: Whole = 1  # texts generated before and after training
    sample_tokens: Count = 120
    sample_temperature: NonNegative = 0.8  # of these samples; 0 is greedy
    sample_top_p: Share = 0.95  # keep the likeliest tokens up to this probability
    prompt: MaybeWords = ""  # null: the beginning of a held-out document, or a held-out question
    patience: MaybeCount = None  # stop after so many evaluations without a lower validation loss


def _mirror(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a URL, such as s3://bucket/prefix.")
    if problem := url_problem(value, MIRROR_SCHEMES):
        raise ValueError(problem)
    return value.rstrip("/")


_MIRROR = Rule(_mirror, accepts={"type": "string", "pattern": f"^({'|'.join(MIRROR_SCHEMES)})://."})


class Checkpoint(Section):
    every: Count = 5000  # steps; also at the end and when the run is stopped
    keep: Count = 2
    best: Flag = True  # also keep the checkpoint with the lowest validation loss
    mirror: Annotated[str | None, none_or(_MIRROR)] = None  # a URL below which runs are copied, each to its name


class MonitorSection(Section):
    log_every: Count = 100
    price_per_hour: MaybePositive = None
    wandb: Annotated[bool | str, BeforeValidator(_project)] = False  # TensorBoard logs are always written


class Parallel(Section):
    """How several GPUs, or processes on a CPU, share the work of a step."""

    # ddp: full copies of the model; fsdp: shards over all ranks; hsdp: shards over groups of ranks, each with a copy
    mode: Annotated[str, one_of(AUTO, *PARALLEL_MODES)] = AUTO
    shard_size: AutoCount = AUTO  # ranks of a group of hsdp
    accumulate: Annotated[str, one_of(AUTO, ROWS, WHOLE)] = AUTO  # how shards sum gradients of several micro-batches
    context: Count = 1  # ranks that split each sequence among them
    context_backend: Annotated[str, one_of(*CONTEXT_BACKENDS)] = "gather"  # how they exchange keys and values
    timeout: Positive = 600.0  # seconds without progress after which a rank counts as hung
    network_gbps: MaybePositive = None  # between nodes, in Gbit/s per node; used by the plan


def _mode_alone(value: Any) -> Any:
    """Read `parallel: fsdp` as `parallel: {mode: fsdp}`."""
    return {"mode": value} if isinstance(value, str) else value


def _job_name(value: Any) -> str:
    # Not one_of(): the jobs of installed packages are looked up only if the name is not one of redline's.
    if not is_job(value):
        names = job_names()
        raise ValueError(f"{value!r} is not one of {', '.join(names)}. {did_you_mean(str(value), names)}".rstrip())
    return str(value)


class Recipe(Section):
    objective: Annotated[str, Rule(_job_name, accepts={"enum": list(JOBS)})] = "causal_lm"
    description: Words = ""
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    monitor: MonitorSection = MonitorSection()
    parallel: Annotated[Parallel, BeforeValidator(_mode_alone)] = Parallel()


# Keys, or beginnings of keys, that may change when a run is resumed.
RESUMABLE = (
    "train.steps",
    "train.tokens",
    "train.epochs",
    "train.hours",
    "train.target_loss",
    "eval.",
    "checkpoint.",
    "monitor.",
    "parallel.",
)


def recipe_class(objective: object) -> type[Recipe]:
    """Return the schema with the options of the chosen job under its name. Other jobs are not imported."""
    if not is_job(objective):
        return Recipe  # its field `objective` then reports the error
    name = str(objective)
    if name in Recipe.model_fields:
        raise UserError("a job cannot have the name of a section.", where=f"objective={name}", fix="Rename the job.")
    options = options_of(name)
    fields: dict[str, Any] = {name: (options, options())}
    return create_model(f"Recipe[{name}]", __base__=Recipe, **fields)
