"""causal_lm: predict the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from redline.data.corpus import Corpus, facts_of, open_corpus
from redline.data.index import Index
from redline.data.packing import cu_seqlens, document_ids, inputs_and_targets
from redline.data.read_stats import ProgressCallback
from redline.data.shards import TokenFile
from redline.data.stream import StreamSplit
from redline.data.tokenizer import LibraryTokenizer, Tokenizer
from redline.data.tokens import TokenData, TokenSplit, document_keys, first_tokens
from redline.errors import UserError
from redline.jobs.decoder_objective import InFloat8
from redline.jobs.objective import Batch, PublicForm, Sample, Sampling
from redline.kernels.attention import Attention
from redline.kernels.cross_entropy import IGNORE, chunk_tokens, linear_cross_entropy8
from redline.kernels.float8_choice import Shapes
from redline.kernels.masks import MaskSpec
from redline.kernels.matmul import DTYPES
from redline.metrics import bits_per_byte, perplexity
from redline.models.decoder import Decoder
from redline.models.families import inexact, shape_of, to_config, to_generation, to_llama
from redline.models.generate import generate
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Model, Recipe

PROMPT_CHARACTERS = 40  # of a document, as a prompt for samples
_MEASURED = 256  # windows that show how long documents are


@dataclass(frozen=True)
class CausalData:
    tokens: TokenData
    held_out: TokenSplit | None  # what evaluation reads
    corpus: Corpus | None = None  # and in which order training reads; None when nothing is trained

    @property
    def facts(self) -> DataFacts:
        return self.corpus.facts if self.corpus is not None else facts_of(self.tokens)

    @property
    def told(self) -> tuple[str, ...]:
        """What became of its rows."""
        return self.tokens.left_out

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """For samples; token files can be trained on without it."""
        try:
            return self.tokens.tokenizer()
        except UserError:
            return None

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        """One key per document to train on, or per document that is evaluated; None if there are too many tokens."""
        split = self.tokens.train if trained else self.held_out
        return None if split is None or isinstance(split, StreamSplit) else document_keys(split)

    def sequences(self, seq_len: int) -> int:
        """How many sequences are evaluated."""
        return 0 if self.held_out is None else -(-max(0, len(self.held_out) - 1) // seq_len)

    def first_prompt(self, seq_len: int) -> str:
        """The beginning of the first held-out document, a few words long."""
        split = self.held_out if self.held_out is not None and len(self.held_out) else self.tokens.train
        if self.tokenizer is None or not len(split):
            return ""
        text = self.tokenizer.decode(first_tokens(split, max(1, min(PROMPT_CHARACTERS, seq_len // 4))))
        line = next((line for line in text.rstrip("\ufffd").splitlines() if line.strip()), "")
        if len(line) <= PROMPT_CHARACTERS:
            return line.rstrip()
        return line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0].rstrip()


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """What the recipe leaves to a pretrained base: nothing here."""
    return recipe


def load_data(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> CausalData:
    """The recipe's tokens, prepared when they must be; all of them are held out when nothing is trained."""
    corpus = open_corpus(recipe.data, for_evaluation=for_evaluation, progress=progress)
    if for_evaluation:
        return CausalData(corpus.tokens, _everything(corpus.tokens), corpus)
    index = _index(recipe, corpus)  # too short to train on is said before anything is built
    if recipe.data.pack and not recipe.data.stream:
        rows = {"document": _document_length(corpus.tokens, index, recipe.data.seq_len)}
        corpus = replace(corpus, facts=replace(corpus.facts, rows=rows))
    return CausalData(corpus.tokens, corpus.tokens.val, corpus)


def _document_length(tokens: TokenData, index: Index, seq_len: int) -> float:
    """The mean length, within its window, of the document that a token stands in; of windows spread over the data."""
    windows = max(1, len(tokens.train) // seq_len)
    samples = np.arange(min(windows, _MEASURED)) * windows // min(windows, _MEASURED)
    inputs, _ = inputs_and_targets(tokens.train.windows(index.starts(samples), seq_len + 1))
    lengths = np.diff(cu_seqlens(document_ids(inputs, tokens.eot))).astype(np.int64)
    return float((lengths**2).sum() / inputs.size)


def _everything(tokens: TokenData) -> TokenSplit:
    """All that there is to evaluate: a folder may have been prepared with a validation split."""
    splits = [tokens.train] if tokens.val is None else [tokens.train, tokens.val]
    sizes = [split.bytes for split in splits]
    return TokenSplit(
        [piece for split in splits for piece in split.pieces],
        vocab_size=tokens.vocab_size,
        eot=tokens.eot,
        utf8_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        fingerprint=tokens.fingerprint,
    )


def random_data(facts: DataFacts) -> CausalData:
    """As if such data were there: for steps that are only timed."""
    split = TokenSplit(
        [np.zeros(1, dtype=np.uint32)], vocab_size=facts.vocab_size, eot=0, utf8_bytes=None, fingerprint=""
    )
    tokens = TokenData(Path(), split, None, facts.tokenizer, "", facts.vocab_size, 0, "", ())
    return CausalData(tokens, None)


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> CausalData:
    """For a model that only writes, wherever its data may be: `folder` can hold the tokenizer."""
    made_with = replace(random_data(facts).tokens, source=folder, tokenizer_fingerprint=facts.tokenizer_fingerprint)
    tokenizer = CausalData(made_with, None).tokenizer
    return CausalData(replace(made_with, eot=tokenizer.eot), None) if tokenizer else CausalData(made_with, None)


def _index(recipe: Recipe, corpus: Corpus) -> Index:
    return corpus.index(recipe.data.seq_len, recipe.train.seed, shuffle=recipe.data.shuffle)


class CausalLM(InFloat8):
    def __init__(self, resolved: Resolved, data: CausalData) -> None:
        super().__init__(resolved)
        self.data = data

    @cached_property
    def index(self) -> Index:
        """Made when training asks for it: a text that is only evaluated may be shorter than a sequence."""
        assert self.data.corpus is not None
        return _index(self.recipe, self.data.corpus)

    # --- building

    def build(self, device: torch.device) -> None:
        self.device = device
        self.model = self.decoder().to(device)
        self.use_float8()
        seed, options = torch.Generator().manual_seed(self.recipe.train.seed), self.recipe.model
        self.model.initialise(seed, options.init, options.embedding_std)

    def matmuls(self) -> Shapes:
        """torchao's is for blocks alone."""
        if self.recipe.model.kernels != "fused":
            return super().matmuls()
        shape, tokens = self.resolved.shape, self.resolved.batch.micro * self.seq_len
        return {**super().matmuls(), "head": (chunk_tokens(shape.vocab, tokens), shape.d_model, shape.vocab)}

    def token_files(self) -> Sequence[TokenFile]:
        return self.data.tokens.stored()

    def save_tokenizer(self, folder: Path) -> None:
        if isinstance(self.data.tokenizer, LibraryTokenizer):
            self.data.tokenizer.save(folder / "tokenizer.json")

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

    # --- looking

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Every token is scored once, from what lies before it in its window of `seq_len`, unless
        `eval.sequences` ends it earlier. The first has nothing before it: it is the mark before a document."""
        split = self.data.held_out
        if split is None or len(split) < 2:
            return {"loss": None, "perplexity": None, "bits_per_byte": None}
        scored = len(split) - 1
        count = min(-(-scored // self.seq_len), self.recipe.eval.sequences)
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        self.model.eval()
        with self.uncompiled():
            for first in range(0, count, micro):
                batch = self._windows(split, first, min(first + micro, count))
                tokens += self.weights(batch)["tokens"]
                total += self.loss({k: v.to(self.device) for k, v in batch.items()})["cross_entropy"].sum
        self.model.train()
        loss = total.item() / tokens
        per_byte = None if split.bytes is None else bits_per_byte(loss, scored, split.bytes)
        return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": per_byte}

    def _windows(self, split: TokenSplit, first: int, last: int) -> Batch:
        """Consecutive windows; the split's last is filled up with what is not scored, so that all have one shape."""
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


create = CausalLM


def can_answer(recipe: Recipe) -> bool:
    """It continues texts."""
    return False


def export(recipe: Recipe, tensors: dict[str, Tensor], *, eot: int, vocab_size: int, dtype: str) -> PublicForm:
    """What was trained by this (resolved) recipe, in transformers' form. Needs neither data nor a device."""
    model = recipe.model
    if problems := inexact(model):
        raise UserError(" ".join(problem.line() for problem in problems))
    _refuse_others(tensors, model)
    kind = DTYPES[dtype]
    config = to_config(model, seq_len=recipe.data.seq_len, eot=eot, dtype=str(kind).removeprefix("torch."))
    renamed = to_llama(tensors, shape_of(model))
    generation = to_generation(model, eot=eot, vocab_size=vocab_size)
    return PublicForm(config, generation, {name: tensor.to(kind) for name, tensor in renamed.items()})


def _refuse_others(tensors: dict[str, Tensor], model: Model) -> None:
    """A checkpoint of somebody's may hold anything under the right digests."""
    with torch.device("meta"):
        expected = Decoder(shape_of(model), attention=Attention("dense", MaskSpec(), "cpu"))
    for name, parameter in expected.named_parameters():
        found = tensors.get(name)
        if found is None or found.shape != parameter.shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            fix = "Take another checkpoint: RUN@STEP."
            raise UserError(f"{name} {what}; the recipe's has {list(parameter.shape)}.", fix=fix)
