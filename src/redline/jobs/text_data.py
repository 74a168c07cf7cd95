"""Text as the data of a job: tokens in documents, read in windows of `data.seq_len`, with some of them held out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from redline.data.corpus import Corpus, facts_of, open_corpus
from redline.data.index import Index
from redline.data.packing import cu_seqlens, document_ids, inputs_and_targets
from redline.data.read_stats import ProgressCallback
from redline.data.stream import StreamSplit
from redline.data.tokenizer import Tokenizer
from redline.data.tokens import TokenData, TokenSplit, document_keys, first_tokens
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Recipe

PROMPT_CHARACTERS = 40  # of a held-out document, as the prompt of samples
_MEASURED_WINDOWS = 256  # from which the mean length of documents is estimated


@dataclass(frozen=True)
class TextData:
    tokens: TokenData
    held_out: TokenSplit | None  # what evaluation reads
    corpus: Corpus | None = None  # the order in which training reads; None when nothing is trained

    @property
    def facts(self) -> DataFacts:
        return self.corpus.facts if self.corpus is not None else facts_of(self.tokens)

    @property
    def messages(self) -> tuple[str, ...]:
        return self.tokens.omissions

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, for samples; None if its files are missing, since token files can be trained on without it."""
        try:
            return self.tokens.tokenizer()
        except UserError:
            return None

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        """Return one key per document to train on, or per held-out document; None if there are too many tokens."""
        split = self.tokens.train if trained else self.held_out
        return None if split is None or isinstance(split, StreamSplit) else document_keys(split)

    def held_out_sequences(self, seq_len: int) -> int:
        return 0 if self.held_out is None else -(-max(0, len(self.held_out) - 1) // seq_len)

    def first_prompt(self, seq_len: int) -> str:
        """Return the beginning of the first held-out document, a few words long."""
        split = self.held_out if self.held_out is not None and len(self.held_out) else self.tokens.train
        if self.tokenizer is None or not len(split):
            return ""
        text = self.tokenizer.decode(first_tokens(split, max(1, min(PROMPT_CHARACTERS, seq_len // 4))))
        # The last token may end in the middle of a character, which decodes to U+FFFD.
        line = next((line for line in text.rstrip("\ufffd").splitlines() if line.strip()), "")
        if len(line) <= PROMPT_CHARACTERS:
            return line.rstrip()
        return line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0].rstrip()


def load_text(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> TextData:
    """Open the recipe's tokens, and prepare them first if necessary.

    With `for_evaluation` nothing is trained, and all of the text is held out.
    """
    corpus = open_corpus(recipe.data, for_evaluation=for_evaluation, progress=progress)
    if for_evaluation:
        return TextData(corpus.tokens, _all_tokens(corpus.tokens), corpus)
    index = training_index(recipe, corpus)  # raises here, before a model is built, if the text is too short
    if recipe.data.pack and not recipe.data.stream:
        rows = {"document": _document_length(corpus.tokens, index, recipe.data.seq_len)}
        corpus = replace(corpus, facts=replace(corpus.facts, rows=rows))
    return TextData(corpus.tokens, corpus.tokens.val, corpus)


def training_index(recipe: Recipe, corpus: Corpus) -> Index:
    """Return the order in which training reads the corpus."""
    return corpus.index(recipe.data.seq_len, recipe.train.seed, shuffle=recipe.data.shuffle)


def _document_length(tokens: TokenData, index: Index, seq_len: int) -> float:
    """Return the mean length, within its window, of the document that a token is in, from windows spread over the data.

    A mean over tokens, not over documents: a document of length n counts n times.
    """
    windows = max(1, len(tokens.train) // seq_len)
    samples = np.arange(min(windows, _MEASURED_WINDOWS)) * windows // min(windows, _MEASURED_WINDOWS)
    inputs, _ = inputs_and_targets(tokens.train.windows(index.starts(samples), seq_len + 1))
    lengths = np.diff(cu_seqlens(document_ids(inputs, tokens.eot))).astype(np.int64)
    return float((lengths**2).sum() / inputs.size)


def _all_tokens(tokens: TokenData) -> TokenSplit:
    """Return one split of all tokens: a prepared folder that is evaluated may have a validation split of its own."""
    splits = [tokens.train] if tokens.val is None else [tokens.train, tokens.val]
    sizes = [split.bytes for split in splits]
    return TokenSplit(
        [piece for split in splits for piece in split.pieces],
        vocab_size=tokens.vocab_size,
        eot=tokens.eot,
        utf8_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        fingerprint=tokens.fingerprint,
    )


def random_text(facts: DataFacts) -> TextData:
    """Return data that can be built with but not read, for steps on random tokens that are only timed."""
    split = TokenSplit(
        [np.zeros(1, dtype=np.uint32)], vocab_size=facts.vocab_size, eot=0, utf8_bytes=None, fingerprint=""
    )
    tokens = TokenData(Path(), split, None, facts.tokenizer, "", facts.vocab_size, 0, "", ())
    return TextData(tokens, None)


def text_tokenizer(facts: DataFacts, folder: Path) -> TextData:
    """Return data of which only the tokenizer can be used; `folder`, a run's, may have a copy of it."""
    tokens = replace(random_text(facts).tokens, source=folder, tokenizer_fingerprint=facts.tokenizer_fingerprint)
    tokenizer = TextData(tokens, None).tokenizer
    return TextData(replace(tokens, eot=tokenizer.eot), None) if tokenizer else TextData(tokens, None)
