"""Special tokens behind a tokenizer's own: the marks of a record's parts, padding, and the mask of diffusion.

The mask is the last id of all, so that the ids which a model may write are those below it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from redline.data.tokenizer import LibraryTokenizer, Tokenizer, load_tokenizer
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.recipe.resolve import DataFacts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PLAN, EXECUTION, ANSWER, PAD, MASK = "<|plan|>", "<|execution|>", "<|answer|>", "<|pad|>", "<|mask|>"
SPECIALS = (PLAN, EXECUTION, ANSWER, PAD, MASK)


class WithSpecials(Tokenizer):
    """A tokenizer with more ids. No text encodes to them, not even one that holds their names."""

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str] = SPECIALS) -> None:
        if not names or names[-1] != MASK or len(set(names)) < len(names):
            raise ValueError(f"{names!r} are not different names with {MASK} as the last")
        if taken := [name for name in names if name in _vocabulary(tokenizer)]:
            what = f"its vocabulary has {', '.join(taken)} already, which redline adds for its own use."
            fix = "Name another one (data.tokenizer): gpt2, bytes, train:N or a tokenizer.json without them."
            raise UserError(what, where=tokenizer.name, fix=fix)
        self.base, self.names = tokenizer, tuple(names)
        self.name, self.eot = tokenizer.name, tokenizer.eot
        self.vocab_size = tokenizer.vocab_size + len(names)
        self.fingerprint = digest_of(["specials", tokenizer.fingerprint, tokenizer.vocab_size, self.names])

    def id(self, name: str) -> int:
        return self.base.vocab_size + self.names.index(name)

    @property
    def special_ids(self) -> range:
        return range(self.base.vocab_size, self.vocab_size)

    @property
    def plan(self) -> int:
        return self.id(PLAN)

    @property
    def execution(self) -> int:
        return self.id(EXECUTION)

    @property
    def answer(self) -> int:
        return self.id(ANSWER)

    @property
    def pad(self) -> int:
        return self.id(PAD)

    @property
    def mask(self) -> int:
        return self.vocab_size - 1

    @property
    def classes(self) -> int:
        """How many ids a model may write: all but the mask."""
        return self.mask

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.base.encode_batch(texts)

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        return self.base.encode_array(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with special tokens by their names."""
        own = self.base.vocab_size
        parts = []
        for special, run in groupby((int(i) for i in ids if i < self.vocab_size), key=lambda i: i >= own):
            some = list(run)
            parts.append("".join(self.names[i - own] for i in some) if special else self.base.decode(some))
        return "".join(parts)

    def save(self, path: Path) -> None:
        """The tokenizer without the special tokens, which `with_specials` adds again."""
        self.base.save(path)


def _vocabulary(tokenizer: Tokenizer) -> set[str]:
    """What its ids stand for; bytes stand for themselves."""
    if isinstance(tokenizer, WithSpecials):
        return {*tokenizer.names, *_vocabulary(tokenizer.base)}
    if not isinstance(tokenizer, LibraryTokenizer):
        return set()
    definition = json.loads(tokenizer.definition())
    vocab = definition["model"]["vocab"]  # of Unigram a list of pairs
    words = vocab if isinstance(vocab, dict) else [pair[0] for pair in vocab]
    return {*words, *(token["content"] for token in definition["added_tokens"])}


def with_specials(facts: DataFacts, folder: Path, names: Sequence[str] = SPECIALS) -> WithSpecials:
    """The tokenizer that a run was trained with: its `tokenizer.json` lies in `folder`, or its name says all.

    The facts name the tokenizer without the special tokens.
    """
    own = folder / "tokenizer.json"
    tokenizer = load_tokenizer(str(own) if own.is_file() else facts.tokenizer)
    if tokenizer.fingerprint != facts.tokenizer_fingerprint:
        what = "this is not the tokenizer that the run was trained with."
        raise UserError(what, where=str(own if own.is_file() else facts.tokenizer), fix="Copy the run's folder anew.")
    tokenizer.name = facts.tokenizer
    return WithSpecials(tokenizer, names)
