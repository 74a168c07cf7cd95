"""A look at samples as a model will learn them: what is learnt, what is only read, and where samples meet."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.data.chat_template import ChatTokenizer
from redline.jobs.diffusion.data import PAD, RecordData, SpecialTokenizer
from redline.jobs.finetune.data import AnswerData, Bools, Int32s, Int64s

if TYPE_CHECKING:
    from rich.console import Console

_MOST_TOKENS = 2000
_PADDING = re.compile(f"(?:{re.escape(PAD)}){{2,}}")
_LEARNT, _READ, _SPECIAL, _SPECIAL_LEARNT = "bold green", "dim", "magenta", "bold black on green"


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one kind."""

    text: str
    learnt: bool
    special: bool


@dataclass(frozen=True)
class SampleView:
    sequence: int
    place: int  # in its sequence, from 1
    neighbours: int  # samples in the sequence, this one too
    tokens: int
    learnt: int
    runs: list[Run]
    whole: bool  # all of the sample is shown

    @property
    def title(self) -> str:
        shown = "" if self.whole else ", the beginning"
        where = f"sequence {self.sequence}, sample {self.place} of {self.neighbours}"
        return f"{where}: {self.tokens:,} tokens, {self.learnt:,} learnt{shown}"

    def plain(self) -> str:
        """What is learnt stands in [[ ]]; special tokens are written by their names."""
        joined = itertools.groupby(self.runs, key=lambda run: run.learnt)
        pieces = ((learnt, "".join(run.text for run in runs)) for learnt, runs in joined)
        return "".join(f"[[{text}]]" if learnt else text for learnt, text in pieces)

    def as_dict(self) -> dict[str, Any]:
        runs = [{"text": run.text, "learnt": run.learnt, "special": run.special} for run in self.runs]
        return {"sequence": self.sequence, "place": self.place, "tokens": self.tokens, "runs": runs}


def preview_answers(data: AnswerData, count: int, *, most: int = _MOST_TOKENS) -> list[SampleView]:
    """The first `count` samples in the order of training."""
    return list(itertools.islice(_views(data, most), count))


def preview_records(data: RecordData, count: int) -> list[SampleView]:
    """The first `count` records in the order of training; runs of padding are shortened."""
    views = []
    for number in range(min(count, len(data.index))):
        sequence = data.index.sequences(np.array([number]))
        tokens, learnt = (data.train.rows(sequence)[name][0] for name in ("tokens", "loss_mask"))
        runs = [replace(run, text=_short(run.text)) for run in _runs(data.tokenizer, tokens, learnt)]
        views.append(SampleView(int(sequence[0]), 1, 1, len(tokens), int(learnt.sum()), runs, whole=True))
    return views


def _short(text: str) -> str:
    return _PADDING.sub(lambda found: f"{PAD} × {len(found[0]) // len(PAD)}", text)


def _views(data: AnswerData, most: int) -> Iterator[SampleView]:
    split = data.train
    for number in range(len(data.index)):
        sequence = int(data.index.sequences(np.array([number]))[0])
        first, end = int(split.borders[sequence]), int(split.borders[sequence + 1])
        for place in range(first, end):
            tokens, learnt = split.samples[place]
            runs = list(_runs(data.tokenizer, tokens[:most], learnt[:most]))
            counts = len(tokens), int(learnt.sum())
            yield SampleView(sequence, place - first + 1, end - first, *counts, runs, len(tokens) <= most)


def _runs(tokenizer: ChatTokenizer | SpecialTokenizer, tokens: Int32s | Int64s, learnt: Bools) -> Iterator[Run]:
    special = (token in tokenizer.special_ids for token in tokens.tolist())
    kinds = zip(learnt.tolist(), special, tokens.tolist(), strict=True)
    for (is_learnt, is_special), some in itertools.groupby(kinds, key=lambda one: one[:2]):
        yield Run(tokenizer.decode([token for _, _, token in some]), is_learnt, is_special)


def show_answers(views: list[SampleView], console: Console | None = None) -> None:
    """In colour on a terminal; elsewhere as plain text."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    for view in views:
        if not console.is_terminal:
            console.print(
                f"--- {view.title}\n{_visible(view.plain())}\n", markup=False, highlight=False, soft_wrap=True
            )
            continue
        console.rule(view.title, align="left")
        text = Text()
        for run in view.runs:
            text.append(_visible(run.text), style=_style(run))
        console.print(text)


def _style(run: Run) -> str:
    if run.special:
        return _SPECIAL_LEARNT if run.learnt else _SPECIAL
    return _LEARNT if run.learnt else _READ


def _visible(text: str) -> str:
    """What would move the cursor, or set colours, is shown as a dot."""
    return "".join(c if c.isprintable() or c == "\n" else "→" if c == "\t" else "·" for c in text)
