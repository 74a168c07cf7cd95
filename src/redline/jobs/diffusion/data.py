"""The data of diffusion: windows of a text, or records laid out as segments of question, plan and execution.

From top to bottom: reading records from their sources and splitting them, the special tokens that mark their parts, the
encoding of a record as one row of tokens, and the two kinds of sequences that the objective reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from redline.data.corpus import (
    Corpus,
    RowIndex,
    epoch_sample,
    row_index,
    row_mixture_key,
    training_index,
)
from redline.data.loader import _GOLDEN, Index, _mix, order_keys, permute
from redline.data.problems import PREFIX, Record, is_problems, problems
from redline.data.sources import (
    Progress,
    ProgressCallback,
    ReadStats,
    RowReport,
    UnusableRowError,
    parse_rows,
    source_rows,
    text_field,
)
from redline.data.splits import split_rows
from redline.data.tokenizer import LibraryTokenizer, Tokenizer, load_tokenizer
from redline.data.tokens import TokenSplit, digest_of
from redline.errors import UserError
from redline.jobs.base import job
from redline.jobs.diffusion.denoise import Vocabulary
from redline.jobs.pretrained import BaseText, base_text_tokenizer, load_base_text, own_tokenizer
from redline.jobs.preview import SampleView, token_runs
from redline.models.pretrained import Base, open_base
from redline.planning.layout import Layout, Segment
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Recipe

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# ----------------------------------------------------------------------------------------------------
# Records: GSM8K's rows, rows that name their parts, and the embedded word problems; and the held-out split.
#
# GSM8K ends a solution with `#### N`. Its socratic files write each step as `sub-question ** step`: the sub-questions
# become the plan and the steps the execution, so a plan needs no language model to be generated. Rows that cannot be
# used are counted, and the report names where they stand.


_FIELDS = ("question", "plan", "execution", "answer")
_FIX = (
    "Give rows with question and answer, the latter ending with `#### N` as GSM8K's do; "
    "or with question, plan, execution and answer."
)
_INSTEAD = f"Use the embedded word problems, {PREFIX}easy. Or:"
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's annotations: 48/2 = <<48/2=24>>24
_SEPARATOR = " ** "
_ANSWER_MARK = "####"
_NUMBER = re.compile(r"[-−]?\s?\$?\s?[-−]?(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)")


def read_records(source: str) -> tuple[list[Record], RowReport]:
    """Return every usable record in the order of the source; raise UserError if more than half is unusable."""
    if is_problems(source):
        records = problems(source)
        return records, RowReport(source, len(records))
    stats = ReadStats(source)
    rows = source_rows(source, stats, _FIELDS, fix=_FIX, instead=_INSTEAD)
    parsed = list(parse_rows(rows, lambda place, row: parse_record(row), stats, _FIX))
    return parsed, RowReport.of(stats)


def parse_record(row: Mapping[str, Any]) -> Record:
    """Parse a row of any of the three forms; raise UnusableRowError if it has none of them.

    A null field counts as absent, because Parquet files and hub datasets give every column to every row.
    """
    question, answer = _text(row, "question"), _text(row, "answer")
    if row.get("execution") is not None:
        plan = "" if row.get("plan") in (None, "") else _text(row, "plan")
        number = _final_number(answer) if _ANSWER_MARK in answer else answer
        return Record(question, _clean_lines(plan), _clean_lines(_text(row, "execution")), number)
    number = _final_number(answer)
    lines = [line for line in answer.rpartition(_ANSWER_MARK)[0].splitlines() if line.strip()]
    if not lines or not all(_SEPARATOR in line for line in lines):
        return Record(question, "", _clean_lines("\n".join(lines)), number)
    steps = [line.split(_SEPARATOR, 1) for line in lines]
    plan = _clean_lines("\n".join(sub_question for sub_question, _ in steps))
    return Record(question, plan, _clean_lines("\n".join(step for _, step in steps)), number)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise UnusableRowError(f"no {name!r} field")
    if name == "answer" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if name == "answer" and isinstance(value, float) and math.isfinite(value):
        value = str(int(value)) if value == int(value) else str(value)
    return text_field(value, name).strip()


def _final_number(answer: str) -> str:
    """Return the number after the last `####`, without thousands separators and currency signs."""
    _, mark, tail = answer.rpartition(_ANSWER_MARK)
    if not mark:
        raise UnusableRowError(f"no {_ANSWER_MARK} in its answer")
    match = _NUMBER.search(tail)
    if match is None:
        raise UnusableRowError(f"no number after the {_ANSWER_MARK} of its answer")
    minus = "-" if "-" in match[0] or "−" in match[0] else ""
    return minus + match["digits"].replace(",", "")


def _clean_lines(text: str) -> str:
    """Remove the calculator annotations, empty lines, and white space around lines."""
    lines = (line.strip() for line in _CALCULATOR.sub("", text).splitlines())
    return "\n".join(line for line in lines if line)


@dataclass(frozen=True)
class SplitRecords:
    """The training and validation records of each source."""

    train: list[list[Record]]
    val: list[list[Record]]
    duplicates: int  # left out: the question is held out (or, with dedup, has occurred before)


def split_records(sources: Mapping[str, Sequence[Record]], seed: int, fraction: float, *, dedup: bool) -> SplitRecords:
    """Split the records of each source by the row rule of `data.splits`. Records with the same question are one row."""
    keys = [np.array([record.key for record in records], dtype=np.uint64) for records in sources.values()]
    splits = split_rows(list(sources), keys, seed, fraction, dedup=dedup)
    train = [[records[n] for n in split.train] for records, split in zip(sources.values(), splits, strict=True)]
    val = [[records[n] for n in split.val] for records, split in zip(sources.values(), splits, strict=True)]
    kept = sum(len(records) for records in [*train, *val])
    return SplitRecords(train, val, sum(len(records) for records in sources.values()) - kept)


# ----------------------------------------------------------------------------------------------------
# Special tokens, with ids behind those of the tokenizer: the marks of a record's parts, padding, and the mask.
#
# The mask has the last id of all, so that the ids which a model may predict are exactly those below it.


PLAN_TOKEN, EXECUTION_TOKEN, ANSWER, PAD, MASK = "<|plan|>", "<|execution|>", "<|answer|>", "<|pad|>", "<|mask|>"
SPECIALS = (PLAN_TOKEN, EXECUTION_TOKEN, ANSWER, PAD, MASK)


class SpecialTokenizer(Tokenizer):
    """A tokenizer with special tokens added. No text encodes to them, not even text that contains their names."""

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str] = SPECIALS) -> None:
        if not names or names[-1] != MASK or len(set(names)) < len(names):
            raise ValueError(f"{names!r} must be distinct names that end with {MASK}")
        if taken := [name for name in names if name in _known_tokens(tokenizer)]:
            what = f"its vocabulary already has {', '.join(taken)}, which redline adds for its own use."
            fix = "Use another tokenizer (data.tokenizer): gpt2, bytes, train:N or a tokenizer.json without them."
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
        """The number of ids that a model may predict: all but the mask."""
        return self.mask

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.base.encode_batch(texts)

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        return self.base.encode_array(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, in which special tokens appear by name."""
        own = self.base.vocab_size
        parts = []
        for special, group in groupby((int(i) for i in ids if i < self.vocab_size), key=lambda i: i >= own):
            tokens = list(group)
            parts.append("".join(self.names[i - own] for i in tokens) if special else self.base.decode(tokens))
        return "".join(parts)

    def save(self, path: Path) -> None:
        """Save the tokenizer without the special tokens; `load_run_tokenizer` adds them again."""
        self.base.save(path)


def _known_tokens(tokenizer: Tokenizer) -> set[str]:
    """Return the strings in a tokenizer's vocabulary; a byte tokenizer has none that could clash."""
    if isinstance(tokenizer, SpecialTokenizer):
        return {*tokenizer.names, *_known_tokens(tokenizer.base)}
    if not isinstance(tokenizer, LibraryTokenizer):
        return set()
    definition = json.loads(tokenizer.definition())
    vocab = definition["model"]["vocab"]  # a list of (token, score) pairs for Unigram models, else a mapping
    words = vocab if isinstance(vocab, dict) else [pair[0] for pair in vocab]
    return {*words, *(token["content"] for token in definition["added_tokens"])}


def load_run_tokenizer(facts: DataFacts, folder: Path) -> SpecialTokenizer:
    """Load the tokenizer that a run was trained with, from the run's `tokenizer.json` or by its name.

    `facts` name the tokenizer without the special tokens.
    """
    own = folder / "tokenizer.json"
    tokenizer = load_tokenizer(str(own) if own.is_file() else facts.tokenizer)
    if tokenizer.fingerprint != facts.tokenizer_fingerprint:
        what = "this is not the tokenizer that the run was trained with."
        where = str(own if own.is_file() else facts.tokenizer)
        raise UserError(what, where=where, fix="Copy the run's folder again.")
    tokenizer.name = facts.tokenizer
    return SpecialTokenizer(tokenizer)


# ----------------------------------------------------------------------------------------------------
# A record as a row of tokens: each segment with its marks, padded to its length.
#
#     question    the question, padding
#     plan        <|plan|> the plan, padding
#     execution   <|execution|> the steps <|answer|> the answer, padding     (named `solution` where there is no plan)
#
# The loss mask covers all that a sampler has to write: a segment's content, and the padding up to the end of the block
# in which the content ends. There is always at least one padding token, since it tells the sampler where the content
# ends. Segments that are too long are truncated and counted. The answer is never truncated: the steps before it are,
# and if even the answer alone does not fit, the record is dropped.


QUESTION, PLAN, EXECUTION, SOLUTION = "question", "plan", "execution", "solution"
_LEAST_LENGTH = {QUESTION: 1, PLAN: 3, EXECUTION: 4, SOLUTION: 4}  # the marks, one token, and one of padding
_ENCODE_BATCH = 4096  # records


@dataclass(frozen=True)
class SegmentReport:
    """The token lengths of one segment over all records."""

    name: str
    length: int
    median: int  # tokens of its content, before truncation
    most: int  # the 95th percentile of these
    longest: int
    truncated: int


def length_key(layout: Layout, name: str) -> str:
    """Return the recipe key that makes a segment longer."""
    if any(segment.name == SOLUTION for segment in layout.segments):
        return "data.seq_len" if name == SOLUTION else f"block_diffusion.{name}"
    return f"hierarchical_diffusion.{name}"


def check_segment_lengths(layout: Layout) -> None:
    """Raise if a segment is too short for its marks and one token."""
    names = [segment.name for segment in layout.segments]
    if names not in ([QUESTION, PLAN, EXECUTION], [QUESTION, SOLUTION]):
        raise ValueError(f"{names} are not the segments of a record")
    for segment in layout.segments:
        least = _LEAST_LENGTH[segment.name]
        if segment.length < least:
            key = length_key(layout, segment.name)
            what = f"a {segment.name} of {segment.length} tokens has no room for its special tokens and any content."
            raise UserError(what, fix=f"Set {key} so that it has at least {least}; start with 64.")


class RecordEncoder:
    """Encodes records as rows of tokens, and counts what is truncated and dropped."""

    def __init__(self, layout: Layout, tokenizer: SpecialTokenizer) -> None:
        self.layout, self.tokenizer = layout, tokenizer
        self.dropped = self.without_plan = 0
        self._lengths: dict[str, list[int]] = {segment.name: [] for segment in layout.segments}
        self._truncated = dict.fromkeys(self._lengths, 0)
        self._least_answer = 0  # the shortest last segment that would have held the answer of a dropped record

    def encode(self, records: Sequence[Record]) -> tuple[Int32s, Int32s, list[Record]]:
        """Return tokens [R, n], the end of the loss mask in each segment [R, segments], and the records that fit."""
        tokens_RN = np.full((len(records), self.layout.length), self.tokenizer.pad, dtype=np.int32)
        ends_RS = np.zeros((len(records), len(self.layout.segments)), dtype=np.int32)
        kept: list[Record] = []
        for first in range(0, len(records), _ENCODE_BATCH):
            batch = records[first : first + _ENCODE_BATCH]
            for record, segments in zip(batch, self._encode_segments(batch), strict=True):
                if self._fill_row(segments, tokens_RN[len(kept)], ends_RS[len(kept)]):
                    kept.append(record)
                    self.without_plan += not record.plan and PLAN in self._lengths
        return tokens_RN[: len(kept)], ends_RS[: len(kept)], kept

    def _encode_segments(self, records: Sequence[Record]) -> list[list[tuple[list[int], list[int]]]]:
        """Return, for each record and segment, the tokens that may be truncated and those that must follow them."""
        encode, ids = self.tokenizer.encode_batch, self.tokenizer
        parts = {QUESTION: [(q, list[int]()) for q in encode([record.question for record in records])]}
        if PLAN in self._lengths:
            parts[PLAN] = [([ids.plan, *plan], []) for plan in encode([record.plan for record in records])]
        steps, answers = encode([record.execution for record in records]), encode([record.answer for record in records])
        last = self.layout.segments[-1].name
        parts[last] = [([ids.execution, *s], [ids.answer, *a]) for s, a in zip(steps, answers, strict=True)]
        return [list(segments) for segments in zip(*parts.values(), strict=True)]

    def _fill_row(self, segments: list[tuple[list[int], list[int]]], row_N: Int32s, ends_S: Int32s) -> bool:
        """Write a record into its row, unless its answer does not fit; return whether it does."""
        filled = []
        for segment, (content, required) in zip(self.layout.segments, segments, strict=True):
            self._lengths[segment.name].append(len(content) + len(required))
            room = (segment.length if segment.given else segment.length - 1) - len(required)
            if room < (1 if required else 0):
                self.dropped += 1
                needed = len(required) + 2  # the mark before the steps, and the padding
                self._least_answer = min(self._least_answer or needed, needed)
                return False
            self._truncated[segment.name] += len(content) > room
            filled.append(content[:room] + required)
        for i, (segment, begin) in enumerate(zip(self.layout.segments, self.layout.starts, strict=True)):
            row_N[begin : begin + len(filled[i])] = filled[i]
            ends_S[i] = _loss_mask_end(segment, len(filled[i]))
        return True

    def no_record_fits(self, source: str) -> UserError:
        last = self.layout.segments[-1]
        what = f"no record's answer fits into the {last.length} tokens of the {last.name}."
        more = self._least_answer - last.length
        key = length_key(self.layout, last.name)
        fix = f"Raise {key} by at least {more}, and further for the steps before the answer."
        return UserError(what, where=source, fix=fix)

    def reports(self) -> tuple[SegmentReport, ...]:
        return tuple(
            SegmentReport(
                segment.name, segment.length, *_quantiles(self._lengths[segment.name]), self._truncated[segment.name]
            )
            for segment in self.layout.segments
        )


def _loss_mask_end(segment: Segment, content: int) -> int:
    """Return the end of the block that holds the first padding token."""
    return 0 if segment.given else (content // segment.block + 1) * segment.block


def _quantiles(lengths: list[int]) -> tuple[int, int, int]:
    median, most, longest = np.quantile(lengths, (0.5, 0.95, 1.0), method="higher").tolist()
    return median, most, longest


@dataclass(frozen=True)
class RecordsReport:
    """Counts for the user: what was read, truncated and left out."""

    sources: tuple[RowReport, ...]
    segments: tuple[SegmentReport, ...]
    dropped: int  # records whose answer does not fit
    duplicates: int  # left out: the question is held out (or, with data.dedup, has occurred before)
    without_plan: int  # records without a plan, where the layout has a segment for it
    train: int
    val: int

    def lines(self) -> list[str]:
        lines = [source.line() for source in self.sources]
        for segment in self.segments:
            lengths = (
                f"median {segment.median:,}, 95 % within {segment.most:,}, longest {segment.longest:,} "
                f"of {segment.length:,} tokens"
            )
            truncated = f"; {segment.truncated:,} truncated" if segment.truncated else ""
            lines.append(f"{segment.name}: {lengths}{truncated}")
        lines.append(f"{self.train:,} training records" + (f", {self.val:,} held out" if self.val else ""))
        left_out = {
            "dropped: the answer does not fit": self.dropped,
            "left out: the question is held out or a duplicate": self.duplicates,
            "without a plan": self.without_plan,
        }
        return lines + [f"{count:,} {why}" for why, count in left_out.items() if count]


@dataclass(frozen=True)
class RecordSplit:
    """The rows of one split, with their records."""

    tokens: Int32s  # [rows, n]
    ends: Int32s  # [rows, segments]: the end of the loss mask within each segment
    records: list[Record]
    layout: Layout

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, numbers: Int64s) -> dict[str, npt.NDArray[Any]]:
        """Return `tokens` (int64) and `loss_mask` (bool) of these rows, both [B, n]."""
        ends_BS = self.ends[numbers]
        masks = [np.arange(segment.length) < ends_BS[:, i, None] for i, segment in enumerate(self.layout.segments)]
        return {"tokens": self.tokens[numbers].astype(np.int64), "loss_mask": np.concatenate(masks, axis=1)}

    def means(self, numbers: Int64s) -> dict[str, Any]:
        """Return the share of the noised positions of these rows that carry a loss, by its name in the lock."""
        return {"learnt": float(self.ends[numbers].sum(1).mean()) / self.layout.denoised}

    def first(self, count: int) -> RecordSplit:
        return RecordSplit(self.tokens[:count], self.ends[:count], self.records[:count], self.layout)


@dataclass(frozen=True)
class RecordData:
    """The rows of all sources, split, with the order in which training reads them."""

    facts: DataFacts
    train: RecordSplit
    val: RecordSplit | None
    tokenizer: SpecialTokenizer
    report: RecordsReport
    index: RowIndex


def load_records(
    data: Data, layout: Layout, *, seed: int, val_fraction: float, progress: ProgressCallback | None = None
) -> RecordData:
    """Read all sources, split them, and encode them as rows of the layout.

    With `val_fraction` 0 everything is in `train`.
    """
    check_segment_lengths(layout)
    read = {part.source: _read_source(part.source, progress) for part in data.parts}
    split = split_records({name: records for name, (records, _) in read.items()}, seed, val_fraction, dedup=data.dedup)
    trained = [record for records in split.train for record in records]
    # A tokenizer that is trained here sees training records only: held-out text must not shape the vocabulary.
    base = load_tokenizer(data.tokenizer, lambda: (text for record in trained for text in _texts(record)))
    tokenizer = SpecialTokenizer(base)
    if progress:
        progress(Progress("encoding the records", 0, None, 0))
    encoder = RecordEncoder(layout, tokenizer)
    by_source = [RecordSplit(*encoder.encode(records), layout) for records in split.train]
    for name, part in zip(read, by_source, strict=True):
        if not len(part):
            raise encoder.no_record_fits(name)
    train = _concatenate(by_source)
    held_out = RecordSplit(*encoder.encode([record for records in split.val for record in records]), layout)
    sizes = [len(part) for part in by_source]
    index = row_index(sizes, data.parts, seed, shuffle=data.shuffle)
    content = [_digest(train), _digest(held_out), sizes, row_mixture_key(data.parts), seed, data.shuffle]
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        train_tokens=len(index) * layout.length,
        val_tokens=len(held_out) * layout.length,
        fingerprint=digest_of(["records", tokenizer.fingerprint, content]),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.base.fingerprint,
        content=digest_of(["records", sorted(_texts(record) for records, _ in read.values() for record in records)]),
        val_rows=len(held_out),
        rows=train.means(epoch_sample(index)),
    )
    report = RecordsReport(
        sources=tuple(report for _, report in read.values()),
        segments=encoder.reports(),
        dropped=encoder.dropped,
        duplicates=split.duplicates,
        without_plan=encoder.without_plan,
        train=len(train),
        val=len(held_out),
    )
    return RecordData(facts, train, held_out if len(held_out) else None, tokenizer, report, index)


def _read_source(source: str, progress: ProgressCallback | None) -> tuple[list[Record], RowReport]:
    if progress:
        progress(Progress(f"reading {source}", 0, None, 0))
    return read_records(source)


def question_row(question: str, layout: Layout, tokenizer: SpecialTokenizer) -> list[int]:
    """Return the tokens of the question segment: padded, or truncated as in training."""
    length = next(segment.length for segment in layout.segments if segment.name == QUESTION)
    tokens = tokenizer.encode(question)[:length]
    return [*tokens, *[tokenizer.pad] * (length - len(tokens))]


def _texts(record: Record) -> tuple[str, ...]:
    return record.question, record.plan, record.execution, record.answer


def _digest(split: RecordSplit) -> str:
    content = hashlib.sha256(split.tokens.tobytes())
    content.update(split.ends.tobytes())
    return content.hexdigest()


def _concatenate(parts: Sequence[RecordSplit]) -> RecordSplit:
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


class Rows(NamedTuple):
    """Clean sequences and what is to be done with their positions, each array [B, n]."""

    tokens: Int64s
    loss_mask: Bools  # positions that carry a loss when they are masked
    never_masked: Bools | None = None  # positions that stay clean although their segment is noised
    content: Bools | None = None  # positions of the loss mask that are not padding; None: all of them


class Sequences(Protocol):
    """The data of a diffusion objective."""

    @property
    def facts(self) -> DataFacts: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def base(self) -> Base | None:
        """The pretrained model that the run starts from."""

    def identity(self) -> dict[str, str]:
        """Return what must be equal on resume, besides the base."""

    @property
    def held_out(self) -> int:
        """The number of validation sequences."""

    @property
    def size(self) -> tuple[int, int] | None:
        """The tokens and bytes of the validation split, where they are known."""

    def training(self, samples: Int64s) -> Rows: ...

    def evaluation(self, numbers: Int64s) -> Rows: ...


@dataclass(frozen=True)
class TextSequences:
    """Windows of a text. The id after the tokenizer's last one is the mask."""

    text: BaseText
    seq_len: int
    index: Index | None = None  # None for a run that does not train

    @property
    def base(self) -> Base | None:
        return self.text.base

    def identity(self) -> dict[str, str]:
        return self.text.identity()

    @cached_property
    def facts(self) -> DataFacts:
        facts = self.text.facts
        val_tokens = facts.val_tokens if self.held_out else 0  # a split shorter than a window is never evaluated
        return replace(facts, vocab_size=facts.vocab_size + 1, val_tokens=val_tokens)

    @property
    def messages(self) -> tuple[str, ...]:
        return self.text.messages

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

    def held_out_sequences(self, seq_len: int) -> int:
        return self.held_out

    def training(self, samples: Int64s) -> Rows:
        assert self.index is not None
        return self._rows(self.text.tokens.train, self.index.starts(samples))

    def evaluation(self, numbers: Int64s) -> Rows:
        assert self.text.held_out is not None
        return self._rows(self.text.held_out, numbers * self.seq_len)

    def _rows(self, split: TokenSplit, starts: Int64s) -> Rows:
        tokens = split.windows(starts, self.seq_len).astype(np.int64)
        # Position 0 is exempt when it is the beginning-of-sequence token, as in BD3-LM: nothing precedes it from which
        # it could be predicted, and a sampler always starts with it.
        never = np.zeros(tokens.shape, dtype=bool)
        never[:, 0] = tokens[:, 0] == self.text.tokens.eot
        return Rows(tokens, ~never, never)


@dataclass(frozen=True)
class RecordSequences:
    """Rows of records, in the layout of their segments."""

    facts: DataFacts
    tokenizer: SpecialTokenizer | None = None  # None for steps that are only timed
    records: RecordData | None = None
    split: RecordSplit | None = None  # the validation split
    base: Base | None = None

    def identity(self) -> dict[str, str]:
        """Return nothing: the records are encoded with the base's own tokenizer, which the run's identity has."""
        return {}

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
    def messages(self) -> list[str]:
        return [] if self.records is None else self.records.report.lines()

    def row_keys(self, *, trained: bool) -> list[int] | None:
        """Return one key per training record, or per record that is evaluated."""
        to_train = None if self.records is None else self.records.train
        split = to_train if trained else self.split
        return None if split is None else [record.key for record in split.records]

    def held_out_sequences(self, seq_len: int) -> None:
        """Return None: the data are rows."""

    def training(self, samples: Int64s) -> Rows:
        assert self.records is not None
        return self._rows(self.records.train, self.records.index.sequences(samples))

    def evaluation(self, numbers: Int64s) -> Rows:
        assert self.split is not None
        return self._rows(self.split, numbers)

    def _rows(self, split: RecordSplit, numbers: Int64s) -> Rows:
        assert self.tokenizer is not None
        rows = split.rows(numbers)
        return Rows(**rows, content=rows["loss_mask"] & (rows["tokens"] != self.tokenizer.pad))


def reads_records(recipe: Recipe) -> bool:
    """Return whether the run reads records, that is questions with their answers, and not plain text."""
    return job(recipe.objective).can_answer(recipe)


def layout_of(recipe: Recipe) -> Layout:
    layout = job(recipe.objective).layout(recipe)
    assert layout is not None, "every diffusion job has one"
    return layout


def load_data(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> TextSequences | RecordSequences:
    """Load the recipe's data. With `for_evaluation`, all of them are the validation set."""
    if reads_records(recipe):
        base = None if recipe.model.base is None else open_base(str(recipe.model.base))
        found = load_records(
            recipe.data if base is None else own_tokenizer(recipe.data, base),
            layout_of(recipe),
            seed=recipe.train.seed,
            val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
            progress=progress,
        )
        return RecordSequences(found.facts, found.tokenizer, found, found.train if for_evaluation else found.val, base)
    text = load_base_text(recipe, for_evaluation=for_evaluation, progress=progress)
    corpus, seq_len = text.corpus, recipe.data.seq_len
    assert isinstance(corpus, Corpus)
    index = None if for_evaluation else training_index(recipe, corpus)
    sequences = TextSequences(text, seq_len, index)
    if for_evaluation and not sequences.held_out:
        tokens = 0 if text.held_out is None else len(text.held_out)
        what = f"the text has {tokens:,} tokens, fewer than one window of {seq_len:,}: there is nothing to evaluate."
        raise UserError(what, where=str(recipe.data.source), fix="Give a longer text.")
    return sequences


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> TextSequences | RecordSequences:
    """Return data that hold a tokenizer and no rows, for a model that only samples; its data may be gone."""
    if reads_records(recipe):
        return RecordSequences(facts, load_run_tokenizer(facts, folder))
    plain = replace(facts, vocab_size=facts.vocab_size - 1)
    return TextSequences(base_text_tokenizer(plain, folder, recipe), recipe.data.seq_len)


# ----------------------------------------------------------------------------------------------------
# A preview of the records.


_PADDING = re.compile(f"(?:{re.escape(PAD)}){{2,}}")


def preview_records(records: RecordData, count: int) -> list[SampleView]:
    """Return the first `count` records in the order of training, with repeated padding written as a count."""
    views = []
    for number in range(min(count, len(records.index))):
        sequence = records.index.sequences(np.array([number]))
        tokens, loss_mask = (records.train.rows(sequence)[name][0] for name in ("tokens", "loss_mask"))
        runs = [
            replace(run, text=_PADDING.sub(lambda match: f"{PAD} × {len(match[0]) // len(PAD)}", run.text))
            for run in token_runs(records.tokenizer, tokens, loss_mask)
        ]
        title = (
            f"sequence {int(sequence[0])}, sample 1 of 1: {len(tokens):,} tokens, {int(loss_mask.sum()):,} in the loss"
        )
        views.append(SampleView(title, runs))
    return views


# ----------------------------------------------------------------------------------------------------
# The forward process of block diffusion: which tokens are masked, as a function of (seed, sample, global batch) alone.


# Separate random streams, which also differ from those of the data order and of the held-out split.
_LEVEL_GROUP, _OFFSET_GROUP, _MASK_GROUP = 1 << 20, (1 << 20) + 1, (1 << 20) + 2

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Clip:
    """The interval that mask probabilities are drawn from: BD3-LM's clipped noise schedule."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"[{self.low}, {self.high}] is not an interval within [0, 1]")


def noised_blocks(layout: Layout) -> int:
    """Return how many mask probabilities a sequence has: one per block that is ever masked."""
    return sum(segment.blocks for segment in layout.segments if not segment.given)


def mask_probabilities(seed: int, samples: Int64s, global_batch: int, blocks: int, clip: Clip) -> Float64s:
    """Return p [B, blocks] for these sample numbers, each of which has `blocks` noised blocks.

    A permutation drawn anew for each step assigns the parts of the interval to the blocks of the global batch. The
    offset within a part is one draw per step, shared by all blocks.
    """
    steps_B, members_B = np.divmod(np.asarray(samples, dtype=np.int64), global_batch)
    parts = global_batch * blocks
    slots_BK = members_B[:, None] * blocks + np.arange(blocks)
    keys_BK = np.broadcast_to(order_keys(seed, steps_B, _LEVEL_GROUP)[:, None], slots_BK.shape)
    part_BK = permute(slots_BK.ravel(), parts, keys_BK.ravel()).reshape(slots_BK.shape)
    # 32 bits, so that part + offset is exact in float64. Never 0, so that 1/p is finite if the interval begins at 0.
    offset_B = ((order_keys(seed, steps_B, _OFFSET_GROUP) >> np.uint64(32)) + 0.5) / 2.0**32
    u_BK = (part_BK + offset_B[:, None]) / parts
    p_BK: Float64s = clip.low + (clip.high - clip.low) * u_BK
    return p_BK


def expand_to_positions(p_BK: Float64s, layout: Layout) -> Float64s:
    """Return the p of each position [B, n]; 0 in given segments, which are never masked."""
    if p_BK.shape[1] != noised_blocks(layout):
        raise ValueError(f"{p_BK.shape[1]} mask probabilities for {noised_blocks(layout)} noised blocks")
    noised = np.array(layout.noised)
    # Given blocks have no column in p, so count the noised blocks only.
    begins = np.diff(np.array(layout.block_of), prepend=-1) > 0
    column = np.cumsum(begins & noised) - 1
    return np.where(noised, p_BK[:, np.maximum(column, 0)], 0.0)


def masked_positions(
    seed: int, samples: Int64s, layout: Layout, p_BK: Float64s, never_masked: Bools | None = None
) -> Bools:
    """Return which positions are masked [B, n]; never those of given segments nor those in `never_masked` [B, n]."""
    keys_B = order_keys(seed, np.asarray(samples, dtype=np.int64), _MASK_GROUP)
    steps_n = np.arange(layout.length, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits_Bn = _mix(keys_B[:, None] + steps_n)
    chance_Bn = (bits_Bn >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1) with the 53 bits of a float64
    masked_Bn: Bools = chance_Bn < expand_to_positions(p_BK, layout)
    return masked_Bn if never_masked is None else masked_Bn & ~never_masked
