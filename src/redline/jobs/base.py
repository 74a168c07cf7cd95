"""The jobs that redline can train, without torch: what each of them reads from a recipe, and what it costs.

A job has two halves. `Job`, here, is enough to validate and plan a recipe. `JobRuntime`, in `jobs/objective.py`, needs
torch: it loads the data, builds the model and exports it. `redline plan` imports only the first half of only the job
that the recipe names.

Recipes are annotated as `Any` because their schema is built from the options of these jobs, in a layer above this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib import import_module  # noqa: TID251  # of the jobs in the registry only
from typing import Any, ClassVar, Protocol

from redline.errors import Problem, UserError
from redline.fields import Section
from redline.planning.flops import ASSUMES_FULL_ROWS, FlopsPerToken, Passes, causal_passes, decoder_flops
from redline.planning.layout import Layout
from redline.planning.memory import MemoryParts, training_memory
from redline.planning.shapes import Adapter, DecoderShape
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

    def passes(self, seq_len: int) -> Passes:
        """Return how often a token of data is read and scored."""

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work: ...


class Job(ABC):
    """A kind of training. Subclasses set the first three attributes, implement `costs`, and override what differs."""

    name: ClassVar[str]  # the value of `objective` in a recipe, and the name of its section of options
    Options: ClassVar[type[JobOptions]] = JobOptions
    runtime: ClassVar[str]  # "module:class" of the JobRuntime, imported only when torch is needed

    exports: ClassVar[bool] = False  # JobRuntime.export is implemented: transformers can load the models of this job
    reads_stream: ClassVar[bool] = True  # data.stream has a meaning for it
    overlong_key: ClassVar[str | None] = None  # the recipe key that decides what becomes of overlong samples
    exact_likelihood: ClassVar[bool] = False  # the loss is the likelihood of a text, not a bound, and of any text
    answer_metric: ClassVar[str | None] = None  # `--answers` for its models; None: chosen by the data
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


_BASE_KEYS = ("base", "quant", "quant_double", "lora")


def unused_base_keys(recipe: Any) -> list[Problem]:
    """Report keys about a pretrained base, for a job that trains a model from random weights."""
    fields, what = type(recipe.model).model_fields, f"does nothing with objective={recipe.objective}."
    unused = [name for name in _BASE_KEYS if getattr(recipe.model, name) != fields[name].default]
    fix = f"Remove it, or use objective={BASE_MODEL_JOB}."
    return [Problem(f"model.{name}", what, fix) for name in unused]


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
