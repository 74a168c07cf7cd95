"""What diffusion on records reads: rows of question, plan and execution, split, measured, and in a seeded order."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from redline.data.chat import RowReport, UnusableError, usable
from redline.data.corpus import Corpus
from redline.data.index import Index, order_keys
from redline.data.mixture import RowIndex, epoch_sample, row_index, row_mixture_key
from redline.data.problems import PREFIX, Record, is_problems, problems
from redline.data.read_stats import Progress, ProgressCallback
from redline.data.rows import is_clean, source_rows
from redline.data.tokenizer import LibraryTokenizer, Tokenizer, load_tokenizer
from redline.data.tokens import TokenSplit, digest_of
from redline.errors import UserError
from redline.jobs.base import job
from redline.jobs.causal_lm import objective as causal_lm
from redline.jobs.causal_lm.objective import CausalData
from redline.jobs.diffusion.denoise import Vocabulary
from redline.planning.layout import Layout, Segment
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Recipe

# ----------------------------------------------------------------------------------------------------
# Records: reading sources, and the held-out split.


_FIELDS = ("question", "plan", "execution", "answer")
_FIX = (
    "Give rows with question and answer, the latter ending with `#### N` as GSM8K's do; "
    "or with question, plan, execution and answer."
)
_INSTEAD = f"Take the embedded word problems, {PREFIX}easy. Or:"
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K: 48/2 = <<48/2=24>>24
_SEPARATOR = " ** "
_MARK = "####"
_NUMBER = re.compile(r"[-−]?\s?\$?\s?[-−]?(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)")
_SPLIT_GROUP = 1 << 16  # randomness of its own, as other ends have theirs


def read_records(source: str) -> tuple[list[Record], RowReport]:
    """Every usable row, in an order that never changes. More than half unusable, or nothing at all, is refused."""
    if is_problems(source):
        made = problems(source)
        return made, RowReport(source, len(made))
    rows = partial(source_rows, source, fields=_FIELDS, fix=_FIX, instead=_INSTEAD)
    return usable(source, rows, record_of, _FIX)


def record_of(row: Mapping[str, Any]) -> Record:
    """Parquet and hubs give every column to every row: a field that holds null counts as absent."""
    question, answer = _text(row, "question"), _text(row, "answer")
    if row.get("execution") is not None:
        plan = "" if row.get("plan") in (None, "") else _text(row, "plan")
        number = _number(answer) if _MARK in answer else answer
        return Record(question, _plain(plan), _plain(_text(row, "execution")), number)
    number = _number(answer)
    lines = [line for line in answer.rpartition(_MARK)[0].splitlines() if line.strip()]
    if not lines or not all(_SEPARATOR in line for line in lines):
        return Record(question, "", _plain("\n".join(lines)), number)
    pairs = [line.split(_SEPARATOR, 1) for line in lines]
    return Record(
        question, _plain("\n".join(q for q, _ in pairs)), _plain("\n".join(step for _, step in pairs)), number
    )


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise UnusableError(f"no {name!r} in it")
    if name == "answer" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if name == "answer" and isinstance(value, float) and math.isfinite(value):
        value = str(int(value)) if value == int(value) else str(value)
    if not isinstance(value, str):
        raise UnusableError(f"{name!r} is no text")
    if not value.strip():
        raise UnusableError(f"empty {name!r}")
    if not is_clean(value):
        raise UnusableError(f"{name!r} is binary data, not text")
    return value.strip()


def _number(answer: str) -> str:
    """What stands behind the last mark, without commas and signs of money."""
    _, mark, behind = answer.rpartition(_MARK)
    if not mark:
        raise UnusableError(f"no {_MARK} in its answer")
    found = _NUMBER.search(behind)
    if found is None:
        raise UnusableError(f"no number behind the {_MARK} of its answer")
    minus = "-" if "-" in found[0] or "−" in found[0] else ""
    return minus + found["digits"].replace(",", "")


def _plain(text: str) -> str:
    """Without the calculator's annotations, empty lines, and white space around lines."""
    lines = (line.strip() for line in _CALCULATOR.sub("", text).splitlines())
    return "\n".join(line for line in lines if line)


# --- split


@dataclass(frozen=True)
class Divided:
    """Each part's records of training and of validation."""

    train: list[list[Record]]
    val: list[list[Record]]
    duplicates: int  # left out: one with the same question is held out (or, with dedup, came before)


def divided(parts: Mapping[str, Sequence[Record]], seed: int, fraction: float, *, dedup: bool) -> Divided:
    """Held out is a record if a seeded hash of its question falls below `fraction`, so no order or neighbour matters.

    Of each part at least one is, and at least one is not. A question that is held out is never trained on.
    """
    keys = [np.array([record.key for record in records], dtype=np.uint64) for records in parts.values()]
    held_out = set(np.concatenate([_held_out(some, seed, fraction) for some in keys]).tolist())
    train: list[list[Record]] = []
    val: list[list[Record]] = []
    met: set[int] = set()
    for name, records in parts.items():
        train.append([])
        val.append([])
        for record in records:
            key = record.key
            held, first = key in held_out, key not in met
            met.add(key)
            if first or not (held or dedup):
                (val if held else train)[-1].append(record)
        if not train[-1]:
            what = "nothing of it is left to train on: all of its questions are held out, or came before."
            raise UserError(what, where=name, fix="Give more rows, set data.val_fraction=0, or take the source out.")
    kept = sum(len(some) for some in [*train, *val])
    return Divided(train, val, sum(len(records) for records in parts.values()) - kept)


def _held_out(keys: npt.NDArray[np.uint64], seed: int, fraction: float) -> npt.NDArray[np.uint64]:
    different = np.unique(keys)
    if not fraction:
        return different[:0]
    chance = order_keys(seed, different.view(np.int64), _SPLIT_GROUP)
    count = int((chance < np.uint64(fraction * 2.0**64)).sum())
    return different[np.argsort(chance)][: min(max(count, 1), len(different) - 1)]


# ----------------------------------------------------------------------------------------------------
# Special tokens behind a tokenizer's own: the marks of a record's parts, padding, and the mask of diffusion.
#
# The mask is the last id of all, so that the ids which a model may write are those below it.


PLAN_TOKEN, EXECUTION_TOKEN, ANSWER, PAD, MASK = "<|plan|>", "<|execution|>", "<|answer|>", "<|pad|>", "<|mask|>"
SPECIALS = (PLAN_TOKEN, EXECUTION_TOKEN, ANSWER, PAD, MASK)


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
        return self.id(PLAN_TOKEN)

    @property
    def execution(self) -> int:
        return self.id(EXECUTION_TOKEN)

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


# ----------------------------------------------------------------------------------------------------
# A record as a row of tokens: each of its segments with its marks, padded to its length.
#
#     question    the question, padding
#     plan        <|plan|> the plan, padding
#     execution   <|execution|> the steps <|answer|> the answer, padding     (named `solution` where there is no plan)
#
# Learnt is all that a sampler must write: a segment's content, and the padding of the block in which the first of it
# stands; that first one always exists, for it says where the content ends. What is too long is cut and counted. The
# answer is never cut off: of the execution the end of its steps goes, and where not even the answer fits, the record.


QUESTION, PLAN, EXECUTION, SOLUTION = "question", "plan", "execution", "solution"
_LEAST = {QUESTION: 1, PLAN: 3, EXECUTION: 4, SOLUTION: 4}  # its marks, one token, and one of padding
_AT_ONCE = 4096  # records


@dataclass(frozen=True)
class SegmentReport:
    name: str
    length: int
    median: int  # tokens of its content, before anything is cut
    most: int  # that 95 % of all do not exceed
    longest: int
    truncated: int


def key_of(layout: Layout, name: str) -> str:
    """The key of the recipe that makes a segment longer."""
    if any(segment.name == SOLUTION for segment in layout.segments):
        return "data.seq_len" if name == SOLUTION else f"block_diffusion.{name}"
    return f"hierarchical_diffusion.{name}"


def refuse_short(layout: Layout) -> None:
    names = [segment.name for segment in layout.segments]
    if names not in ([QUESTION, PLAN, EXECUTION], [QUESTION, SOLUTION]):
        raise ValueError(f"{names} are not the segments of a record")
    for segment in layout.segments:
        least = _LEAST[segment.name]
        if segment.length < least:
            what = f"a {segment.name} of {segment.length} tokens has no room for anything."
            fix = f"Raise {key_of(layout, segment.name)} so that it has at least {least}; 64 is a beginning."
            raise UserError(what, fix=fix)


class RecordRows:
    """Writes records into rows, and counts what did not fit."""

    def __init__(self, layout: Layout, tokenizer: WithSpecials) -> None:
        self.layout, self.tokenizer = layout, tokenizer
        self.dropped = self.unplanned = 0
        self._lengths: dict[str, list[int]] = {segment.name: [] for segment in layout.segments}
        self._truncated = dict.fromkeys(self._lengths, 0)
        self._least_answer = 0  # the shortest segment that would have saved a dropped record

    def write(self, records: Sequence[Record]) -> tuple[Int32s, Int32s, list[Record]]:
        """Tokens [R, n], up to where each segment is learnt [R, segments], and the records that fitted."""
        tokens_RN = np.full((len(records), self.layout.length), self.tokenizer.pad, dtype=np.int32)
        learnt_RS = np.zeros((len(records), len(self.layout.segments)), dtype=np.int32)
        kept: list[Record] = []
        for first in range(0, len(records), _AT_ONCE):
            some = records[first : first + _AT_ONCE]
            for record, segments in zip(some, self._coded(some), strict=True):
                if self._fill(segments, tokens_RN[len(kept)], learnt_RS[len(kept)]):
                    kept.append(record)
                    self.unplanned += not record.plan and PLAN in self._lengths
        return tokens_RN[: len(kept)], learnt_RS[: len(kept)], kept

    def _coded(self, records: Sequence[Record]) -> list[list[tuple[list[int], list[int]]]]:
        """Of each record, for each segment, what may be cut at its end and what must stay behind that."""
        of, marks = self.tokenizer.encode_batch, self.tokenizer
        parts = {QUESTION: [(q, list[int]()) for q in of([record.question for record in records])]}
        if PLAN in self._lengths:
            parts[PLAN] = [([marks.plan, *plan], []) for plan in of([record.plan for record in records])]
        steps, answers = of([record.execution for record in records]), of([record.answer for record in records])
        last = self.layout.segments[-1].name
        parts[last] = [([marks.execution, *s], [marks.answer, *a]) for s, a in zip(steps, answers, strict=True)]
        return [list(segments) for segments in zip(*parts.values(), strict=True)]

    def _fill(self, segments: list[tuple[list[int], list[int]]], row_N: Int32s, learnt_S: Int32s) -> bool:
        """Whether it fits."""
        filled = []
        for segment, (content, end) in zip(self.layout.segments, segments, strict=True):
            self._lengths[segment.name].append(len(content) + len(end))
            room = (segment.length if segment.given else segment.length - 1) - len(end)
            if room < (1 if end else 0):
                self.dropped += 1
                needed = len(end) + 2  # the mark before the steps, and the padding
                self._least_answer = min(self._least_answer or needed, needed)
                return False
            self._truncated[segment.name] += len(content) > room
            filled.append(content[:room] + end)
        for place, (segment, begin) in enumerate(zip(self.layout.segments, self.layout.starts, strict=True)):
            row_N[begin : begin + len(filled[place])] = filled[place]
            learnt_S[place] = _learnt(segment, len(filled[place]))
        return True

    def nothing_fits(self, source: str) -> UserError:
        last = self.layout.segments[-1]
        what = f"no record's answer fits into the {last.length} tokens of the {last.name}."
        more = self._least_answer - last.length
        fix = f"Raise {key_of(self.layout, last.name)} by at least {more}; the steps before the answer need room, too."
        return UserError(what, where=source, fix=fix)

    def reports(self) -> tuple[SegmentReport, ...]:
        return tuple(
            SegmentReport(one.name, one.length, *_quantiles(self._lengths[one.name]), self._truncated[one.name])
            for one in self.layout.segments
        )


def _learnt(segment: Segment, end: int) -> int:
    """Up to the end of the block in which the first padding stands."""
    return 0 if segment.given else (end // segment.block + 1) * segment.block


def _quantiles(lengths: list[int]) -> tuple[int, int, int]:
    median, most, longest = np.quantile(lengths, (0.5, 0.95, 1.0), method="higher").tolist()
    return median, most, longest


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


# ----------------------------------------------------------------------------------------------------
# What the objective reads: windows of a text, or rows of records.

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Rows(NamedTuple):
    """Sequences as they are, which of their positions are learnt, and which of these others are never hidden.

    `content` are the learnt positions that are not padding; all of them if not given.
    """

    tokens: Ids
    learnt: Bools
    never: Bools | None = None
    content: Bools | None = None


class Sequences(Protocol):
    """What a job reads."""

    @property
    def facts(self) -> DataFacts: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def held_out(self) -> int:
        """Sequences that evaluation reads."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Tokens and bytes of what is held out, where they are known."""

    def training(self, samples: Ids) -> Rows: ...

    def evaluation(self, numbers: Ids) -> Rows: ...


@dataclass(frozen=True)
class TextSequences:
    """Windows of a text. One more id than its tokenizer has stands for what is hidden."""

    text: CausalData
    seq_len: int
    index: Index | None = None  # None when nothing is trained

    @cached_property
    def facts(self) -> DataFacts:
        found = self.text.facts
        held_out = found.val_tokens if self.held_out else 0  # what fills no window is never scored
        return replace(found, vocab_size=found.vocab_size + 1, val_tokens=held_out)

    @property
    def told(self) -> tuple[str, ...]:
        return self.text.told

    @property
    def vocabulary(self) -> Vocabulary:
        tokens = self.text.tokens
        return Vocabulary(mask=tokens.vocab_size, classes=tokens.vocab_size, end=tokens.eot)

    @property
    def held_out(self) -> int:
        return 0 if self.text.held_out is None else len(self.text.held_out) // self.seq_len

    @property
    def size(self) -> tuple[int, int] | None:
        split = self.text.held_out
        return None if split is None or split.bytes is None else (len(split), split.bytes)

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        return self.text.row_keys(trained=trained)

    def sequences(self, seq_len: int) -> int:
        return self.held_out

    def training(self, samples: Ids) -> Rows:
        assert self.index is not None
        return self._rows(self.text.tokens.train, self.index.starts(samples))

    def evaluation(self, numbers: Ids) -> Rows:
        assert self.text.held_out is not None
        return self._rows(self.text.held_out, numbers * self.seq_len)

    def _rows(self, split: TokenSplit, starts: Ids) -> Rows:
        """A mark before a document that is a row's first has nothing to be predicted from."""
        tokens = split.windows(starts, self.seq_len).astype(np.int64)
        never = np.zeros(tokens.shape, dtype=bool)
        never[:, 0] = tokens[:, 0] == self.text.tokens.eot
        return Rows(tokens, ~never, never)


@dataclass(frozen=True)
class RecordSequences:
    facts: DataFacts
    tokenizer: WithSpecials | None = None  # None: for steps that are only timed
    records: RecordData | None = None
    split: RecordSplit | None = None  # what is held out

    @property
    def vocabulary(self) -> Vocabulary:
        if self.tokenizer is None:
            return Vocabulary(mask=self.facts.vocab_size - 1, classes=self.facts.vocab_size - 1)
        return Vocabulary(self.tokenizer.mask, self.tokenizer.classes, self.tokenizer.pad)

    @property
    def held_out(self) -> int:
        return 0 if self.split is None else len(self.split)

    @property
    def size(self) -> None:
        return None

    @property
    def told(self) -> list[str]:
        return [] if self.records is None else self.records.report.lines()

    def row_keys(self, *, trained: bool) -> list[int] | None:
        """One key per row to train on, or per row that is evaluated."""
        to_train = None if self.records is None else self.records.train
        split = to_train if trained else self.split
        return None if split is None else [record.key for record in split.records]

    def training(self, samples: Ids) -> Rows:
        assert self.records is not None
        return self._rows(self.records.train, self.records.index.sequences(samples))

    def evaluation(self, numbers: Ids) -> Rows:
        assert self.split is not None
        return self._rows(self.split, numbers)

    def _rows(self, split: RecordSplit, numbers: Ids) -> Rows:
        assert self.tokenizer is not None
        found = split.rows(numbers)
        return Rows(**found, content=found["learnt"] & (found["tokens"] != self.tokenizer.pad))


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    return recipe


def can_answer(recipe: Recipe) -> bool:
    """Return whether the run reads records, that is questions with their answers, and not plain text."""
    return any(segment.given for segment in layout_of(recipe).segments)


def layout_of(recipe: Recipe) -> Layout:
    layout: Layout = job(recipe.objective).layout(recipe)
    return layout


def load_data(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> TextSequences | RecordSequences:
    """Load the recipe's data. With `for_evaluation`, all of them are the validation set."""
    if can_answer(recipe):
        found = load_records(
            recipe.data,
            layout_of(recipe),
            seed=recipe.train.seed,
            val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
            progress=progress,
        )
        return RecordSequences(found.facts, found.tokenizer, found, found.train if for_evaluation else found.val)
    text = causal_lm.load_data(recipe, for_evaluation=for_evaluation, progress=progress)
    corpus, seq_len = text.corpus, recipe.data.seq_len
    assert isinstance(corpus, Corpus)
    index = None if for_evaluation else corpus.index(seq_len, recipe.train.seed, shuffle=recipe.data.shuffle)
    sequences = TextSequences(text, seq_len, index)
    if for_evaluation and not sequences.held_out:
        tokens = 0 if text.held_out is None else len(text.held_out)
        what = f"the text has {tokens:,} tokens, fewer than one window of {seq_len:,}: there is nothing to evaluate."
        raise UserError(what, where=str(recipe.data.source), fix="Give a longer text.")
    return sequences


def random_data(facts: DataFacts) -> RecordSequences:
    """Return a stand-in without rows, for steps that are only timed."""
    return RecordSequences(facts)


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> TextSequences | RecordSequences:
    """Return data that hold a tokenizer and no rows, for a model that only samples; its data may be gone."""
    if can_answer(recipe):
        return RecordSequences(facts, with_specials(facts, folder))
    plain = replace(facts, vocab_size=facts.vocab_size - 1)
    return TextSequences(causal_lm.tokenizer_alone(plain, folder, recipe), recipe.data.seq_len)
