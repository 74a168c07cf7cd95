"""Training samples for `--preview`: which tokens are in the loss, and which the model only reads."""

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
    in_loss: bool
    special: bool


@dataclass(frozen=True)
class SampleView:
    title: str
    runs: list[TokenRun]

    def plain(self) -> str:
        """Return the text with the tokens in the loss in [[ ]]; special tokens are written by their names."""
        by_loss = itertools.groupby(self.runs, key=lambda run: run.in_loss)
        pieces = ((in_loss, "".join(run.text for run in runs)) for in_loss, runs in by_loss)
        return "".join(f"[[{text}]]" if in_loss else text for in_loss, text in pieces)


@dataclass(frozen=True)
class SamplePreview:
    """The first samples of the training data, and lines about the data as a whole."""

    samples: Sequence[SampleView]
    lines: Sequence[str]


def token_runs(
    tokenizer: Decodes, tokens: npt.NDArray[np.integer], loss_mask: npt.NDArray[np.bool_]
) -> Iterator[TokenRun]:
    """Decode a sample, grouped by whether its tokens are in the loss and whether they are special."""
    special = (token in tokenizer.special_ids for token in tokens.tolist())
    kinds = zip(loss_mask.tolist(), special, tokens.tolist(), strict=True)
    for (in_loss, is_special), group in itertools.groupby(kinds, key=lambda kind: kind[:2]):
        yield TokenRun(tokenizer.decode([token for _, _, token in group]), in_loss, is_special)
