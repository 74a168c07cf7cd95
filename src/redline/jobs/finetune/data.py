"""What fine-tuning reads: samples of weighted sources, split, measured against `seq_len`, and packed.

A sample longer than `seq_len` is overlong: it is dropped, cut (its beginning is kept; if no learnt token is in that,
it is dropped too), or an error. Rows are held out by the row rule of
`data.splits`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from redline.cache import (
    atomic_dir,
    cache_dir,
    check_regular,
    discard_dir,
    explain_write_errors,
    open_regular,
    read_text,
)
from redline.data.chat import Conversation, read_conversations
from redline.data.chat_template import KEY, ChatTokenizer, Coded, Rendered, TemplateRefusalError, load_chat_tokenizer
from redline.data.index import order_keys, permute
from redline.data.mixture import RowIndex, epoch_sample, row_index, row_mixture_key, shares_of
from redline.data.packing import IGNORE, best_fit
from redline.data.read_stats import EMPTY, Progress, ProgressCallback, ReadStats
from redline.data.sources import source_bytes, source_identity
from redline.data.splits import split_rows
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.jobs.preview import SampleView, token_runs
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Part

# ----------------------------------------------------------------------------------------------------
# The samples of one source as flat arrays on disk: made once, mapped into memory afterwards.
#
# A folder of the cache is named after everything that its samples depend on. It appears whole or not at all, is checked
# against its digests when it is opened, and is made again if they do not agree.


# How rows become samples. Whoever changes that raises the number, so that old folders are not taken.
SCHEMA = "redline-answers-1"
_AT_ONCE = 512  # conversations
_FIX = f"Look at the row, or give another template ({KEY})."
_DTYPES = {
    "tokens": np.int32,
    "learnt": np.bool_,
    "offsets": np.int64,
    "keys": np.uint64,
    "rows": np.int64,
    "first": np.int32,
    "count": np.int32,
}


@dataclass(frozen=True)
class AnswerStore:
    """Sample i has tokens[offsets[i] : offsets[i + 1]]. A row gives one sample, or one for each of its answers."""

    tokens: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]  # stand for what the row says: equal for equal rows
    rows: npt.NDArray[np.int64]  # which usable row of the source it is from
    first: npt.NDArray[np.int32]  # the first token that is learnt
    count: npt.NDArray[np.int32]  # of tokens that are learnt
    counts: dict[str, Any]  # what became of the rows
    fingerprint: str

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)


def open_store(
    source: str, tokenizer: ChatTokenizer, learn: str, progress: ProgressCallback | None = None
) -> AnswerStore:
    """The source's samples; from the cache when they are there."""
    folder = cache_dir() / "answers" / digest_of([SCHEMA, source_identity(source), tokenizer.identity, learn])
    if folder.exists():
        try:
            return _read(folder)
        except (OSError, ValueError, KeyError, TypeError):
            discard_dir(folder)
    with explain_write_errors(folder):
        try:
            with atomic_dir(folder) as temporary:
                _write(temporary, source, tokenizer, learn, progress)
        except OSError:
            if not folder.exists():  # else another process was faster, with the same content
                raise
        return _read(folder)


def _read(folder: Path) -> AnswerStore:
    meta = json.loads(read_text(folder / "meta.json"))
    body = {key: value for key, value in meta.items() if key != "digest"}
    described = (
        meta["digest"] == digest_of(body) if "digest" in meta else meta.keys() <= {"schema", "digests", "counts"}
    )
    if not described or meta["schema"] != SCHEMA or meta["digests"] != _digests(folder):
        raise ValueError("damaged")
    arrays: dict[str, Any] = {name: np.load(check_regular(folder / f"{name}.npy"), mmap_mode="r") for name in _DTYPES}
    return AnswerStore(**arrays, counts=meta["counts"], fingerprint=digest_of(meta["digests"]))


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for name in _DTYPES:
        with open(folder / f"{name}.npy", "rb", opener=open_regular) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _write(folder: Path, source: str, tokenizer: ChatTokenizer, learn: str, progress: ProgressCallback | None) -> None:
    stats = ReadStats(source, source_bytes(source))
    files = {name: _Growing(folder / f"{name}.npy", np.dtype(kind)) for name, kind in _DTYPES.items()}
    try:
        files["offsets"].append(np.zeros(1))
        for samples in _coded(source, tokenizer, learn, stats):
            _append(files, samples)
            if progress:
                progress(Progress(f"preparing {source}", int(stats.bytes), stats.total, files["tokens"].length))
    finally:
        for file in files.values():
            file.close()
    stats.refuse_mostly_bad()
    counts = {**stats.counts(), "empty": stats.empty_rows, "examples": stats.examples}
    meta = json.loads(json.dumps({"schema": SCHEMA, "digests": _digests(folder), "counts": counts}))
    (folder / "meta.json").write_text(json.dumps({**meta, "digest": digest_of(meta)}), encoding="utf-8")


Sample = tuple[int, int, Coded]  # number and key of its row


def _coded(source: str, tokenizer: ChatTokenizer, learn: str, stats: ReadStats) -> Iterator[list[Sample]]:
    tokenizer.begin_source()
    numbered = enumerate(read_conversations(source, stats))
    while some := list(itertools.islice(numbered, _AT_ONCE)):
        texts: list[Rendered] = []
        origins: list[tuple[int, Conversation]] = []
        for number, conversation in some:
            try:
                rendered = tokenizer.render(conversation, learn)
            except TemplateRefusalError as reason:
                stats.bad_row(conversation.place, f"the chat template ({tokenizer.template_name}): {reason}", _FIX)
                continue
            texts += rendered
            origins += [(number, conversation)] * len(rendered)
        found = []
        for (number, conversation), coded in zip(origins, tokenizer.code(texts, learn), strict=True):
            if coded.learnt.any():
                found.append((number, conversation.key(), coded))
            else:
                stats.bad_row(conversation.place, f"{EMPTY}answer once it is tokenised", _FIX)
        if found:
            yield found


def _append(files: dict[str, _Growing], samples: list[Sample]) -> None:
    coded = [sample[2] for sample in samples]
    before = files["tokens"].length
    files["tokens"].append(np.concatenate([one.tokens for one in coded]))
    files["learnt"].append(np.concatenate([one.learnt for one in coded]))
    files["offsets"].append(before + np.cumsum([len(one.tokens) for one in coded]))
    files["keys"].append(np.array([key for _, key, _ in samples], dtype=np.uint64))
    files["rows"].append(np.array([number for number, _, _ in samples]))
    files["first"].append(np.array([one.learnt.argmax() for one in coded]))
    files["count"].append(np.array([one.learnt.sum() for one in coded]))


class _Growing:
    """A .npy file of one dimension that is written piece by piece; numpy leaves room in its header for the length."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype, self.length = dtype, 0
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115, closed by close()
        self._header()
        self._begin = self._file.tell()

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin
        self._file.close()

    def _header(self) -> None:
        description = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


# ----------------------------------------------------------------------------------------------------
# Samples in sequences of one length: which of them share a sequence, in which order sequences come, and their rows.


Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Members:
    """Samples of several stores, each from its beginning and perhaps not to its end."""

    stores: tuple[AnswerStore, ...]
    part: Int64s  # which store
    number: Int64s  # which of its samples
    length: Int64s  # how many of its tokens

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, place: int) -> tuple[Int32s, Bools]:
        """Tokens, and which of them are learnt."""
        store = self.stores[self.part[place]]
        begin = int(store.offsets[self.number[place]])
        end = begin + int(self.length[place])
        return store.tokens[begin:end], store.learnt[begin:end]

    def take(self, places: Int64s) -> Members:
        return Members(self.stores, self.part[places], self.number[places], self.length[places])

    @property
    def keys(self) -> list[int]:
        """One key per distinct row; rows that say the same have the same key."""
        every = [store.keys[self.number[self.part == part]] for part, store in enumerate(self.stores)]
        return [int(key) for key in np.unique(np.concatenate(every))]

    @property
    def learnt(self) -> int:
        """How many tokens of them are learnt."""
        return int(self._learnt().sum())

    def targets(self) -> Int64s:
        """How many targets each has: a sample's first token is nobody's."""
        first = np.zeros(len(self), dtype=np.int64)
        for part, store in enumerate(self.stores):
            own = self.part == part
            first[own] = store.learnt[store.offsets[self.number[own]]]
        return self._learnt() - first

    def _learnt(self) -> Int64s:
        found = np.zeros(len(self), dtype=np.int64)
        for part, store in enumerate(self.stores):
            own = np.flatnonzero(self.part == part)
            number, length = self.number[own], self.length[own]
            whole = store.lengths[number] == length
            found[own[whole]] = store.count[number[whole]]
            cut = zip(own[~whole], store.offsets[number[~whole]], length[~whole], strict=True)
            for place, begin, size in cut:
                found[place] = int(store.learnt[begin : begin + size].sum())
        return found


def joined(some: Sequence[Members]) -> Members:
    """All of them, one after the other; they are of the same stores."""
    columns = [np.concatenate([getattr(one, name) for one in some]) for name in ("part", "number", "length")]
    return Members(some[0].stores, *columns)


class PackedSplit:
    """Sequences of `seq_len` tokens. What no sample fills is padding: a document of its own that teaches nothing."""

    def __init__(self, members: Members, borders: Int64s, seq_len: int, pad: int) -> None:
        self.samples, self.seq_len, self.pad = members, seq_len, pad
        self.borders = borders  # sequence n has the samples from borders[n] to borders[n + 1]

    def __len__(self) -> int:
        return len(self.borders) - 1

    @property
    def fill(self) -> float:
        """The share of all positions that hold a token of a sample."""
        return int(self.samples.length.sum()) / (len(self) * self.seq_len)

    def means(self, numbers: Int64s, *, pack: bool) -> dict[str, Any]:
        """Over these sequences: the share of positions that have a target, and the mean length of the document that a
        position stands in; padding is a document of its own. Without `pack`, a row is one document."""
        lengths, ends = self.samples.length, np.cumsum(self.samples.length)
        squares = np.concatenate([[0], np.cumsum(lengths**2)])
        targets = np.concatenate([[0], np.cumsum(self.samples.targets())])
        first, last = self.borders[numbers], self.borders[numbers + 1]
        filled = np.concatenate([[0], ends])
        padding = self.seq_len - (filled[last] - filled[first])
        positions = len(numbers) * self.seq_len
        squared = int((squares[last] - squares[first] + padding**2).sum())
        found = {"scored": int((targets[last] - targets[first]).sum()) / positions}
        return found | ({"document": squared / positions} if pack else {})

    def rows(self, numbers: Int64s) -> dict[str, npt.NDArray[np.integer]]:
        """`inputs` and `targets` [n, seq_len], the running number of the sample and the position in it."""
        shape = (len(numbers), self.seq_len)
        inputs_BT = np.full(shape, self.pad, dtype=np.int64)
        targets_BT = np.full(shape, IGNORE, dtype=np.int64)
        documents_BT, positions_BT = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        count_T = np.arange(self.seq_len, dtype=np.int32)
        for row, number in enumerate(np.asarray(numbers).tolist()):
            at = 0
            places = range(int(self.borders[number]), int(self.borders[number + 1]))
            for document, place in enumerate(places):
                tokens, learnt = self.samples[place]
                end = at + len(tokens)
                inputs_BT[row, at:end] = tokens
                targets_BT[row, at : end - 1] = np.where(learnt[1:], tokens[1:], IGNORE)
                documents_BT[row, at:end] = document
                positions_BT[row, at:end] = count_T[: end - at]
                at = end
            documents_BT[row, at:] = len(places)
            positions_BT[row, at:] = count_T[: self.seq_len - at]
        return {"inputs": inputs_BT, "targets": targets_BT, "documents": documents_BT, "positions": positions_BT}


def packed(members: Members, seq_len: int, *, pack: bool, seed: int | None, group: int) -> tuple[Members, Int64s]:
    """The samples in the order of their sequences, and where each sequence begins. Without `seed`: not shuffled."""
    count = len(members)
    order = np.arange(count, dtype=np.int64)
    if seed is not None:
        order = permute(order, count, int(order_keys(seed, np.zeros(1, dtype=np.int64), group)[0]))
    shuffled = members.take(order)
    if not pack:
        return shuffled, np.arange(count + 1, dtype=np.int64)
    bins = best_fit(shuffled.length, seq_len)
    borders = np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64)
    return shuffled.take(np.argsort(bins, kind="stable")), borders


DROP, CUT, ERROR = "drop", "cut", "error"
_KEY = "finetune.overlong"
# Numbers of random streams, so that no two uses share one; epochs use the numbers of the sources, splits 1 << 16.
_VAL_GROUP, _PACK_GROUP = 1 << 17, 1 << 18


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

    def details(self) -> list[str]:
        """Return the counts as lines of a table, for `--preview`."""
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.reasons.items())
        overlong = f"{self.overlong:,} overlong: {self.cut:,} cut, {self.overlong - self.cut:,} dropped"
        lines = {
            "rows": f"{self.rows:,}, {self.bad:,} of them bad" + (f" ({reasons})" if reasons else ""),
            "samples": f"{self.train_samples:,} to train on, {self.val_samples:,} held out; {overlong}"
            + (f"; {self.duplicates:,} duplicates left out" if self.duplicates else ""),
            "tokens": f"{self.tokens:,}, {self.learnt:,} of them learnt ({self.learnt / max(1, self.tokens):.1%})",
            "sequences": f"{self.sequences:,}, filled to {self.fill:.1%}",
        }
        return [
            *(f"  {name:10s} {line}" for name, line in lines.items()),
            *(f"  {'bad':10s} {example}" for example in self.examples),
        ]


@dataclass(frozen=True)
class AnswerReport:
    sources: tuple[SourceReport, ...]
    fill: float  # of all sequences of training
    template: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return a sentence per source: how many rows are used, and how many are left out and why."""
        held_out = any(source.val_samples for source in self.sources)
        return [source.line(held_out=held_out) for source in self.sources]

    def details(self) -> list[str]:
        """Return the counts of each source as lines of a table, for `--preview`."""
        lines = []
        for source in self.sources:
            share = f" ({source.share:.1%} of the sequences)" if len(self.sources) > 1 else ""
            lines += [f"{source.source}{share}", *source.details()]
        return [*lines, f"template     {self.template or 'none: a prompt is a line, and its completion follows'}"]


@dataclass(frozen=True)
class EncodedQuestion:
    prompt: list[int]  # token ids, as the model reads it
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

    def questions(self, split: PackedSplit, count: int) -> list[EncodedQuestion]:
        """Return the first `count` samples up to their first answer, and that answer.

        Only for data whose answers are learnt and whose prompts are not: the loss mask shows where an answer begins.
        """
        found = []
        for place in range(min(count, len(split.samples))):
            tokens, learnt = split.samples[place]
            begin = int(learnt.argmax())
            rest = learnt[begin:]
            end = begin + (len(rest) if rest.all() else int(rest.argmin()))
            reference = self.tokenizer.decode(tokens[begin:end], special=False)
            found.append(EncodedQuestion(tokens[:begin].tolist(), reference))
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
    splits = split_rows(
        names,
        [store.keys[members.number] for store, members in zip(stores, fitting, strict=True)],
        seed,
        val_fraction,
        dedup=data.dedup,
        rows=[store.rows[members.number] for store, members in zip(stores, fitting, strict=True)],
    )
    train = [members.take(split.train) for members, split in zip(fitting, splits, strict=True)]
    val = [members.take(split.val) for members, split in zip(fitting, splits, strict=True)]
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


# ----------------------------------------------------------------------------------------------------
# A preview of the samples.


_PREVIEW_TOKENS = 2000  # of one sample


def preview_samples(data: AnswerData, count: int, *, most: int = _PREVIEW_TOKENS) -> list[SampleView]:
    """Return the first `count` samples in the order of training."""
    return list(itertools.islice(_previews(data, most), count))


def _previews(data: AnswerData, most: int) -> Iterator[SampleView]:
    split = data.train
    for number in range(len(data.index)):
        sequence = int(data.index.sequences(np.array([number]))[0])
        first, end = int(split.borders[sequence]), int(split.borders[sequence + 1])
        for place in range(first, end):
            tokens, learnt = split.samples[place]
            cut = ", the beginning" if len(tokens) > most else ""
            title = (
                f"sequence {sequence}, sample {place - first + 1} of {end - first}: "
                f"{len(tokens):,} tokens, {int(learnt.sum()):,} learnt{cut}"
            )
            yield SampleView(title, list(token_runs(data.tokenizer, tokens[:most], learnt[:most])))
