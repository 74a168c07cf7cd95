"""The half of a job that needs torch: its data, its model, its loss, and what can be asked of the trained model.

`JobRuntime` opens data and makes an `Objective`; the trainer and the commands that use a trained model know only the
`Objective`. The torch-free half of a job is `Job` in `jobs/base.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from redline.data.rows import ProgressCallback
from redline.data.shards import TokenFile
from redline.jobs.base import job, load_attribute
from redline.jobs.preview import SamplePreview
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

    log: Log = staticmethod(ignore_message)  # for messages that are not events
    skipped_steps = 0  # training steps whose data the run skips: it reads the data of as many further steps instead

    # --- building

    @abstractmethod
    def build(self, device: torch.device) -> None:
        """Make and initialise the model on the device."""

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

    @abstractmethod
    def weights(self, batch: Batch) -> dict[str, float]:
        """Return what the loss terms are divided by. It is known before the forward pass."""

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

    def save_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer into the run's directory, so that the run can read other text later."""
        return

    # --- evaluation and sampling

    @abstractmethod
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Return metrics on the validation data, `loss` among them."""

    @abstractmethod
    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Continue or answer a prompt. Return no samples if the tokenizer's files are missing."""

    def continuation(self, prompt: str, how: Sampling) -> list[Sample]:
        """Continue the prompt as it is, without the template that questions are usually wrapped in."""
        return self.sample(prompt, how)

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
    ) -> TransformersModel | FinetunedModel:
        """Return what the resolved recipe trained, for `redline export`. It needs neither data nor a device.

        `eot` returns the id of the end-of-text token, or raises a UserError if the tokenizer's files are missing.
        """
        raise NotImplementedError(f"`exports` of the job {recipe.objective} promises this method")


def job_runtime(name: str) -> JobRuntime[Any]:
    """Return the torch half of the job of this name."""
    runtime: JobRuntime[Any] = load_attribute(job(name).runtime)()
    return runtime
