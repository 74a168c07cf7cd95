"""The half of a job that needs torch: its data, its model, its loss, and what can be asked of the trained model.

`JobRuntime` opens data and makes an `Objective`; the trainer and the commands that use a trained model know only the
`Objective`. The torch-free half of a job is `Job` in `jobs/base.py`. The last part is shared by jobs that train the
decoder.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from redline.data.loader import cu_seqlens
from redline.data.sources import ProgressCallback
from redline.data.tokens import TokenFile
from redline.errors import UserError, package_hint
from redline.jobs.base import job, load_attribute
from redline.jobs.preview import SamplePreview
from redline.jobs.streaming import QUESTION, TEXT, Ask, Event, Finished, Panel, Section
from redline.kernels.attention import Attention, Bound, MaskSpec, Selection, part_candidates, select
from redline.kernels.context import ContextGroup, Part, pad_tables, varlen_tables
from redline.kernels.cross_entropy import IGNORE, compile_loss, linear_cross_entropy
from redline.kernels.float8_choice import Float8Choice, Shapes, choose
from redline.kernels.matmul import DTYPES
from redline.models.adapters import LoraLinear
from redline.models.decoder import Decoder, Linear
from redline.models.float8 import LINEARS
from redline.planning.context import Split
from redline.planning.shapes import Adapter
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Lora, Recipe

Batch = dict[str, Tensor]
Log = Callable[[str], None]  # receives messages for the user


def ignore_message(message: str) -> None:
    """Drop the message: the default of parameters of type `Log`."""


@dataclass(frozen=True)
class Term:
    """A named term of the loss: coefficient · sum / (the total of `weight` over the global batch)."""

    sum: Tensor
    weight: str
    coefficient: float = 1.0


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of one role. The optimizer has a rule for each role."""

    role: str  # matrix, embedding, head, scalar
    parameters: dict[str, nn.Parameter]
    splits: dict[str, tuple[int, ...]]  # parameter → rows of the matrices that are stored in it one below the other


@dataclass(frozen=True)
class Sampling:
    """How to generate text."""

    count: int = 1
    tokens: int = 200
    seed: int = 0
    temperature: float = 0.8  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = 0.95


@dataclass(frozen=True)
class Sample:
    """A generated text and the prompt that it continues or answers."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Question:
    """A held-out question and its reference answer."""

    text: str
    prompt: list[int]  # the question as the model reads it: in its template, as token ids
    reference: str


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    text: str
    ended: bool  # the model ended it; otherwise the token limit did
    forward_passes: int = 0  # that it took, for a model that does not need one per token


class AnswerEvaluation(Protocol):
    """The result of an evaluation that a job does in its own way, for `redline eval --answers`."""

    def result(self) -> dict[str, Any]:
        """Return the figures as JSON."""

    def lines(self) -> list[str]:
        """Return the figures as text."""


@dataclass(frozen=True)
class TransformersModel:
    """A trained model in the format of the transformers library."""

    config: dict[str, Any]  # config.json
    generation: dict[str, Any]  # generation_config.json
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


@dataclass(frozen=True)
class CodeModel:
    """A trained model that transformers has no class for: it is exported with a file of code that computes it."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    code: str  # the module in redline.export.modeling that is copied; redline itself never runs an exported copy
    usage: str  # Python that loads and uses it, for the model card
    special_tokens: tuple[str, ...] = ()  # that follow the tokenizer's own
    identity: dict[str, str] = field(default_factory=dict)  # must be equal in the checkpoint's identity

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


@dataclass(frozen=True)
class FinetunedModel:
    """What a run trained on a pretrained base: an adapter, or new values of all its weights."""

    base: str  # as the recipe names it
    method: str  # qlora, lora or full
    learn: str  # what the loss was taken over
    adapter: Adapter | None  # None: all weights were trained
    lora: Lora
    template: str | None  # of chats
    tensors: dict[str, Tensor]  # of the checkpoint


class JobData(Protocol):
    """The opened data of a run."""

    @property
    def facts(self) -> DataFacts: ...

    @property
    def messages(self) -> Sequence[str]:
        """What the user should know about the rows, for example how many were left out and why."""

    def row_keys(self, *, trained: bool) -> Collection[Any] | None:
        """Return one key per row or document to train on, or per one that is evaluated; None if there are too many.

        Equal rows have equal keys: `redline eval --data` counts with them how many rows the run was trained on.
        """

    def held_out_sequences(self, seq_len: int) -> int | None:
        """Return how many sequences of text are evaluated; None if the data are rows, which `row_keys` counts."""


class Objective(ABC):
    """A job's model and loss: it turns positions of the global batch into loss terms, evaluates, and samples."""

    resolved: Resolved
    recipe: Recipe
    data: Any  # a JobData; each job has its own
    model: nn.Module  # what is trained

    # Every row is read to data.seq_len. Otherwise FLOPs per token must be averaged over the rows of the data.
    whole_rows: ClassVar[bool] = True
    # `select_questions` reads the rows again, in another way than training did, and reports on them itself.
    reloads_rows_for_questions: ClassVar[bool] = False
    # Everything outside the model's blocks reads its weights in the compute precision only, so that FSDP may gather
    # them in it.
    casts_weights: ClassVar[bool] = False

    context: ContextGroup | None = None  # the ranks that share each row; None: each rank computes whole rows
    log: Log = staticmethod(ignore_message)  # for messages that are not events
    skipped_steps = 0  # training steps whose data the run skips: it reads the data of as many further steps instead

    # --- building

    @abstractmethod
    def build(self, device: torch.device) -> None:
        """Make and initialise the model on the device."""

    def build_in_parts(self, device: torch.device) -> Iterator[nn.Module]:
        """Do what `build` does, and yield each block of `model` when its weights are on the device.

        FSDP shards a block before it asks for the next one, so that no rank holds the whole model. A job that has only
        `build` is sharded after that; one that overrides `build` must override both.
        """
        raise NotImplementedError

    def remove_adapters(self) -> None:
        """Before `build`: leave out what would be trained, to use a pretrained base as it is."""
        return

    @abstractmethod
    def param_groups(self) -> list[ParamGroup]:
        """Return the trained parameters by their role."""

    def compile(self) -> None:
        """Compile the parts of the model that take the most time."""
        return

    def choices(self) -> list[tuple[str, Any, str]]:
        """Return what the job chose by measurement while it was built: key, value, reason."""
        return []

    def warnings(self) -> list[str]:
        """Return what the recipe asks for and this machine does not give, found while the model was built."""
        return []

    # --- training

    @abstractmethod
    def batch(self, samples: np.ndarray) -> Batch:
        """Return the rows of these global sample numbers, on the CPU: a pure function of (seed, sample)."""

    def local(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch of whole rows, on the CPU. Without `context` that is the batch itself."""
        assert self.context is None, "a job whose rows can be split implements this method"
        return batch

    @abstractmethod
    def weights(self, batch: Batch) -> dict[str, float]:
        """Return what the loss terms of whole rows are divided by. It is known before the forward pass."""

    @abstractmethod
    def loss(self, batch: Batch) -> dict[str, Term]:
        """Return the terms of the loss of a batch on the device."""

    def figures(self, loss: Tensor, weights: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Return further figures of a step for the log, from its loss and the totals of its `weights`."""
        return {}

    @abstractmethod
    def worst_batch(self, micro: int) -> Batch:
        """Return the largest batch that can occur, of random tokens, to find the peak of memory before step 1."""

    def warmup_batches(self, micro: int) -> list[tuple[int, Batch]]:
        """Return (rows, batch) pairs for the warm-up: the largest batch that can occur, and any other shape that must
        run once (to compile or allocate) before steps reach their normal speed."""
        return [(micro, self.worst_batch(micro))]

    def dry_run(self) -> AbstractContextManager[Any]:
        """Return a context for forward and backward passes that must leave no trace: on exit it restores all state that
        a pass changes besides gradients."""
        return nullcontext()

    @property
    def replayable(self) -> bool:
        """Whether every pass runs the same kernels on the same shapes without randomness, so that a CUDA graph of one
        step can be replayed for the others."""
        return False

    def batches_changed(self) -> bool:
        """Return whether `batch` has begun to return other batches, once for each change: those that were prefetched
        must then be made again. The trainer asks after each step."""
        return False

    def token_files(self) -> Sequence[TokenFile]:
        """Return the files with recorded digests that batches are read from: they are verified while the run trains."""
        return ()

    # --- a run that is saved and resumed

    def identity(self) -> dict[str, str]:
        """Return name → fingerprint of what must be equal on resume, besides data and tokenizer."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the weights, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Called before `build`."""
        return

    @property
    def tokenizer(self) -> Any:
        """Return what encodes and decodes the text of this job; None if there is no such thing."""
        return None

    def save_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer into the run's directory, so that the run can read other text later."""
        return

    # --- evaluation and sampling

    def decoders(self) -> list[Decoder]:
        """Return the decoders that generate text."""
        return [module for module in self.model.modules() if isinstance(module, Decoder)]

    @abstractmethod
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Return metrics on the validation data, `loss` among them."""

    @abstractmethod
    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Continue or answer a prompt. Return no samples if the tokenizer's files are missing."""

    def continuation(self, prompt: str, how: Sampling) -> list[Sample]:
        """Continue the prompt as it is, without the template that questions are usually wrapped in."""
        return self.sample(prompt, how)

    def panels(self) -> Sequence[Panel]:
        """Return the ways to use the model in chat, `redline play` and the API; none if it can write no text."""
        kind, title = (QUESTION, "Ask") if self.can_answer else (TEXT, "Complete")
        return [Panel(kind, title, kind)]

    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        """Yield what the model writes as it is written: one text, whatever `how.count` is.

        Closing the iterator cancels the rest. This default shows whole samples, for jobs that write no tokens one by
        one.
        """
        for number, sample in enumerate(self.sample(ask.text, replace(how, count=1))):
            yield Section(str(number), "")
            yield Finished(str(number), sample.text)

    def first_prompt(self) -> str:
        """Return a prompt from the held-out data: the beginning of a document, or a question; "" if there is none."""
        return ""

    @property
    def can_answer(self) -> bool:
        """Whether the model answers questions; otherwise it continues texts."""
        return job(self.recipe.objective).can_answer(self.recipe)

    def select_questions(self, count: int | None) -> None:
        """Restrict evaluation to held-out rows that can be asked as questions, and to the first `count` of these."""
        return

    def questions(self) -> list[Question]:
        """Return the held-out questions. Called after `select_questions`."""
        return []

    def answer(
        self, questions: Sequence[Question], tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[Answer]:
        """Return the most likely answer to each question, of at most `tokens` tokens.

        `progress` is called with the number of questions that have been answered.
        """
        assert not questions, "this job has no questions, so it cannot have been asked any"
        return []

    def evaluate_answers(
        self, *, numbers: bool, count: int | None, tokens: int, where: str, progress: Callable[[int, int], None]
    ) -> AnswerEvaluation | None:
        """Evaluate answers in the job's own way; None for the way that is common to all jobs (evaluate/questions.py).

        With `numbers`, an answer is compared by its final number. `where` names the model in errors.
        """
        return None


# ----------------------------------------------------------------------------------------------------
# Metrics that follow from a validation loss.


def perplexity(loss: float) -> float:
    """Return e^loss, or infinity where that is larger than a float."""
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, tokens: int, utf8_bytes: int) -> float:
    """Return the loss in bits per byte of text, which can be compared across tokenizers."""
    return loss / math.log(2) * tokens / utf8_bytes


# ----------------------------------------------------------------------------------------------------
# Opening a job's data and making its objective.


DataT = TypeVar("DataT", bound=JobData)


class JobRuntime(ABC, Generic[DataT]):
    """Opens the data of a job, makes its objective, and converts its trained weights."""

    def complete(self, recipe: Recipe, log: Log) -> Recipe:
        """Return the recipe with what it leaves to a pretrained base, such as the shape of the model."""
        return recipe

    @abstractmethod
    def load_data(
        self, recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
    ) -> DataT:
        """Open the recipe's data, and prepare them first if necessary.

        With `for_evaluation` nothing is trained, and all of the data are held out.
        """

    @abstractmethod
    def random_data(self, facts: DataFacts) -> DataT:
        """Return data that can be built with but not read, for steps on random tokens that are only timed."""

    @abstractmethod
    def tokenizer_alone(self, facts: DataFacts, folder: Path, recipe: Recipe) -> DataT:
        """Return data of which only the tokenizer can be used, for a model that generates text on a machine that may
        not have its data. `folder` is the run's, which may have a copy of the tokenizer."""

    @abstractmethod
    def create(self, resolved: Resolved, data: DataT) -> Objective:
        """Return the objective, not built yet."""

    def preview(self, recipe: Recipe, count: int, progress: ProgressCallback | None, log: Log) -> SamplePreview | None:
        """Return the first `count` samples in the order of training; None if the data are plain documents."""
        return None

    def export(
        self, recipe: Recipe, tensors: dict[str, Tensor], *, eot: Callable[[], int], vocab_size: int, dtype: str
    ) -> TransformersModel | FinetunedModel | CodeModel:
        """Return what the resolved recipe trained, for `redline export`. It needs neither data nor a device.

        `eot` returns the id of the end-of-text token, or raises a UserError if the tokenizer's files are missing.
        """
        raise NotImplementedError(f"`exports` of the job {recipe.objective} promises this method")


def job_runtime(name: str) -> JobRuntime[Any]:
    """Return the torch half of the job of this name."""
    runtime: JobRuntime[Any] = load_attribute(job(name).runtime)()
    return runtime


# ----------------------------------------------------------------------------------------------------
# What jobs that train the decoder share: parameter groups, choice of attention, batch layout, loss, fp8.

# ----------------------------------------------------------------------------------------------------
# The optimizer's role of each parameter.


def role_groups(model: nn.Module) -> list[ParamGroup]:
    """Group the trained parameters: hidden matrices, embeddings, the head, and everything with one dimension."""
    by_role: dict[str, dict[str, nn.Parameter]] = {}
    splits: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                full = f"{path}.{name}" if path else name
                by_role.setdefault(_role(path, module, parameter), {})[full] = parameter
                splits[full] = _splits(module, parameter)
    return [ParamGroup(role, members, {n: splits[n] for n in members}) for role, members in by_role.items()]


def _splits(module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the rows of each matrix that is stored in the parameter, one below the other."""
    if isinstance(module, LoraLinear):
        return (module.r,) * len(module.adapters)
    return module.splits if isinstance(module, Linear) else (parameter.shape[0],)


def _role(path: str, module: nn.Module, parameter: nn.Parameter) -> str:
    if parameter.dim() < 2:
        return "scalar"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "head" if path == "head" else "matrix"


CHOSEN_AT_START = "as chosen when the run began"


class DecoderObjective(Objective):
    """The base class of objectives that train one decoder on next-token-like targets."""

    model: Decoder
    device: torch.device
    part: Part | None = None  # with `context`: this rank's part of the rows

    def __init__(self, resolved: Resolved) -> None:
        self.resolved, self.recipe = resolved, resolved.recipe
        self.selection: Selection | None = None
        self.seq_len = self.recipe.data.seq_len
        self.mask = MaskSpec(causal=True, documents=self.recipe.data.pack)
        self.dtype = DTYPES[self.recipe.train.precision]

    # --- building

    def decoder(self) -> Decoder:
        """Return the decoder, with uninitialised weights."""
        options = self.recipe.model
        if options.kernels == "fused" and self.device.type == "cuda" and find_spec("triton") is None:
            fix = f"Install it: {package_hint('triton')}; or use model.kernels=torch."
            raise UserError("fused kernels need the package triton.", where="model.kernels", fix=fix)
        if self.context is not None:
            self.part = Part(Split(self.row_copies, self.context.size), self.context, self.device)
        if self.selection is not None and self._unable_in_parts(self.selection.backend):
            self.selection = None  # the run began with whole rows
        self.selection = self.selection or self._select_attention()
        self.attention = self.attention_for(self.mask)
        return Decoder(
            self.resolved.shape,
            attention=self.attention,
            rope_theta=options.rope_theta,
            rope_scaling=options.rope_scaling,
            eps=options.norm_eps,
            dropout=options.dropout,
            softcap=options.softcap,
            dtype=self.dtype,
            checkpointing=self.recipe.train.grad_checkpointing,
            kernels=options.kernels,
        )

    def attention_for(self, mask: MaskSpec) -> Attention:
        assert self.selection is not None
        grouped = self.resolved.shape.kv_heads != self.resolved.shape.heads
        in_parts = self.part is not None
        return Attention(self.selection.backend, mask, self.device.type, grouped=grouped, in_parts=in_parts)

    def _unable_in_parts(self, backend: str) -> str:
        """Return why a back-end cannot compute this rank's part of rows; "" if it can, or if rows are whole."""
        if self.context is None:
            return ""
        how = (self.device.type, self.dtype, self.resolved.shape.head_dim, self.context.backend)
        return part_candidates(self.mask, *how)[backend]

    def _select_attention(self) -> Selection:
        """Choose the attention backend, by measurement if the recipe leaves it open.

        This happens once in a run's life: a resumed run must compute with the backend that it began with, or it would
        not continue to the same bits.
        """
        wanted, train, shape = self.recipe.model.attention, self.recipe.train, self.resolved.shape
        if train.deterministic and wanted == "auto" and not self._unable_in_parts("flash"):
            return Selection("flash", "its backward can be deterministic")
        return select(
            wanted,
            self.mask,
            device=self.device.type,
            dtype=self.dtype,
            shape=(self.resolved.batch.micro, shape.heads, self.read_length, shape.head_dim),
            context_backend=None if self.context is None else self.context.backend,
        )

    @property
    def read_length(self) -> int:
        """How many positions the model reads for one sequence."""
        return self.seq_len

    @property
    def row_copies(self) -> tuple[int, ...]:
        """The lengths of the parts of a row that are split over ranks, each by itself."""
        return (self.read_length,)

    @property
    def compiled(self) -> bool:
        return bool(self.recipe.train.compile) and self.recipe.model.kernels != "fused"

    @property
    def replayable(self) -> bool:
        # flex makes a mask for each batch and inspects it on the host, which a CUDA graph cannot record.
        return self.recipe.model.dropout == 0 and self.attention.backend != "flex"

    @property
    def uniform_layout(self) -> bool:
        """Whether all batches must have tensors of the same names and shapes: a CUDA graph is replayed on them."""
        return self.recipe.train.graph and self.replayable and self.device.type == "cuda"

    def choices(self) -> list[tuple[str, Any, str]]:
        assert self.selection is not None
        return [("model.attention", self.selection.backend, self.selection.reason)]

    def param_groups(self) -> list[ParamGroup]:
        return role_groups(self.model)

    def compile(self) -> None:
        if self.device.type == "cuda" and self.recipe.model.kernels != "fused":
            compile_loss()  # on a CPU the in-place reference is as fast
        if self.part is not None:
            self.part.exclude_from_compilation()
        self.model.compile_blocks(self.recipe.train.compile_mode)

    # --- a batch

    def laid_out(self, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None) -> Batch:
        """Return a batch with what the attention needs to keep documents apart, if any row has more than one."""
        batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self.mask.documents:
            assert documents is not None
            if self.attention.varlen and not self.uniform_layout and (documents == documents[:, :1]).all():
                return batch  # not with a CUDA graph: it would reuse the documents that it was recorded with
            batch["documents"] = torch.from_numpy(documents)
            if self.attention.varlen:
                batch |= self._varlen(documents)
        return batch

    def _varlen(self, documents: np.ndarray) -> Batch:
        """Return the documents' starts as variable-length kernels take them, padded to one of a few sizes.

        The kernel launches blocks for every start, each for a document of `max_seqlen`, so both are kept small.
        """
        starts = cu_seqlens(documents)
        room = max(256, documents.size // 32) if self.uniform_layout else 64
        padded = np.full(max(room, _power_of_two(len(starts))), documents.size, dtype=starts.dtype)
        padded[: len(starts)] = starts
        batch = {"cu_seqlens": torch.from_numpy(padded)}
        if self.uniform_layout or self.compiled:
            return batch  # max_seqlen is a constant to a recorded or compiled step: each new value would be a new step
        longest = _power_of_two(int(np.diff(starts).max()))
        return {**batch, "max_seqlen": torch.tensor(min(longest, documents.shape[1]))}

    # --- a rank's part of a batch

    def local(self, batch: Batch) -> Batch:
        """Return this rank's positions of each row. The documents stay whole: attention sees the keys of all ranks.

        In numpy, as in `with_scored_positions`.
        """
        part = self.part
        if part is None:
            return batch
        found = {**batch, "context": torch.tensor(part.split.ranks), "inputs": _columns(batch["inputs"], part)}
        return found | self._local_targets(batch, part) | self._local_tables(batch, part)

    def _local_targets(self, batch: Batch, part: Part) -> Batch:
        """Return the targets of this rank's positions, in the form that the batch has them."""
        if "scored_positions" not in batch:
            return {"targets": _columns(batch["targets"], part)}
        targets = batch["targets"].numpy()
        scored = np.flatnonzero(targets != IGNORE)
        mine, positions = part.scored(batch["scored_positions"].numpy()[scored])
        size = _round_to_quarters(len(mine), len(batch["inputs"]) * part.share)
        return _padded(targets[scored[mine]], positions, size)

    def _local_tables(self, batch: Batch, part: Part) -> Batch:
        """Return the tables of variable-length kernels for this rank's chunks."""
        if not self.attention.varlen or part.group.backend != "gather":
            return {}
        rows, documents = len(batch["inputs"]), batch.get("documents")
        whole = np.arange(rows + 1) * part.length
        starts = whole if documents is None else cu_seqlens(documents.numpy())
        tables = [varlen_tables(starts, rows, part.length, chunk) for chunk in part.chunks]
        size = max(64, _power_of_two(max(len(keys) for _, keys in tables)))
        found = {"max_seqlen": torch.tensor(min(_power_of_two(int(np.diff(starts).max())), part.length))}
        for number, (queries, keys) in enumerate(tables):
            padded = map(torch.from_numpy, pad_tables((queries, keys), size))
            found |= dict(zip((f"cu_queries_{number}", f"cu_keys_{number}"), padded, strict=True))
        return found

    def evaluated(self, batch: Batch, term: str) -> Tensor:
        """Return the sum of a loss term over a batch of whole rows, without a gradient.

        If rows are split over ranks, each rank computes its part; otherwise long rows might not fit into memory.
        """
        rows = {name: tensor.to(self.device) for name, tensor in self.local(batch).items()}
        total = self.loss(rows)[term].sum
        return total if self.context is None else self.context.all_reduce(total)

    # --- the loss

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float((batch["targets"] != IGNORE).sum())}

    def loss(self, batch: Batch) -> dict[str, Term]:
        positions = self.part.positions_T if self.part is not None and "context" in batch else None
        hidden = self.model(batch["inputs"], self._bind(batch), positions_T=positions).flatten(0, 1)
        if "scored_positions" in batch:
            hidden = hidden.index_select(0, batch["scored_positions"])
        total = self.cross_entropy(hidden, batch["targets"].flatten())
        return {"cross_entropy": Term(total, "tokens")}

    def cross_entropy(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        fused = self.recipe.model.kernels == "fused"
        return linear_cross_entropy(
            hidden_ND, self.model.head_weight, targets_N, softcap=self.model.softcap, fused=fused
        )

    def _bind(self, batch: Batch) -> Bound:
        longest = int(batch["max_seqlen"]) if "max_seqlen" in batch else None
        if self.part is not None and "context" in batch:
            return self._bind_part(self.attention, batch)
        return self.attention.bind(batch["inputs"].shape[1], batch.get("documents"), batch.get("cu_seqlens"), longest)

    def _bind_part(self, attention: Attention, batch: Batch) -> Bound:
        assert self.part is not None
        longest = int(batch["max_seqlen"]) if "cu_keys_0" in batch else 0
        count = len(self.part.chunks) if "cu_keys_0" in batch else 0
        tables = [(batch[f"cu_queries_{n}"], batch[f"cu_keys_{n}"], longest) for n in range(count)]
        return attention.bind_part(self.part, batch.get("documents"), tables)

    def uncompiled(self) -> AbstractContextManager[Any]:
        """Return a context in which compiled code runs eagerly: an evaluation is too short to compile a forward for it.

        The backends flex and split are fast only if compiled, so they stay compiled.
        """
        if not self.compiled or self.attention.backend in ("flex", "split"):
            return nullcontext()  # without importing torch.compiler, which takes seconds
        return torch.compiler.set_stance("force_eager")

    # --- state in checkpoints

    def state(self) -> dict[str, Any]:
        return {"attention": self.selection.backend} if self.selection else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.selection = Selection(state["attention"], CHOSEN_AT_START)


def with_scored_positions(batch: Batch) -> Batch:
    """Return the batch with only the targets that have a loss, and their positions: no other logits are computed.

    Their number is padded to a quarter of the batch, so that a compiler sees few shapes.
    """
    # In numpy: the loader may run in a forked process, where torch's thread pool does not exist and torch would hang.
    targets = batch["targets"].numpy().ravel()
    scored = np.flatnonzero(targets != IGNORE)
    size = _round_to_quarters(len(scored), len(targets))
    return batch if size >= len(targets) else {**batch, **_padded(targets[scored], scored, size)}


def _padded(targets: np.ndarray, positions: np.ndarray, size: int) -> Batch:
    """Return the targets and their positions in the flattened batch, padded with positions that are not scored."""
    kept, places = np.full(size, IGNORE, dtype=targets.dtype), np.zeros(size, dtype=np.int64)
    kept[: len(targets)], places[: len(targets)] = targets, positions
    return {"targets": torch.from_numpy(kept), "scored_positions": torch.from_numpy(places)}


def _columns(tensor_BT: Tensor, part: Part) -> Tensor:
    return torch.from_numpy(tensor_BT.numpy()[:, part.columns])


def _round_to_quarters(count: int, most: int) -> int:
    step = max(1, most // 4)
    return max(1, -(-count // step)) * step


def _power_of_two(least: int) -> int:
    """Return the next power of two, so that a compiled step sees few sizes."""
    return 1 << (least - 1).bit_length()


# ----------------------------------------------------------------------------------------------------
# Training in fp8: which matmuls use it, their scales, and what of these is saved.


_CALIBRATION_ROWS = 8  # sequences from which the first scales are computed


class Float8Objective(DecoderObjective):
    base_is_trained = True  # otherwise its weights are frozen, and no fp8 matmul computes their gradients

    def __init__(self, resolved: Resolved) -> None:
        super().__init__(resolved)
        self.float8: Float8Choice | None = None
        self.magnitudes: list[list[float]] | None = None  # largest values of the fp8 tensors, from a checkpoint

    def use_float8(self) -> None:
        """Switch matmuls of the built model to fp8 if the recipe asks for it.

        Which of them gain from fp8 is measured once in a run's life, like the attention backend.
        """
        if self.recipe.train.precision != "fp8":
            return
        if self.float8 is None:
            fused = self.recipe.model.kernels == "fused"
            self.float8 = choose(self.recipe.train.fp8, self.matmuls(), fused=fused, learns=self.base_is_trained)
        if in_blocks := [name for name in self.float8.linears if name in LINEARS]:
            self.model.use_float8(in_blocks, self.device)
        if self.model.scales is not None:
            self.model.scales.load(self.magnitudes)

    def matmuls(self) -> Shapes:
        """Return (tokens, input width, output width) of every matmul that could use fp8."""
        shape = self.resolved.shape
        tokens = self.resolved.batch.micro * self.read_length // (1 if self.context is None else self.context.size)
        return {
            "qkv": (tokens, shape.d_model, shape.d_qkv),
            "out": (tokens, shape.d_attention, shape.d_model),
            "up": (tokens, shape.d_model, shape.d_up),
            "down": (tokens, shape.d_ff, shape.d_model),
        }

    def warmup_batches(self, micro: int) -> list[tuple[int, Batch]]:
        # The first scales come from a pass in bf16. It runs on a few sequences: enough for the scales, and a whole
        # micro-batch in bf16 might not fit into memory.
        scales, found = self.model.scales, super().warmup_batches(micro)
        if scales is None or scales.known:
            return found
        return [(few := min(micro, _CALIBRATION_ROWS), self.worst_batch(few)), *found]

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        scales = self.model.scales
        before = None if scales is None else scales.state()
        try:
            yield
        finally:
            if scales is not None and before is not None:
                scales.load(before)

    def choices(self) -> list[tuple[str, Any, str]]:
        found = super().choices()
        if self.float8 is not None:
            found.append(("train.fp8", self.float8.text, self.float8.reason))
        return found

    def warnings(self) -> list[str]:
        found, choice = super().warnings(), self.float8
        if choice is not None and not choice.linears:
            return [*found, f"train.precision=fp8 is off, the run trains in bf16: {choice.reason}"]
        if choice is not None and choice.failed:
            which = ", ".join(choice.failed)
            return [*found, f"fp8 failed in the trial of {which}, which stays in bf16: {choice.reason}"]
        return found

    def state(self) -> dict[str, Any]:
        found = super().state()
        if self.float8 is not None:
            found |= {"fp8": [self.float8.backend, list(self.float8.linears)]}
            found |= {"fp8_magnitudes": self.model.scales.state() if self.model.scales else None}
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "fp8" in state:
            backend, linears = state["fp8"]
            self.float8 = Float8Choice(backend, tuple(linears), CHOSEN_AT_START)
            self.magnitudes = state["fp8_magnitudes"]
