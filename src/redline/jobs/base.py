"""The jobs that redline can train, without torch: what each of them reads from a recipe, and what it costs.

A job has two halves. `Job`, here, is enough to validate and plan a recipe. `JobRuntime`, in `jobs/objective.py`, needs
torch: it loads the data, builds the model and exports it. `redline plan` imports only the first half of only the job
that the recipe names.

Recipes are annotated as `Any` because their schema is built from the options of these jobs, in a layer above this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module  # noqa: TID251  # of the jobs in the registry only
from typing import Any, ClassVar, Protocol

from redline.errors import Problem, UserError
from redline.fields import AUTO, Section
from redline.planning.flops import (
    ASSUMES_FULL_ROWS,
    FlopsPerToken,
    Passes,
    causal_passes,
    decoder_flops,
    with_scored_head,
)
from redline.planning.layout import Layout
from redline.planning.memory import (
    HALF,
    Kernels,
    MemoryParts,
    activation_memory,
    adapter_moments,
    cast_weights,
    training_memory,
    workspace,
)
from redline.planning.shapes import TARGETS, Adapter, DecoderShape, matrix_sides
from redline.planning.shards import Units, adapter_units, decoder_units
from redline.planning.speed import Work, decoder_work


class JobOptions(Section):
    """The job's own section of a recipe."""

    # Keys that change what the trained model computes. Checkpoints record them (see recipe/lock.py).
    model_keys: ClassVar[tuple[str, ...]] = ()
    # Keys that do not belong to the weights: `--set` may change them for a trained model.
    settable_after_training: ClassVar[tuple[str, ...]] = ()
    # Keys that hold paths, or entries with paths. A resumed run resolves them from the folder that it began in.
    path_keys: ClassVar[tuple[str, ...]] = ()
    # Keys that are newer than some locks, with the value that describes what those runs did.
    defaults_in_older_locks: ClassVar[dict[str, Any]] = {}


class Costs(Protocol):
    """What a recipe's job costs for a decoder of a given shape."""

    assumed: str  # appended to the source of an expected speed that was measured on another kind of work

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        """Return counts of parameters: `total`, `trainable` and `matmul` (those that multiply a token)."""

    def unmeasured(self, shape: DecoderShape) -> str:
        """Return why the fused blocks are not chosen by themselves for this recipe; "" if they may be."""

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken: ...

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Return the shares of the matmul and attention FLOPs that every data set needs, whatever its row lengths."""

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts: ...

    def units(self, shape: DecoderShape, precision: str, checkpointing: str, kernels: Kernels) -> Units:
        """Return what FSDP shards and gathers."""

    def passes(self, seq_len: int) -> Passes:
        """Return how often a token of data is read and scored."""

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work: ...


class Job(ABC):
    """A kind of training. Subclasses set the first three attributes, implement `costs`, and override what differs."""

    name: ClassVar[str]  # the value of `objective` in a recipe, and the name of its section of options
    Options: ClassVar[type[JobOptions]] = JobOptions
    runtime: ClassVar[str]  # "module:class" of the JobRuntime, imported only when torch is needed

    exports_code: ClassVar[bool] = False  # JobRuntime.export returns a CodeModel: transformers lacks a class for it
    exports: ClassVar[bool] = False  # JobRuntime.export is implemented: transformers can load the models of this job
    reads_stream: ClassVar[bool] = True  # data.stream has a meaning for it
    overlong_key: ClassVar[str | None] = None  # the recipe key that decides what becomes of overlong samples
    exact_likelihood: ClassVar[bool] = False  # the loss is the likelihood of a text, not a bound, and of any text
    answer_metric: ClassVar[str | None] = None  # `--answers` for its models; None: chosen by the data
    # Why each rank needs whole sequences; "" if the objective implements `local`, which parallel.context needs.
    whole_sequences: ClassVar[str] = "this job does not say how its sequences are split"
    answer_tokens: ClassVar[int] = 256  # the default length of an answer in `redline eval --answers`

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return recipe keys that have another default in this job. `given` are the keys that the user wrote, flat."""
        return {}

    def problems(self, recipe: Any) -> list[Problem]:
        """Return contradictions between the recipe's keys, and keys that this job does not read."""
        return []

    def added_tokens(self, recipe: Any) -> int:
        """Return how many ids the job needs besides those of the tokenizer."""
        return 0

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        """Return whether the data of a recipe with these flat keys are rows; otherwise they are windows of text."""
        return False

    def can_answer(self, recipe: Any) -> bool:
        """Return whether the trained model answers questions; otherwise it continues texts."""
        return False

    def adapter(self, recipe: Any) -> Adapter | None:
        """Return the low-rank adapter that is trained; None if the weights themselves are."""
        return None

    def choices(self, recipe: Any, steps: int | None) -> list[tuple[str, Any, str]]:
        """Return a key, its value and the reason for each of the job's own options that is `auto`.

        `steps` is the expected length of the run; None if it is not known. A choice without a reason is not reported.
        """
        return []

    def layout(self, recipe: Any) -> Layout | None:
        """Return the segments and blocks of a sequence, for a job whose attention mask is made of them."""
        return None

    @abstractmethod
    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Costs:
        """Return what the recipe costs.

        `rows` are averages over the rows of the training data (`DataFacts.rows`). Without them, every row is assumed to
        be full. `micro` is the number of rows that are padded to one length.
        """


# ----------------------------------------------------------------------------------------------------
# The registry. Nothing is imported until a job is asked for by its name.

# name -> "module:class" of the Job
_BUILT_IN = {
    "causal_lm": "redline.jobs.causal_lm.costs:CausalLMJob",
    "finetune": "redline.jobs.finetune.costs:FinetuneJob",
    "latent_prefix": "redline.jobs.latent_prefix.costs:LatentPrefixJob",
    "block_diffusion": "redline.jobs.diffusion.costs:BlockDiffusionJob",
    "hierarchical_diffusion": "redline.jobs.diffusion.costs:HierarchicalDiffusionJob",
}
JOBS = tuple(_BUILT_IN)  # that ship with redline
BASE_MODEL_JOB = "finetune"  # evaluates and samples a pretrained model that no run of redline trained
ENTRY_POINTS = "redline.jobs"  # the group in which installed packages name theirs: NAME = "module:class"

_registered: dict[str, Job] = {}


def register_job(job: Job) -> None:
    """Add a job to those that recipes may name, in this process.

    A run of several processes needs the job in each of them: install it as an entry point of the group `redline.jobs`.
    """
    _check_name(job.name)
    if job.name in _BUILT_IN:
        raise ValueError(f"redline has a job named {job.name} of its own")
    _registered[job.name] = job


def is_job(name: object) -> bool:
    """Return whether a recipe may name this job. Installed packages are asked only for names redline does not know."""
    return isinstance(name, str) and (name in _BUILT_IN or name in _registered or name in _installed())


def job_names() -> tuple[str, ...]:
    """Return the names of all jobs: those of redline first."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_registered, *_installed())))


def job(name: str) -> Job:
    """Return the job of this name, which must be one of `job_names()`."""
    return _registered[name] if name in _registered else _load(name)


def costs(recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Costs:
    """Return what a recipe's job costs; see `Job.costs`."""
    return job(recipe.objective).costs(recipe, rows, micro)


def options_of(name: str) -> type[JobOptions]:
    return job(name).Options


@cache
def _installed() -> dict[str, str]:
    """Return name → "module:class" of the jobs of installed packages.

    This reads a file of every installed package, which takes milliseconds to tens of milliseconds: recipes of redline's
    own jobs never get here.
    """
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS) if entry.name not in _BUILT_IN}


@cache
def _load(name: str) -> Job:
    if name in _BUILT_IN:
        found: Job = load_attribute(_BUILT_IN[name])()
        return found
    address = _installed()[name]
    _check_name(name)
    try:
        found = load_attribute(address)()
    except (ImportError, AttributeError) as error:
        fix = "Reinstall the package that provides it."
        raise UserError(f"the job cannot be imported from {address} ({error}).", where=name, fix=fix) from error
    if not isinstance(found, Job) or found.name != name:
        fix = f"The entry point must name a subclass of redline.jobs.base.Job whose `name` is {name!r}."
        raise UserError(f"{address} is not the job {name}.", where=name, fix=fix)
    return found


def load_attribute(address: str) -> Any:
    """Import "module:attribute"."""
    module, _, attribute = address.partition(":")
    return getattr(import_module(module), attribute)


def _check_name(name: str) -> None:
    if not name.isidentifier():  # the name becomes a key of recipes: the section of the job's options
        raise UserError(f"{name!r} cannot be the name of a job.", where=ENTRY_POINTS, fix="Use letters, digits and _.")


# ----------------------------------------------------------------------------------------------------
# What it costs to train the one decoder: the costs of causal_lm, which other jobs that train a decoder adapt.


# ----------------------------------------------------------------------------------------------------
# Keys about a pretrained base, for jobs that may start from one.


BASE_TOKENIZER = "base"  # the value of data.tokenizer that stands for the tokenizer of model.base
METHODS = ("qlora", "lora", "full")  # adapters on a base in NF4, adapters on the base as it is, or all weights
_ADAPTER_KEYS = ("quant", "quant_double", "lora")


def base_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a text job that starts from a base: it reads the text with the base's tokenizer."""
    return {} if given.get("model.base") is None else {"data.tokenizer": BASE_TOKENIZER}


def base_problems(recipe: Any) -> list[Problem]:
    """Report keys that need a base or contradict it, for a text job that may start from one and trains all weights."""
    found = [] if recipe.model.base is not None else _tokenizer_without_base(recipe)
    what = f"does nothing with objective={recipe.objective}, which trains all weights."
    found += [Problem(f"model.{name}", what, "Remove it.") for name in _changed_adapter_keys(recipe)]
    return found + _activation_problems(recipe)


def adapter_problems(recipe: Any) -> list[Problem]:
    """Report the same for a text job that can also train adapters, as the key `method` of its options says."""
    if recipe.model.base is not None:
        return method_problems(recipe)
    key, method = f"{recipe.objective}.method", getattr(recipe, recipe.objective).method
    found = _tokenizer_without_base(recipe)
    if method != "full":
        fix = f"Set model.base, or use {key}=full."
        found.append(Problem(key, f"{method} trains adapters on a base, and model.base is not set.", fix))
        return found
    what, fix = "does nothing without model.base.", "Remove it, or set model.base."
    return found + [Problem(f"model.{name}", what, fix) for name in _changed_adapter_keys(recipe)]


def method_problems(recipe: Any) -> list[Problem]:
    """Report keys that contradict the `method` by which a job trains a base."""
    model, train, found = recipe.model, recipe.train, []
    key, method = f"{recipe.objective}.method", getattr(recipe, recipe.objective).method
    if model.quant != ("nf4" if method == "qlora" else "none"):
        fix = f"Leave it out, or use {key}={'qlora' if model.quant == 'nf4' else 'lora'}."
        found.append(Problem("model.quant", f"{model.quant} does not go with {key}={method}.", fix))
    if method == "full" and model.lora != type(model).model_fields["lora"].default:
        fix = f"Remove it (model.lora=null), or use {key}=lora."
        found.append(Problem("model.lora", f"does nothing with {key}=full.", fix))
    if method != "full":
        rates = {key: getattr(train, key) for key in ("embedding_lr", "head_lr", "scalar_lr")}
        unused = [key for key, rate in rates.items() if rate not in (AUTO, train.lr)]
        what = f"does nothing with {key}={method}: only the adapters' matrices are trained."
        found += [Problem(f"train.{key}", what, "Use train.lr.") for key in unused]
        if train.precision == "fp8" and train.fp8 == "torchao":
            found.append(Problem("train.fp8", "torchao's fp8 is for weights that are trained.", "Leave it out."))
    return found + _activation_problems(recipe)


def _changed_adapter_keys(recipe: Any) -> list[str]:
    fields = type(recipe.model).model_fields
    return [name for name in _ADAPTER_KEYS if getattr(recipe.model, name) != fields[name].default]


def _tokenizer_without_base(recipe: Any) -> list[Problem]:
    if recipe.data.tokenizer != BASE_TOKENIZER:
        return []
    what, fix = "base is the tokenizer of model.base, which is not set.", "Set model.base, or name a tokenizer."
    return [Problem("data.tokenizer", what, fix)]


def _activation_problems(recipe: Any) -> list[Problem]:
    if recipe.model.base is None or recipe.model.mlp == "swiglu":
        return []
    return [Problem("model.mlp", f"no base has {recipe.model.mlp}.", "Leave it out: the base defines it.")]


def adapter_of(recipe: Any) -> Adapter | None:
    """Return the adapter that a job with the option `method` trains; None if it trains all weights."""
    lora, method = recipe.model.lora, getattr(recipe, recipe.objective).method
    if method == "full":
        return None
    return Adapter(lora.r, lora.target_modules, method == "qlora", recipe.model.quant_double)


def export_problems(model: Any) -> list[Problem]:
    """Return a problem for each option of the model that no class of transformers computes exactly."""
    problems = []
    if model.mlp != "swiglu":
        fix = "Only model.mlp=swiglu can be exported."
        what = f"{model.mlp} does not exist in transformers' Llama, which has a gated feed-forward layer."
        problems.append(Problem("model.mlp", what, fix))
    if model.softcap is not None:
        what = f"{model.softcap:g} does not exist in transformers' Llama, which has no softcap on its logits."
        problems.append(Problem("model.softcap", what, "Only model.softcap=null can be exported."))
    for key, off in {"value_embeddings": 0, "skips": "none"}.items():
        if (value := getattr(model, key)) != off:
            what = f"{value} does not exist in transformers' Llama, which has no such part."
            problems.append(Problem(f"model.{key}", what, f"Only model.{key}={off} can be exported."))
    if model.qkv_bias and model.qk_norm:
        what = "true does not go with model.qk_norm: Qwen2 has biases, Qwen3 has norms, and no class has both."
        problems.append(Problem("model.qkv_bias", what, "Only one of the two can be exported."))
    if not model.qk_norm and model.d_model % model.heads:
        what = f"{model.heads} does not divide model.d_model={model.d_model}, as transformers' Llama requires."
        problems.append(Problem("model.heads", what, "Only a width that is a multiple of the heads can be exported."))
    return problems


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
        assumed = self.assumption()
        return decoder_flops(shape, self.document(seq_len), checkpointing, scored=self.scored, assumed=assumed)

    def assumption(self) -> str:
        """Return what the FLOPs assume about rows of the data that were not read; "" if nothing."""
        return ASSUMES_FULL_ROWS if self.recipe.data.pack and not self.rows else ""

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

    # The same as of the objective (jobs/objective.py).
    casts_weights: ClassVar[bool] = False

    def units(self, shape: DecoderShape, precision: str, checkpointing: str, kernels: Kernels) -> Units:
        """Return what FSDP shards and gathers. fp8 makes its operands of whole weights."""
        if precision not in HALF:
            return decoder_units(shape)
        casts = cast_weights(shape, 2, kernels, checkpointing)
        return decoder_units(shape, block_bytes=2, root_bytes=2 if self.casts_weights else 4, casts=casts)

    def passes(self, seq_len: int) -> Passes:
        """Return how often a token of data is read and scored."""
        return causal_passes(self.document(seq_len), self.scored)

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        return decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))


# ----------------------------------------------------------------------------------------------------
# What it costs to train adapters on a frozen decoder.


FORMULA = "4·N_base + 6·N_lora + 12·L·d·T"
FORMULA_CAUSAL = "4·N_base + 6·N_lora + 6·L·d·T"
FORMULA_RECOMPUTED = "2·(N_layers − N_down) + 2·N_lora + 2·L·d·T"


class AdapterCosts(DecoderCosts):
    """The costs of training adapters on a frozen base; of a recipe without adapters, those of the decoder."""

    casts_weights = True

    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, rows, micro)
        self.adapter = adapter_of(recipe)

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        counted = super().parameters(shape)
        if self.adapter is None:
            return counted
        added = self.adapter.parameters(shape)
        return {**counted, "total": shape.parameters + added, "trainable": added}

    def untimed_features(self, shape: DecoderShape) -> dict[str, bool]:
        """A base with adapters was timed; a base that is trained itself was not."""
        trained = self.recipe.model.base is not None and self.adapter is None
        return super().untimed_features(shape) | {"a base": trained}

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        """Count FLOPs per token. For a frozen matrix the backward computes the gradient of its input only: 4 FLOPs per
        weight instead of 6."""
        if self.adapter is None:
            return super().flops(shape, seq_len, checkpointing)
        assumed, document, matmuls = self.assumption(), self.document(seq_len), self._matmuls(shape)
        attention = shape.layers * shape.d_attention * document
        useful, executed = (
            matmuls + 12.0 * attention,
            matmuls + 6.0 * attention - sum(self._pruned_backward(shape, document)),
        )
        palm, masked = (with_scored_head(form, "N_base", self.scored) for form in (FORMULA, FORMULA_CAUSAL))
        if checkpointing != "full":
            return FlopsPerToken(useful, executed, 0.0, palm, masked, assumed=assumed)
        run_again = shape.layers * shape.layer_recomputed_parameters + self.adapter.parameters(shape)
        again = 2.0 * run_again + 2.0 * attention
        return FlopsPerToken(useful, executed, again, palm, masked, FORMULA_RECOMPUTED, assumed)

    def _matmuls(self, shape: DecoderShape) -> float:
        """Return the FLOPs of a token in the frozen matrices, the adapters and, at scored positions, the head."""
        assert self.adapter is not None
        base = shape.layers * shape.layer_matmul_parameters + self.scored * shape.head_parameters
        return 4.0 * base + 6.0 * self.adapter.parameters(shape)

    def _pruned_backward(self, shape: DecoderShape, document: float) -> tuple[float, float]:
        """Return the FLOPs of the first block's backward that autograd never runs: of matmuls and of causal attention.

        The embeddings are frozen, so nothing before the block's first adapter needs a gradient, and neither does the
        input of the linear that holds this adapter.
        """
        assert self.adapter is not None
        matmuls, attention, inputs = 0.0, 0.0, matrix_sides(shape)
        for linear, size in (
            ("qkv", shape.d_model * shape.d_qkv),
            ("out", shape.d_attention * shape.d_model),
            ("up", shape.d_model * shape.d_up),
            ("down", shape.d_ff * shape.d_model),
        ):
            if linear == "out":
                attention = 4.0 * shape.d_attention * document
            held = [inputs[name][0] for name in self.adapter.targets if TARGETS[name][0] == linear and name in inputs]
            matmuls += 2.0 * (size + self.adapter.r * sum(held))
            if held:
                break
        return matmuls, attention

    def units(self, shape: DecoderShape, precision: str, checkpointing: str, kernels: Kernels) -> Units:
        if self.adapter is None:
            return super().units(shape, precision, checkpointing, kernels)
        return adapter_units(shape, self.adapter, 4 if precision == "fp32" else 2)

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        if self.adapter is None:
            return training_memory(shape, **how)
        adapter, wide, tokens, kernels = self.adapter, how["bytes_per_value"], how["tokens"], how["kernels"]
        passing = {key: how[key] for key in ("tokens", "bytes_per_value", "checkpointing", "kernels")}
        activations, logits = activation_memory(shape, **passing, head_learns=False)
        added = adapter.parameters(shape)
        kept = 0.0 if how["checkpointing"] == "full" else adapter.kept_values() * shape.layers
        # The base is dequantised one matrix at a time, where it is multiplied; the adapters are cast as a whole.
        dequantised = wide * max(a * b for a, b in matrix_sides(shape).values()) * (2 if shape.gated else 1)
        return MemoryParts(
            weights=adapter.base_bytes(shape, wide) + 4.0 * added * (2 if how["ema"] else 1),
            gradients=4.0 * added,
            optimizer=adapter_moments(added, how["optimizer"]),
            activations=activations + tokens * kept * wide,
            logits=logits,
            workspace=float(dequantised + wide * added) + workspace(kernels, imported=True),
        )

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        full = decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))
        if self.adapter is None:
            return full
        added, wide, matmuls = self.adapter.parameters(shape), how["bytes_per_value"], self._matmuls(shape)
        if (
            self.rows
        ):  # for the ceiling of these data; without rows, the work must be what expected speeds were calibrated with
            pruned, pruned_attention = self._pruned_backward(shape, self.document(seq_len))
            matmuls, full = matmuls - pruned, replace(full, attention=full.attention - pruned_attention)
        again = how["checkpointing"] == "full"
        run_again = shape.layers * shape.layer_recomputed_parameters + added
        per_update = full.update * added / shape.parameters  # an optimizer costs the same per parameter
        kept = self.adapter.kept_values() * shape.layers * wide
        return replace(
            full,
            matmul=matmuls,
            recomputed=2.0 * run_again if again else 0.0,
            moved_least=full.moved_least + 2 * kept,
            moved=full.moved + 3 * kept + self.adapter.moved_values(shape) * shape.layers * wide,
            update=per_update,
            update_flops=0.0,
            gradient_bytes=4.0 * added,
        )
