"""causal_lm: predict the next token, from random weights or from a pretrained base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from redline.data.corpus import TextData, training_index
from redline.data.loader import Index, document_ids, inputs_and_targets
from redline.data.sources import ProgressCallback
from redline.data.tokenizer import LibraryTokenizer, Tokenizer
from redline.data.tokens import TokenFile, TokenSplit
from redline.errors import UserError
from redline.hardware.device import sum_dtype
from redline.jobs.base import export_problems
from redline.jobs.objective import (
    Batch,
    FinetunedModel,
    Sample,
    Sampling,
    TransformersModel,
    bits_per_byte,
    perplexity,
)
from redline.jobs.pretrained import (
    BaseText,
    PretrainedObjective,
    PretrainedRuntime,
    base_text_tokenizer,
    load_base_text,
    random_base_text,
    trained_on_base,
)
from redline.jobs.streaming import TEXT, Ask, Event, Panel, Section
from redline.jobs.token_stream import stream_tokens
from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.cross_entropy import IGNORE, chunk_tokens, linear_cross_entropy8
from redline.kernels.float8_choice import Shapes
from redline.kernels.matmul import DTYPES
from redline.models.decoder import Decoder
from redline.models.families import shape_of, to_config, to_generation, to_llama
from redline.models.generate import generate
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Model, Recipe


class CausalLM(PretrainedObjective):
    data: TextData

    def __init__(self, resolved: Resolved, data: TextData) -> None:
        super().__init__(resolved, data.base if isinstance(data, BaseText) else None)
        self.data = data

    def identity(self) -> dict[str, str]:
        return super().identity() | (self.data.identity() if isinstance(self.data, BaseText) else {})

    @cached_property
    def index(self) -> Index:
        """The order in which training reads. It is made on first use, since a text that is only evaluated may be
        shorter than a sequence, of which no index can be made."""
        assert self.data.corpus is not None
        return training_index(self.recipe, self.data.corpus)

    # --- building

    def matmuls(self) -> Shapes:
        """Add the head, which only the fused kernels can compute in fp8: torchao serves linears of the blocks."""
        if self.recipe.model.kernels != "fused" or not self.base_is_trained:
            return super().matmuls()
        shape, (tokens, *_) = self.resolved.shape, super().matmuls()["qkv"]
        return {**super().matmuls(), "head": (chunk_tokens(shape.vocab, tokens), shape.d_model, shape.vocab)}

    def token_files(self) -> Sequence[TokenFile]:
        return self.data.tokens.stored()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.data.tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        if isinstance(self.tokenizer, LibraryTokenizer):
            self.tokenizer.save(folder / "tokenizer.json")

    # --- training

    def batch(self, samples: np.ndarray) -> Batch:
        return self._rows(self.data.tokens.train, self.index.starts(samples))

    def _rows(self, split: TokenSplit, starts: np.ndarray) -> Batch:
        inputs, targets = inputs_and_targets(split.windows(starts, self.seq_len + 1))
        return self._batch(inputs, targets)

    def _batch(self, inputs: np.ndarray, targets: np.ndarray) -> Batch:
        documents = document_ids(inputs, self.data.tokens.eot) if self.mask.documents else None
        return self.laid_out(inputs, targets, documents)

    def worst_batch(self, micro: int) -> Batch:
        shape = (micro, self.seq_len + 1)
        rows = np.random.default_rng(0).integers(0, self.data.tokens.vocab_size, shape, dtype=np.int64)
        return self._batch(*inputs_and_targets(rows))

    def cross_entropy(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        if self.float8 is not None and "head" in self.float8.linears and torch.is_grad_enabled():
            return linear_cross_entropy8(hidden_ND, self.model.head_weight, targets_N, softcap=self.model.softcap)
        return super().cross_entropy(hidden_ND, targets_N)

    # --- evaluation and sampling

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Score every held-out token once, given the tokens before it in its window of `seq_len`; at most
        `eval.sequences` windows. The very first token, an end-of-text mark, has nothing before it and is not scored."""
        split = self.data.held_out
        if split is None or len(split) < 2:
            return {"loss": None, "perplexity": None, "bits_per_byte": None}
        scored = len(split) - 1
        count = min(-(-scored // self.seq_len), self.recipe.eval.sequences)
        total, tokens = torch.zeros((), dtype=sum_dtype(self.device), device=self.device), 0.0
        self.model.eval()
        with self.uncompiled():
            for first in range(0, count, micro):
                batch = self._windows(split, first, min(first + micro, count))
                tokens += self.weights(batch)["tokens"]
                total += self.evaluated(batch, "cross_entropy")
        self.model.train()
        loss = total.item() / tokens
        per_byte = None if split.bytes is None else bits_per_byte(loss, scored, split.bytes)
        return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": per_byte}

    def _windows(self, split: TokenSplit, first: int, last: int) -> Batch:
        """Return consecutive windows. The last of the split is padded with positions that are not scored, so that all
        batches have one shape."""
        begin, end = first * self.seq_len, min(last * self.seq_len + 1, len(split))
        tokens = split.read(begin, end - begin)
        inputs = np.full((last - first, self.seq_len), self.data.tokens.eot, dtype=np.int64)
        targets = np.full_like(inputs, IGNORE)
        inputs.flat[: len(tokens) - 1], targets.flat[: len(tokens) - 1] = tokens[:-1], tokens[1:]
        return self._batch(inputs, targets)

    def first_prompt(self) -> str:
        return self.data.first_prompt(self.seq_len)

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        tokenizer = self.data.tokenizer
        if tokenizer is None:
            return []
        start = [self.data.tokens.eot, *tokenizer.encode(prompt)]
        self.model.eval()
        rows = generate(
            self.model,
            start,
            stop=self.data.tokens.eot,
            vocab=self.data.tokens.vocab_size,
            **vars(how),
        )
        self.model.train()
        return [Sample(prompt, tokenizer.decode(row)) for row in rows]

    def panels(self) -> list[Panel]:
        return [] if self.tokenizer is None else [Panel("complete", "Complete", TEXT, "A text to continue")]

    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        tokenizer = self.data.tokenizer
        assert tokenizer is not None
        return stream_tokens(
            self.model,
            [self.data.tokens.eot, *tokenizer.encode(ask.text)],
            how,
            section=Section("text"),
            vocab=self.data.tokens.vocab_size,
            stop={self.data.tokens.eot},
            text_of=tokenizer.decode,
            alternatives=ask.alternatives,
            continues=bool(ask.text),
        )


class CausalLMRuntime(PretrainedRuntime[BaseText]):
    def load_data(
        self, recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
    ) -> BaseText:
        return load_base_text(recipe, for_evaluation=for_evaluation, progress=progress)

    def random_data(self, facts: DataFacts) -> BaseText:
        return random_base_text(facts)

    def tokenizer_alone(self, facts: DataFacts, folder: Path, recipe: Recipe) -> BaseText:
        return base_text_tokenizer(facts, folder, recipe)

    def create(self, resolved: Resolved, data: BaseText) -> CausalLM:
        return CausalLM(resolved, data)

    def export(
        self, recipe: Recipe, tensors: dict[str, Tensor], *, eot: Callable[[], int], vocab_size: int, dtype: str
    ) -> TransformersModel | FinetunedModel:
        if recipe.model.base is not None:
            return trained_on_base(recipe, tensors, learn="all", template=None)
        model, end = recipe.model, eot()
        if problems := export_problems(model):
            raise UserError(" ".join(problem.line() for problem in problems))
        _check_tensors(tensors, model)
        kind = DTYPES[dtype]
        config = to_config(model, seq_len=recipe.data.seq_len, eot=end, dtype=str(kind).removeprefix("torch."))
        renamed = to_llama(tensors, shape_of(model))
        generation = to_generation(model, eot=end, vocab_size=vocab_size)
        return TransformersModel(config, generation, {name: tensor.to(kind) for name, tensor in renamed.items()})


def _check_tensors(tensors: dict[str, Tensor], model: Model) -> None:
    """Raise a UserError if the tensors are not those of the model.

    A checkpoint from elsewhere may hold anything, with digests that agree.
    """
    with torch.device("meta"):
        expected = Decoder(shape_of(model), attention=Attention("dense", MaskSpec(), "cpu"))
    for name, parameter in expected.named_parameters():
        found = tensors.get(name)
        if found is None or found.shape != parameter.shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            fix = "Use another checkpoint: RUN@STEP."
            raise UserError(f"{name} {what}; the recipe's has {list(parameter.shape)}.", fix=fix)
