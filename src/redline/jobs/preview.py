"""Samples as a model will learn from them, for `--preview`: which tokens are learnt, and which are only read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Decodes(Protocol):
    @property
    def special_ids(self) -> Any: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class TokenRun:
    """Neighbouring tokens of one kind, as text."""

    text: str
    learnt: bool
    special: bool


@dataclass(frozen=True)
class SampleView:
    title: str
    runs: list[TokenRun]

    def plain(self) -> str:
        """Return the text with what is learnt in [[ ]]; special tokens are written by their names."""
        by_learnt = itertools.groupby(self.runs, key=lambda run: run.learnt)
        pieces = ((learnt, "".join(run.text for run in runs)) for learnt, runs in by_learnt)
        return "".join(f"[[{text}]]" if learnt else text for learnt, text in pieces)


@dataclass(frozen=True)
class SamplePreview:
    """The first samples of the training data, and lines about the data as a whole."""

    samples: Sequence[SampleView]
    lines: Sequence[str]


def token_runs(
    tokenizer: Decodes, tokens: npt.NDArray[np.integer], learnt: npt.NDArray[np.bool_]
) -> Iterator[TokenRun]:
    """Decode a sample, grouped by whether its tokens are learnt and whether they are special."""
    special = (token in tokenizer.special_ids for token in tokens.tolist())
    kinds = zip(learnt.tolist(), special, tokens.tolist(), strict=True)
    for (is_learnt, is_special), group in itertools.groupby(kinds, key=lambda kind: kind[:2]):
        yield TokenRun(tokenizer.decode([token for _, _, token in group]), is_learnt, is_special)
