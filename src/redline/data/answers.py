"""What fine-tuning reads: samples of weighted sources, split, measured against `seq_len`, and packed.

A sample longer than `seq_len` is overlong: it is dropped, cut (its beginning is kept; if no learnt token is in that,
it is dropped too), or an error. A row is held out for validation if a seeded hash of what it says falls below
`val_fraction`, so neither order nor neighbours matter; at least one of a source is, and at least one is not. A row of
which an equal is held out is never trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.data.answer_store import AnswerStore, open_store
from redline.data.index import order_keys
from redline.data.mixture import RowIndex, epoch_sample, row_index, row_mixture_key, shares_of
from redline.data.packed import Bools, Int64s, Members, PackedSplit, joined, packed
from redline.data.progress import ProgressCallback
from redline.data.template import ChatTokenizer, load_chat_tokenizer
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Part

DROP, CUT, ERROR = "drop", "cut", "error"
_KEY = "finetune.overlong"
# Randomness for different ends; the epochs' own are from 0 to the number of parts.
_SPLIT_GROUP, _VAL_GROUP, _PACK_GROUP = 1 << 16, 1 << 17, 1 << 18


@dataclass(frozen=True)
class SourceReport:
    """What became of a source's rows. Of the rows that are bad some are empty; samples are overlong, cut or doubled."""

    source: str
    weight: float | None  # as the recipe states it
    share: float  # of the sequences of training
    rows: int
    bad: int
    empty: int
    reasons: dict[str, int]  # why rows are bad
    examples: list[str]  # where the first of them stand
    overlong: int  # samples longer than seq_len
    cut: int  # of these, kept in part; the rest is dropped
    duplicates: int  # left out: a row that says the same is held out (or, with data.dedup, came before)
    train_samples: int
    val_samples: int
    tokens: int  # of training
    learnt: int  # of these, targets
    sequences: int
    fill: float

    def line(self, *, held_out: bool = True) -> str:
        told = f"{self.source}: {self.rows:,} rows, {self.train_samples:,} used" + (
            f" to train on and {self.val_samples:,} held out" if held_out else ""
        )
        dropped = self.overlong - self.cut
        left_out = {
            "cannot be used": self.bad,
            "longer than data.seq_len, dropped": dropped,
            "longer than data.seq_len, cut": self.cut,
            "left out, for their like is held out or came before": self.duplicates,
        }
        why = [f"{count:,} {reason}" for reason, count in left_out.items() if count]
        most = dropped > (self.train_samples + self.val_samples)
        return "; ".join([told, *why, *(["most of them are too long: raise data.seq_len"] if most else [])])


@dataclass(frozen=True)
class AnswerReport:
    sources: tuple[SourceReport, ...]
    fill: float  # of all sequences of training
    template: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: what there is, and what was left out of it."""
        held_out = any(source.val_samples for source in self.sources)
        return [source.line(held_out=held_out) for source in self.sources]


@dataclass(frozen=True)
class Question:
    """What a model reads, and what it should answer."""

    prompt: list[int]
    reference: str


@dataclass(frozen=True)
class AnswerData:
    facts: DataFacts
    train: PackedSplit
    val: PackedSplit | None
    tokenizer: ChatTokenizer
    report: AnswerReport
    index: RowIndex

    def batch(self, samples: Int64s) -> dict[str, npt.NDArray[np.integer]]:
        """The sequences with these global sample numbers; a function of (seed, sample) alone."""
        return self.train.rows(self.index.sequences(samples))

    def questions(self, split: PackedSplit, count: int) -> list[Question]:
        """The first `count` samples up to their first answer, and that answer. Only where `answers` are learnt."""
        found = []
        for place in range(min(count, len(split.samples))):
            tokens, learnt = split.samples[place]
            begin = int(learnt.argmax())
            rest = learnt[begin:]
            end = begin + (len(rest) if rest.all() else int(rest.argmin()))
            found.append(Question(tokens[:begin].tolist(), self.tokenizer.decode(tokens[begin:end], special=False)))
        return found


def load_answers(
    data: Data,
    *,
    folder: Path,
    seq_len: int,
    pack: bool,
    learn: str,
    overlong: str,
    template: str | None,
    seed: int,
    val_fraction: float,
    progress: ProgressCallback | None = None,
) -> AnswerData:
    """All that the sources hold, as sequences; `folder` is the tokenizer's. With `val_fraction` 0 all is in `train`."""
    tokenizer = load_chat_tokenizer(folder, template)
    names = [part.source for part in data.parts]
    stores = tuple(open_store(name, tokenizer, learn, progress) for name in names)
    fitting = [_fitting(name, stores, part, seq_len, overlong) for part, name in enumerate(names)]
    held_out = _held_out(stores, fitting, seed, val_fraction)
    train, val = _divided(names, stores, fitting, held_out, dedup=data.dedup)
    order = seed if data.shuffle else None
    each = [packed(some, seq_len, pack=pack, seed=order, group=_PACK_GROUP + part) for part, some in enumerate(train)]
    sizes = [len(borders) - 1 for _, borders in each]
    index = row_index(sizes, data.parts, seed, shuffle=data.shuffle)
    trained = PackedSplit(joined([one for one, _ in each]), _all_borders(each), seq_len, tokenizer.pad)
    validated = None
    if any(len(some) for some in val):
        together = packed(joined(val), seq_len, pack=pack, seed=seed, group=_VAL_GROUP)
        validated = PackedSplit(*together, seq_len, tokenizer.pad)
    options = [seq_len, pack, overlong, val_fraction, seed, data.shuffle, data.dedup]
    contents = [[store.fingerprint, key] for store, key in zip(stores, row_mixture_key(data.parts), strict=True)]
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        train_tokens=len(index) * seq_len,
        val_tokens=len(validated) * seq_len if validated else 0,
        fingerprint=digest_of(["answers", contents, options]),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        content=digest_of(["answers", sorted(store.fingerprint for store in stores)]),
        val_rows=len(validated.samples.keys) if validated else 0,
        rows=trained.means(epoch_sample(index), pack=pack),
    )
    reports = tuple(
        _report(part, share, store, fit, one, borders, held, seq_len)
        for part, share, store, fit, (one, borders), held in zip(
            data.parts, shares_of(sizes, data.parts), stores, fitting, each, val, strict=True
        )
    )
    report = AnswerReport(reports, trained.fill, tokenizer.template_name)
    return AnswerData(facts, trained, validated, tokenizer, report, index)


def _fitting(source: str, stores: tuple[AnswerStore, ...], part: int, seq_len: int, overlong: str) -> Members:
    """The part's samples that are kept, with the length that is kept of each."""
    store = stores[part]
    lengths = store.lengths
    too_long = lengths > seq_len
    if overlong == ERROR and too_long.any():
        what = f"{int(too_long.sum()):,} of {len(store):,} samples are longer than data.seq_len={seq_len}."
        fix = f"Set it to at least {int(lengths.max())}, or {_KEY} to {DROP} or {CUT}."
        raise UserError(what, where=source, fix=fix)
    kept = np.flatnonzero(~too_long | ((overlong == CUT) & (store.first < seq_len)))
    if not len(kept):
        what = f"none of its {len(store):,} samples fits into data.seq_len={seq_len}; the shortest has {lengths.min()}."
        raise UserError(what, where=source, fix=f"Raise it, or cut them: {_KEY}={CUT}.")
    return Members(stores, np.full(len(kept), part), kept, np.minimum(lengths[kept], seq_len))


def _held_out(
    stores: Sequence[AnswerStore], fitting: Sequence[Members], seed: int, fraction: float
) -> npt.NDArray[np.uint64]:
    """What the rows of validation say, as keys in order."""
    if not fraction:
        return np.empty(0, dtype=np.uint64)
    found = []
    for store, members in zip(stores, fitting, strict=True):
        keys = np.unique(store.keys[members.number])
        chance = order_keys(seed, keys.view(np.int64), _SPLIT_GROUP)
        ranked = keys[np.argsort(chance)]
        count = int((chance < np.uint64(fraction * 2.0**64)).sum())
        found.append(ranked[: min(max(count, 1), len(keys) - 1)])
    return np.unique(np.concatenate(found))


def _divided(
    sources: Sequence[str],
    stores: Sequence[AnswerStore],
    fitting: Sequence[Members],
    held_out: npt.NDArray[np.uint64],
    *,
    dedup: bool,
) -> tuple[list[Members], list[Members]]:
    """Each part's samples of training and of validation, in which no row says what another one there says."""
    train, val = [], []
    met = np.empty(0, dtype=np.uint64)
    for source, store, members in zip(sources, stores, fitting, strict=True):
        keys, rows = store.keys[members.number], store.rows[members.number]
        is_held, is_first = np.isin(keys, held_out), _first_of_its_kind(keys, rows, met)
        met = np.union1d(met, keys)
        train.append(members.take(np.flatnonzero(~is_held & (is_first | (not dedup)))))
        val.append(members.take(np.flatnonzero(is_held & is_first)))
        if not len(train[-1]):
            what = "nothing of it is left to train on: all of its rows are held out, or came before."
            raise UserError(what, where=source, fix="Give more rows, set data.val_fraction=0, or take the source out.")
    return train, val


def _first_of_its_kind(keys: npt.NDArray[np.uint64], rows: Int64s, met: npt.NDArray[np.uint64]) -> Bools:
    """Whether no earlier row says the same; all samples of a row share its fate."""
    _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
    same: Bools = rows == rows[first][kind]
    return same & ~np.isin(keys, met)


def _all_borders(each: Sequence[tuple[Members, Int64s]]) -> Int64s:
    sizes = np.concatenate([np.diff(borders) for _, borders in each])
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _report(
    part: Part,
    share: float,
    store: AnswerStore,
    fitting: Members,
    train: Members,
    borders: Int64s,
    val: Members,
    seq_len: int,
) -> SourceReport:
    counts, tokens = store.counts, int(train.length.sum())
    sequences = len(borders) - 1
    return SourceReport(
        source=part.source,
        weight=part.weight,
        share=share,
        rows=counts["rows"],
        bad=counts["bad_rows"],
        empty=counts["empty"],
        reasons=counts["bad_rows_by_reason"],
        examples=counts["examples"],
        overlong=int((store.lengths > seq_len).sum()),
        cut=int((store.lengths[fitting.number] > fitting.length).sum()),
        duplicates=len(fitting) - len(train) - len(val),
        train_samples=len(train),
        val_samples=len(val),
        tokens=tokens,
        learnt=train.learnt,
        sequences=sequences,
        fill=tokens / (sequences * seq_len),
    )
