"""What the trainer knows of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from redline.data.shards import TokenFile
from redline.planning.shapes import Adapter
from redline.recipe.schema import Lora

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Term:
    """A named part of the loss: coefficient · sum / (the step's total of `weight`)."""

    sum: Tensor
    weight: str
    coefficient: float = 1.0


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of one role; the optimizer maps roles to its rules."""

    role: str  # matrix, embedding, head, scalar
    parameters: dict[str, nn.Parameter]
    splits: dict[str, tuple[int, ...]]  # matrices stored merged along the rows


@dataclass(frozen=True)
class Sampling:
    """How to write."""

    count: int = 1
    tokens: int = 200
    seed: int = 0
    temperature: float = 0.8  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = 0.95


@dataclass(frozen=True)
class Sample:
    prompt: str
    text: str


@dataclass(frozen=True)
class Asked:
    """A question with the answer that it should get."""

    question: str  # as people read it
    prompt: list[int]  # as the model does
    reference: str


@dataclass(frozen=True)
class Answered:
    text: str
    ended: bool  # by itself, not by the limit
    looks: int = 0  # forwards it took, where that is not one a token


@dataclass(frozen=True)
class PublicForm:
    """A trained model as transformers knows it; each job's module has `export(recipe, tensors, …)` that makes it."""

    config: dict[str, Any]  # config.json
    generation: dict[str, Any]  # generation_config.json
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


@dataclass(frozen=True)
class OnBase:
    """What was learnt on a pretrained base, which it takes again to make a model: what `export` of such a job makes."""

    base: str  # as the recipe names it
    method: str  # in a word
    adapter: Adapter | None  # None: all of the base's weights learnt
    lora: Lora
    template: str | None  # of chats
    tensors: dict[str, Tensor]  # of the checkpoint


class Objective(ABC):
    """A job: builds its model, turns positions of the global batch into loss terms, evaluates, samples."""

    model: nn.Module  # what is trained
    can_answer: ClassVar[bool] = False  # it has `questions`, and an `answer` to each
    rereads: ClassVar[bool] = False  # for questions: it reads its rows anew, and tells of them then
    log: Callable[[str], None] = staticmethod(lambda _: None)  # messages for the user, besides events
    whole_rows: ClassVar[bool] = True  # every row is read to data.seq_len; else FLOPs must be averaged over the data
    skipped_steps = 0  # training steps whose data the run skips; it reads the data of as many more steps instead

    @abstractmethod
    def build(self, device: torch.device) -> None:
        """Make and initialise the model on the device."""

    @abstractmethod
    def param_groups(self) -> list[ParamGroup]: ...

    @abstractmethod
    def batch(self, samples: np.ndarray) -> Batch:
        """Rows for these global sample numbers, on the CPU; a pure function of (seed, sample)."""

    @abstractmethod
    def weights(self, batch: Batch) -> dict[str, float]:
        """What each loss term is divided by, known before the forward."""

    @abstractmethod
    def loss(self, batch: Batch) -> dict[str, Term]: ...

    def figures(self, loss: Tensor, weights: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Further figures of a step for the log, by name, from its loss and the totals of its `weights`."""
        return {}

    @abstractmethod
    def worst_batch(self, micro: int) -> Batch:
        """The largest batch that can come, for the warm-up."""

    @abstractmethod
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Metrics on the validation data; `loss` among them."""

    @abstractmethod
    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Continuations of a prompt; none when the tokenizer's files are not there."""

    def first_prompt(self) -> str:
        """Return a prompt from the held-out data: the beginning of a document, or a question; "" if there is none."""
        return ""

    def continuation(self, prompt: str, how: Sampling) -> list[Sample]:
        """The same with the prompt as it stands, whatever a question is usually wrapped in."""
        return self.sample(prompt, how)

    def narrow(self, count: int | None) -> None:
        """Evaluate, and ask, only what is held out as a question with its answer, and the first `count` of those."""
        return

    def questions(self) -> list[Asked]:
        """What is held out; `narrow` comes before it."""
        return []

    def answer(
        self, asked: Sequence[Asked], tokens: int, told: Callable[[int], None] = lambda _: None
    ) -> list[Answered]:
        """The likeliest answer to each, of at most `tokens`; `told` hears how many are answered."""
        assert not asked, "a job without questions has none to answer"
        return []

    def identity(self) -> dict[str, str]:
        """What else must be equal on resume: name → fingerprint."""
        return {}

    def token_files(self) -> Sequence[TokenFile]:
        """Files that batches are read from and whose digests are recorded: they are checked while the run trains."""
        return ()

    def save_tokenizer(self, folder: Path) -> None:
        """So that the run can read other text later."""
        return

    def compile(self) -> None:
        """Compile the hot parts of the model."""
        return

    @property
    def replayable(self) -> bool:
        """Whether every pass is the same kernels on the same shapes, with nothing random in them."""
        return False

    def batches_changed(self) -> bool:
        """Whether `batch` now gives others than it did: asked after each step, and true once for each change."""
        return False

    def warmup_batches(self, micro: int) -> list[tuple[int, Batch]]:
        """Return (rows, batch) pairs for the warm-up: the largest batch that can occur, and any other shape that must
        run once (to compile or allocate) before steps reach their normal speed."""
        return [(micro, self.worst_batch(micro))]

    def dry_run(self) -> AbstractContextManager[Any]:
        """Return a context for forward and backward passes that must leave no trace: on exit it restores all state that
        a pass changes besides gradients."""
        return nullcontext()

    def choices(self) -> list[tuple[str, Any, str]]:
        """What the job chose by measurement while it was built: key, value, reason."""
        return []

    def warnings(self) -> list[str]:
        """Return what the recipe asks for and this machine does not give, found while the model was built."""
        return []

    def state(self) -> dict[str, Any]:
        """What must survive a restart besides the weights."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Before `build`: take up what `state` kept."""
        return


# ----------------------------------------------------------------------------------------------------
# The jobs' torch halves, found by name.
