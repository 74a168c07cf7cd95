"""causal_lm: predict the next token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.data.corpus import Corpus, facts_of, open_corpus
from redline.data.index import Index
from redline.data.packing import cu_seqlens, document_ids, inputs_and_targets
from redline.data.progress import ProgressCallback
from redline.data.tokenizer import LibraryTokenizer, Tokenizer
from redline.data.tokens import TokenData, TokenSplit
from redline.errors import UserError
from redline.kernels.attention import Attention, Bound, Selection, select
from redline.kernels.cross_entropy import IGNORE, linear_cross_entropy
from redline.kernels.cross_entropy8 import chunk_tokens, linear_cross_entropy8
from redline.kernels.float8_choice import Float8Choice, Shapes, choose
from redline.kernels.masks import MaskSpec
from redline.kernels.precision import DTYPES
from redline.kernels.softmax_loss import compile_loss
from redline.metrics.likelihood import bits_per_byte, perplexity
from redline.models.float8 import LINEARS
from redline.models.generate import generate
from redline.models.llama import inexact, shape_of, to_config, to_generation, to_llama
from redline.models.transformer import Decoder
from redline.objectives.base import Batch, Objective, ParamGroup, PublicForm, Sample, Sampling, Term
from redline.objectives.roles import role_groups
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Recipe

_LOOKED_AT = 8  # sequences


@dataclass(frozen=True)
class CausalData:
    tokens: TokenData
    held_out: TokenSplit | None  # what evaluation reads
    corpus: Corpus | None = None  # and in which order training reads; None when nothing is trained

    @property
    def facts(self) -> DataFacts:
        return self.corpus.facts if self.corpus is not None else facts_of(self.tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """For samples; token files can be trained on without it."""
        try:
            return self.tokens.tokenizer()
        except UserError:
            return None


def load_data(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> CausalData:
    """The recipe's tokens, prepared when they must be; all of them are held out when nothing is trained."""
    corpus = open_corpus(recipe.data, for_evaluation=for_evaluation, progress=progress)
    if for_evaluation:
        return CausalData(corpus.tokens, _everything(corpus.tokens), corpus)
    _index(recipe, corpus)  # too short to train on is said before anything is built
    return CausalData(corpus.tokens, corpus.tokens.val, corpus)


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


def tokenizer_alone(facts: DataFacts, folder: Path) -> CausalData:
    """For a model that only writes, wherever its data may be: `folder` can hold the tokenizer."""
    made_with = replace(random_data(facts).tokens, source=folder, tokenizer_fingerprint=facts.tokenizer_fingerprint)
    tokenizer = CausalData(made_with, None).tokenizer
    return CausalData(replace(made_with, eot=tokenizer.eot), None) if tokenizer else CausalData(made_with, None)


def _index(recipe: Recipe, corpus: Corpus) -> Index:
    return corpus.index(recipe.data.seq_len, recipe.train.seed, shuffle=recipe.data.shuffle)


class CausalLM(Objective):
    model: Decoder

    def __init__(self, resolved: Resolved, data: CausalData) -> None:
        self.resolved, self.recipe, self.data = resolved, resolved.recipe, data
        self.selection: Selection | None = None
        self.float8: Float8Choice | None = None
        self.magnitudes: list[list[float]] | None = None  # of the fp8 tensors, from a checkpoint
        self.seq_len = self.recipe.data.seq_len
        self.mask = MaskSpec(causal=True, documents=self.recipe.data.pack)
        self.dtype = DTYPES[self.recipe.train.precision]

    @cached_property
    def index(self) -> Index:
        """Made when training asks for it: a text that is only evaluated may be shorter than a sequence."""
        assert self.data.corpus is not None
        return _index(self.recipe, self.data.corpus)

    # --- building

    def build(self, device: torch.device) -> None:
        self.device = device
        options, shape = self.recipe.model, self.resolved.shape
        if options.kernels == "fused" and device.type == "cuda" and find_spec("triton") is None:
            fix = "Install triton, or use model.kernels=torch."
            raise UserError("fused kernels need the package triton.", where="model.kernels", fix=fix)
        self.selection = self.selection or self._select_attention()
        self.attention = Attention(self.selection.backend, self.mask, device.type)
        self.model = Decoder(
            shape,
            attention=self.attention,
            rope_theta=options.rope_theta,
            eps=options.norm_eps,
            dropout=options.dropout,
            softcap=options.softcap,
            dtype=self.dtype,
            checkpointing=self.recipe.train.grad_checkpointing,
            kernels=options.kernels,
        ).to(device)
        if self.recipe.train.precision == "fp8":
            self._use_float8()
        seed = torch.Generator().manual_seed(self.recipe.train.seed)
        self.model.initialise(seed, options.init, options.embedding_std)

    def _select_attention(self) -> Selection:
        """Measured once in a run's life: a resumed run computes with what it began with."""
        asked, train, shape = self.recipe.model.attention, self.recipe.train, self.resolved.shape
        if train.deterministic and asked == "auto":
            return Selection("flash", "its backward can be deterministic")
        at = (self.resolved.batch.micro, shape.heads, self.seq_len, shape.head_dim)
        return select(asked, self.mask, device=self.device.type, dtype=self.dtype, shape=at)

    def _use_float8(self) -> None:
        """Which matmuls is measured once in a run's life, too."""
        if self.float8 is None:
            fused = self.recipe.model.kernels == "fused"
            self.float8 = choose(self.recipe.train.fp8, self._matmuls(), fused=fused)
        if in_blocks := [name for name in self.float8.linears if name in LINEARS]:
            self.model.use_float8(in_blocks, self.device)
        if self.model.scales is not None:
            self.model.scales.load(self.magnitudes)

    def _matmuls(self) -> Shapes:
        """Tokens and widths of everything that fp8 may serve; torchao's is for blocks alone."""
        shape, tokens = self.resolved.shape, self.resolved.batch.micro * self.seq_len
        found = {
            "qkv": (tokens, shape.d_model, shape.d_qkv),
            "out": (tokens, shape.d_attention, shape.d_model),
            "up": (tokens, shape.d_model, shape.d_up),
            "down": (tokens, shape.d_ff, shape.d_model),
        }
        if self.recipe.model.kernels == "fused":
            found["head"] = (chunk_tokens(shape.vocab, tokens), shape.d_model, shape.vocab)
        return found

    @property
    def replayable(self) -> bool:
        """flex makes its mask anew for each batch, and looks at it."""
        return self.recipe.model.dropout == 0 and self.attention.backend != "flex"

    def first_looks(self, micro: int) -> list[int]:
        """fp8 looks at its tensors in bf16 before it first scales them; a few sequences show enough, and fit."""
        scales = self.model.scales
        return [] if scales is None or scales.known else [min(micro, _LOOKED_AT)]

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        scales = self.model.scales
        before = None if scales is None else scales.state()
        try:
            yield
        finally:
            if scales is not None and before is not None:
                scales.load(before)

    def choices(self) -> list[tuple[str, Any, str]]:
        assert self.selection is not None
        found = [("model.attention", self.selection.backend, self.selection.reason)]
        if self.float8 is not None:
            found.append(("train.fp8", self.float8.text, self.float8.reason))
        return found

    def param_groups(self) -> list[ParamGroup]:
        return role_groups(self.model)

    def compile(self) -> None:
        if self.device.type == "cuda" and self.recipe.model.kernels != "fused":
            compile_loss()  # on a CPU the in-place version is as fast
        self.model.compile_blocks()

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
        batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self.mask.documents:
            documents = document_ids(inputs, self.data.tokens.eot)
            batch["documents"] = torch.from_numpy(documents)
            if self.attention.varlen:
                batch["borders"] = torch.from_numpy(_padded(cu_seqlens(documents), inputs.size))
        return batch

    def worst_batch(self, micro: int) -> Batch:
        shape = (micro, self.seq_len + 1)
        rows = np.random.default_rng(0).integers(0, self.data.tokens.vocab_size, shape, dtype=np.int64)
        return self._batch(*inputs_and_targets(rows))

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float((batch["targets"] != IGNORE).sum())}

    def loss(self, batch: Batch) -> dict[str, Term]:
        hidden = self.model(batch["inputs"], self._bind(batch))
        operands = hidden.flatten(0, 1), self.model.head_weight, batch["targets"].flatten()
        softcap, fused = self.model.softcap, self.recipe.model.kernels == "fused"
        if self.float8 is not None and "head" in self.float8.linears and torch.is_grad_enabled():
            total = linear_cross_entropy8(*operands, softcap=softcap)
        else:
            total = linear_cross_entropy(*operands, softcap=softcap, fused=fused)
        return {"cross_entropy": Term(total, "tokens")}

    def _bind(self, batch: Batch) -> Bound:
        return self.attention.bind(batch["inputs"].shape[1], batch.get("documents"), batch.get("borders"))

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
        with self._uncompiled():
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

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Evaluation is too short to compile a forward of its own for — except flex, which needs it."""
        if self.attention.backend == "flex":
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

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

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"attention": self.selection.backend} if self.selection else {}
        if self.float8 is not None:
            found |= {"fp8": [self.float8.backend, list(self.float8.linears)]}
            found |= {"fp8_magnitudes": self.model.scales.state() if self.model.scales else None}
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        begun = "as chosen when the run began"
        self.selection = Selection(state["attention"], begun)
        if "fp8" in state:
            backend, linears = state["fp8"]
            self.float8, self.magnitudes = Float8Choice(backend, tuple(linears), begun), state["fp8_magnitudes"]


create = CausalLM


def export(recipe: Recipe, tensors: dict[str, Tensor], *, eot: int, vocab_size: int, dtype: str) -> PublicForm:
    """What was trained by this (resolved) recipe, in transformers' form. Needs neither data nor a device."""
    model = recipe.model
    if problems := inexact(model):
        raise UserError(" ".join(problem.line() for problem in problems))
    kind = DTYPES[dtype]
    config = to_config(model, seq_len=recipe.data.seq_len, eot=eot, dtype=str(kind).removeprefix("torch."))
    renamed = to_llama(tensors, shape_of(model))
    generation = to_generation(model, eot=eot, vocab_size=vocab_size)
    return PublicForm(config, generation, {name: tensor.to(kind) for name, tensor in renamed.items()})


def _padded(borders: np.ndarray, total: int) -> np.ndarray:
    """Empty documents at the end, so that the compiled step meets few lengths."""
    room = max(256, total // 32)
    size = -(-len(borders) // room) * room
    return np.concatenate([borders, np.full(size - len(borders), total, dtype=borders.dtype)])
