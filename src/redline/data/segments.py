"""What diffusion on records reads: rows of question, plan and execution, split, measured, and in a seeded order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.data.mixture import RowIndex, epoch_sample, row_index, row_mixture_key
from redline.data.progress import Progress, ProgressCallback
from redline.data.record_rows import QUESTION, RecordRows, SegmentReport, refuse_short
from redline.data.records import Record, divided, read_records
from redline.data.specials import WithSpecials
from redline.data.tokenizer import load_tokenizer
from redline.data.tokens import digest_of
from redline.data.usable import RowReport
from redline.plan.layout import Layout
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecordsReport:
    sources: tuple[RowReport, ...]
    segments: tuple[SegmentReport, ...]
    dropped: int  # records whose answer does not fit
    duplicates: int  # left out: the question is held out (or, with data.dedup, came before)
    unplanned: int  # records without a plan, where the layout has a place for it
    train: int
    val: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        told = [source.line() for source in self.sources]
        for one in self.segments:
            lengths = (
                f"median {one.median:,}, 95 % within {one.most:,}, longest {one.longest:,} of {one.length:,} tokens"
            )
            told.append(f"{one.name}: {lengths}" + (f"; {one.truncated:,} truncated" if one.truncated else ""))
        left_out = {
            "dropped, for their answer does not fit": self.dropped,
            "left out, for their question is met elsewhere": self.duplicates,
            "without a plan": self.unplanned,
        }
        told.append(f"{self.train:,} records" + (f" to train on, {self.val:,} held out" if self.val else ""))
        return told + [f"{count:,} {why}" for why, count in left_out.items() if count]


@dataclass(frozen=True)
class RecordSplit:
    tokens: Int32s  # [rows, n]
    ends: Int32s  # [rows, segments]: up to where each segment is learnt
    records: list[Record]
    layout: Layout

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, numbers: Int64s) -> dict[str, npt.NDArray[Any]]:
        """`tokens` int64 and `learnt` bool, both [B, n]."""
        ends_BS = self.ends[numbers]
        learnt = [
            np.arange(segment.length) < ends_BS[:, place, None] for place, segment in enumerate(self.layout.segments)
        ]
        return {"tokens": self.tokens[numbers].astype(np.int64), "learnt": np.concatenate(learnt, axis=1)}

    def means(self, numbers: Int64s) -> dict[str, Any]:
        """Over these rows: the share of the noised positions that have a loss."""
        return {"learnt": float(self.ends[numbers].sum(1).mean()) / self.layout.denoised}

    def first(self, count: int) -> RecordSplit:
        return RecordSplit(self.tokens[:count], self.ends[:count], self.records[:count], self.layout)


@dataclass(frozen=True)
class RecordData:
    facts: DataFacts
    train: RecordSplit
    val: RecordSplit | None
    tokenizer: WithSpecials
    report: RecordsReport
    index: RowIndex


def _said(record: Record) -> list[str]:
    return [record.question, record.plan, record.execution, record.answer]


def load_records(
    data: Data, layout: Layout, *, seed: int, val_fraction: float, progress: ProgressCallback | None = None
) -> RecordData:
    """All that the sources hold, as rows of the layout. With `val_fraction` 0 all is in `train`."""
    refuse_short(layout)
    read = {part.source: _read(part.source, progress) for part in data.parts}
    split = divided({name: found for name, (found, _) in read.items()}, seed, val_fraction, dedup=data.dedup)
    trained = [record for records in split.train for record in records]
    tokenizer = WithSpecials(load_tokenizer(data.tokenizer, lambda: (text for one in trained for text in _texts(one))))
    if progress:
        progress(Progress("laying out the records", 0, None, 0))
    rows = RecordRows(layout, tokenizer)
    each = [RecordSplit(*rows.write(records), layout) for records in split.train]
    for name, part in zip(read, each, strict=True):
        if not len(part):
            raise rows.nothing_fits(name)
    train = _joined(each)
    held_out = RecordSplit(*rows.write([record for records in split.val for record in records]), layout)
    sizes = [len(part) for part in each]
    index = row_index(sizes, data.parts, seed, shuffle=data.shuffle)
    content = [_digest(train), _digest(held_out), sizes, row_mixture_key(data.parts), seed, data.shuffle]
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        train_tokens=len(index) * layout.length,
        val_tokens=len(held_out) * layout.length,
        fingerprint=digest_of(["records", tokenizer.fingerprint, content]),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.base.fingerprint,
        content=digest_of(["records", sorted(_said(one) for found, _ in read.values() for one in found)]),
        val_rows=len(held_out),
        rows=train.means(epoch_sample(index)),
    )
    report = RecordsReport(
        sources=tuple(report for _, report in read.values()),
        segments=rows.reports(),
        dropped=rows.dropped,
        duplicates=split.duplicates,
        unplanned=rows.unplanned,
        train=len(train),
        val=len(held_out),
    )
    return RecordData(facts, train, held_out if len(held_out) else None, tokenizer, report, index)


def _read(source: str, progress: ProgressCallback | None) -> tuple[list[Record], RowReport]:
    if progress:
        progress(Progress(f"reading {source}", 0, None, 0))
    return read_records(source)


def row_of_question(question: str, layout: Layout, tokenizer: WithSpecials) -> list[int]:
    """The tokens of the segment that is given; a question that is too long is cut, as in training."""
    length = next(segment.length for segment in layout.segments if segment.name == QUESTION)
    tokens = tokenizer.encode(question)[:length]
    return [*tokens, *[tokenizer.pad] * (length - len(tokens))]


def _texts(record: Record) -> tuple[str, ...]:
    return record.question, record.plan, record.execution, record.answer


def _digest(split: RecordSplit) -> str:
    content = hashlib.sha256(split.tokens.tobytes())
    content.update(split.ends.tobytes())
    return content.hexdigest()


def _joined(parts: Sequence[RecordSplit]) -> RecordSplit:
    if len(parts) == 1:
        return parts[0]
    return RecordSplit(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.ends for part in parts]),
        [record for part in parts for record in part.records],
        parts[0].layout,
    )
