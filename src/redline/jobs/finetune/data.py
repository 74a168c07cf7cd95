"""The data of fine-tuning: conversations of several sources as samples, split, fitted to `seq_len`, and packed.

A sample longer than `seq_len` is overlong. `finetune.overlong` says what happens to it: it is dropped, it is cut (and
dropped all the same if no target is left), or it is an error. Rows are held out by the row rule of `data.splits`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
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
from redline.data.chat import SYSTEM, Conversation, read_conversations
from redline.data.chat_template import (
    KEY,
    ChatTokenizer,
    EncodedSample,
    Rendered,
    TemplateRefusalError,
    load_chat_tokenizer,
)
from redline.data.corpus import RowIndex, epoch_sample, row_index, row_mixture_key, shares_of
from redline.data.loader import IGNORE, best_fit, order_keys, permute
from redline.data.sources import EMPTY, Progress, ProgressCallback, ReadStats, source_bytes, source_identity
from redline.data.splits import split_rows
from redline.data.tokens import digest_of
from redline.errors import UserError
from redline.jobs.preview import SampleView, token_runs
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Part

# ----------------------------------------------------------------------------------------------------
# The samples of one source as flat arrays in the cache: written once, mapped into memory afterwards.
#
# The name of a folder is a digest of everything that its samples depend on. The folder appears complete or not at all.
# Its files are compared with their digests when it is opened, and written again if they differ.


# The version of the rules by which rows become samples. Raise it when they change, so that old folders are not used.
SCHEMA = "redline-answers-1"
# The version of the rules by which rows are usable. When it is raised, only folders of sources with bad rows are made
# again: all others would be the same. 2: rows of plain text are usable.
_RULES = 2
_BATCH_ROWS = 512  # conversations that are encoded together
_FIX = f"Check the row, or set {KEY} to another template."
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
    """The samples of one source. Sample i has tokens[offsets[i] : offsets[i + 1]].

    A row gives one sample, or one for each of its answers if the chat template rewrites earlier turns.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]  # 64 bits that stand for the content of the row
    rows: npt.NDArray[np.int64]  # the number of the row, among the usable rows of the source
    first: npt.NDArray[np.int32]  # the first token in the loss mask; 0 for plain text, which has no question before it
    count: npt.NDArray[np.int32]  # of tokens in the loss mask
    counts: dict[str, Any]  # how many rows were read, and how many are bad and why
    fingerprint: str

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)


def open_store(
    source: str, tokenizer: ChatTokenizer, learn: str, progress: ProgressCallback | None = None
) -> AnswerStore:
    """Open the samples of a source, after writing them to the cache if they are not there."""
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
            if not folder.exists():  # otherwise another process has written the same folder in the meantime
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
    if meta.get("rules", 1) < _RULES and meta["counts"]["bad_rows"]:
        raise ValueError("written by older rules, by which more rows were bad")
    arrays: dict[str, Any] = {name: np.load(check_regular(folder / f"{name}.npy"), mmap_mode="r") for name in _DTYPES}
    arrays["loss_mask"] = arrays.pop("learnt")  # the name of the file, which older releases read too
    return AnswerStore(**arrays, counts=meta["counts"], fingerprint=digest_of(meta["digests"]))


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for name in _DTYPES:
        with open(folder / f"{name}.npy", "rb", opener=open_regular) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _write(folder: Path, source: str, tokenizer: ChatTokenizer, learn: str, progress: ProgressCallback | None) -> None:
    stats = ReadStats(source, source_bytes(source))
    files = {name: _GrowingArray(folder / f"{name}.npy", np.dtype(kind)) for name, kind in _DTYPES.items()}
    try:
        files["offsets"].append(np.zeros(1))
        for samples in _encoded(source, tokenizer, learn, stats):
            _append(files, samples)
            if progress:
                progress(Progress(f"preparing {source}", int(stats.bytes), stats.total, files["tokens"].length))
    finally:
        for file in files.values():
            file.close()
    stats.refuse_mostly_bad()
    counts = {**stats.counts(), "empty": stats.empty_rows, "examples": stats.examples}
    meta = json.loads(json.dumps({"schema": SCHEMA, "rules": _RULES, "digests": _digests(folder), "counts": counts}))
    (folder / "meta.json").write_text(json.dumps({**meta, "digest": digest_of(meta)}), encoding="utf-8")


Sample = tuple[int, int, EncodedSample]  # number and key of its row


def _encoded(source: str, tokenizer: ChatTokenizer, learn: str, stats: ReadStats) -> Iterator[list[Sample]]:
    tokenizer.begin_source()
    numbered = enumerate(read_conversations(source, stats))
    while some := list(itertools.islice(numbered, _BATCH_ROWS)):
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
        for (number, conversation), coded in zip(origins, tokenizer.encode_rendered(texts, learn), strict=True):
            if coded.loss_mask.any():
                found.append((number, conversation.key(), coded))
            else:
                empty = f"{EMPTY}answer once it is tokenised"
                what = "a text of one token, which leaves nothing to predict" if coded.is_text else empty
                stats.bad_row(conversation.place, what, _FIX)
        if found:
            yield found


def _append(files: dict[str, _GrowingArray], samples: list[Sample]) -> None:
    coded = [sample[2] for sample in samples]
    before = files["tokens"].length
    files["tokens"].append(np.concatenate([one.tokens for one in coded]))
    files["learnt"].append(np.concatenate([one.loss_mask for one in coded]))
    files["offsets"].append(before + np.cumsum([len(one.tokens) for one in coded]))
    files["keys"].append(np.array([key for _, key, _ in samples], dtype=np.uint64))
    files["rows"].append(np.array([number for number, _, _ in samples]))
    files["first"].append(np.array([0 if one.is_text else one.loss_mask.argmax() for one in coded]))
    files["count"].append(np.array([one.loss_mask.sum() for one in coded]))


class _GrowingArray:
    """A .npy file of one dimension that is written piece by piece. numpy pads its header, so a longer length fits."""

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
# Packing: which samples share a sequence, and the batches of sequences.


Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Members:
    """Samples of several stores. Of each sample the first `length` tokens are used, which may not be all of them."""

    stores: tuple[AnswerStore, ...]
    part: Int64s  # which store
    number: Int64s  # which of its samples
    length: Int64s  # how many of its tokens

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, place: int) -> tuple[Int32s, Bools]:
        """Return the tokens and the loss mask of a sample."""
        store = self.stores[self.part[place]]
        begin = int(store.offsets[self.number[place]])
        end = begin + int(self.length[place])
        return store.tokens[begin:end], store.loss_mask[begin:end]

    def take(self, places: Int64s) -> Members:
        return Members(self.stores, self.part[places], self.number[places], self.length[places])

    @property
    def keys(self) -> list[int]:
        """Return one key per distinct row; rows with equal content have the same key."""
        every = [store.keys[self.number[self.part == part]] for part, store in enumerate(self.stores)]
        return [int(key) for key in np.unique(np.concatenate(every))]

    @property
    def is_text(self) -> Bools:
        """Return for each sample whether it is plain text, which cannot be asked as a question."""
        found = np.zeros(len(self), dtype=bool)
        for part, store in enumerate(self.stores):
            own = self.part == part
            found[own] = store.first[self.number[own]] == 0
        return found

    @property
    def loss_tokens(self) -> int:
        """Return the number of tokens in the loss masks."""
        return int(self._loss_tokens().sum())

    def targets(self) -> Int64s:
        """Return the number of targets of each sample. Its first token is no target: nothing comes before it."""
        first = np.zeros(len(self), dtype=np.int64)
        for part, store in enumerate(self.stores):
            own = self.part == part
            first[own] = store.loss_mask[store.offsets[self.number[own]]]
        return self._loss_tokens() - first

    def _loss_tokens(self) -> Int64s:
        found = np.zeros(len(self), dtype=np.int64)
        for part, store in enumerate(self.stores):
            own = np.flatnonzero(self.part == part)
            number, length = self.number[own], self.length[own]
            whole = store.lengths[number] == length
            found[own[whole]] = store.count[number[whole]]
            cut = zip(own[~whole], store.offsets[number[~whole]], length[~whole], strict=True)
            for place, begin, size in cut:
                found[place] = int(store.loss_mask[begin : begin + size].sum())
        return found


def joined(some: Sequence[Members]) -> Members:
    """Concatenate members that refer to the same stores."""
    columns = [np.concatenate([getattr(one, name) for one in some]) for name in ("part", "number", "length")]
    return Members(some[0].stores, *columns)


class PackedSplit:
    """Sequences of `seq_len` tokens. The rest of a sequence is padding: a document of its own, without targets."""

    def __init__(self, members: Members, sequence_starts: Int64s, seq_len: int, pad: int) -> None:
        self.samples, self.seq_len, self.pad = members, seq_len, pad
        # Sequence n has the samples from sequence_starts[n] up to sequence_starts[n + 1].
        self.sequence_starts = sequence_starts

    def __len__(self) -> int:
        return len(self.sequence_starts) - 1

    @property
    def fill(self) -> float:
        """Return the share of all positions that hold a token of a sample."""
        return int(self.samples.length.sum()) / (len(self) * self.seq_len)

    def means(self, numbers: Int64s, *, pack: bool) -> dict[str, Any]:
        """Return means over these sequences: `scored`, the share of positions with a target, and `document`, the mean
        length of the document at a position (padding is a document of its own). Without `pack` there is no
        `document`, because a sequence is then one document."""
        lengths, ends = self.samples.length, np.cumsum(self.samples.length)
        squares = np.concatenate([[0], np.cumsum(lengths**2)])
        targets = np.concatenate([[0], np.cumsum(self.samples.targets())])
        first, last = self.sequence_starts[numbers], self.sequence_starts[numbers + 1]
        filled = np.concatenate([[0], ends])
        padding = self.seq_len - (filled[last] - filled[first])
        positions = len(numbers) * self.seq_len
        squared = int((squares[last] - squares[first] + padding**2).sum())
        found = {"scored": int((targets[last] - targets[first]).sum()) / positions}
        return found | ({"document": squared / positions} if pack else {})

    def rows(self, numbers: Int64s) -> dict[str, npt.NDArray[np.integer]]:
        """Return `inputs`, `targets`, `documents` (the number of the sample in its sequence) and `positions` (in the
        sample), all [n, seq_len]."""
        shape = (len(numbers), self.seq_len)
        inputs_BT = np.full(shape, self.pad, dtype=np.int64)
        targets_BT = np.full(shape, IGNORE, dtype=np.int64)
        documents_BT, positions_BT = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        count_T = np.arange(self.seq_len, dtype=np.int32)
        for row, number in enumerate(np.asarray(numbers).tolist()):
            at = 0
            places = range(int(self.sequence_starts[number]), int(self.sequence_starts[number + 1]))
            for document, place in enumerate(places):
                tokens, loss_mask = self.samples[place]
                end = at + len(tokens)
                inputs_BT[row, at:end] = tokens
                targets_BT[row, at : end - 1] = np.where(loss_mask[1:], tokens[1:], IGNORE)
                documents_BT[row, at:end] = document
                positions_BT[row, at:end] = count_T[: end - at]
                at = end
            documents_BT[row, at:] = len(places)
            positions_BT[row, at:] = count_T[: self.seq_len - at]
        return {"inputs": inputs_BT, "targets": targets_BT, "documents": documents_BT, "positions": positions_BT}


def packed(members: Members, seq_len: int, *, pack: bool, seed: int | None, group: int) -> tuple[Members, Int64s]:
    """Return the samples in the order of their sequences, and the first sample of each sequence.

    Without `seed` the samples are not shuffled. `group` is the number of the random stream.
    """
    count = len(members)
    order = np.arange(count, dtype=np.int64)
    if seed is not None:
        order = permute(order, count, int(order_keys(seed, np.zeros(1, dtype=np.int64), group)[0]))
    shuffled = members.take(order)
    if not pack:
        return shuffled, np.arange(count + 1, dtype=np.int64)
    bins = best_fit(shuffled.length, seq_len)
    sequence_starts = np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64)
    return shuffled.take(np.argsort(bins, kind="stable")), sequence_starts


DROP, CUT, ERROR = "drop", "cut", "error"
_KEY = "finetune.overlong"
# Numbers of random streams, so that no two uses share one; epochs use the numbers of the sources, splits 1 << 16.
_VAL_GROUP, _PACK_GROUP = 1 << 17, 1 << 18


@dataclass(frozen=True)
class SourceReport:
    """How the rows of a source were used: how many are bad, overlong, cut or duplicates, and how many are left."""

    source: str
    weight: float | None  # as the recipe states it
    share: float  # of the sequences of training
    rows: int
    bad: int
    empty: int
    reasons: dict[str, int]  # why rows are bad
    examples: list[str]  # place and reason of the first few bad rows
    overlong: int  # samples longer than seq_len
    cut: int  # of these, kept in part; the rest is dropped
    duplicates: int  # left out: an equal row is held out (or, with data.dedup, came before)
    train_samples: int
    val_samples: int
    tokens: int  # of training
    learnt: int  # tokens in the loss mask
    sequences: int
    fill: float

    def line(self, *, held_out: bool = True) -> str:
        used = f"{self.source}: {self.rows:,} rows, {self.train_samples:,} used" + (
            f" to train on and {self.val_samples:,} held out" if held_out else ""
        )
        dropped = self.overlong - self.cut
        left_out = {
            "cannot be used": self.bad,
            "longer than data.seq_len, dropped": dropped,
            "longer than data.seq_len, cut": self.cut,
            "left out: an equal row is held out or came before": self.duplicates,
        }
        why = [f"{count:,} {reason}" for reason, count in left_out.items() if count]
        most = dropped > (self.train_samples + self.val_samples)
        return "; ".join([used, *why, *(["most of them are too long: raise data.seq_len"] if most else [])])

    def details(self) -> list[str]:
        """Return the counts as lines of a table, for `--preview`."""
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.reasons.items())
        overlong = f"{self.overlong:,} overlong: {self.cut:,} cut, {self.overlong - self.cut:,} dropped"
        lines = {
            "rows": f"{self.rows:,}, {self.bad:,} of them bad" + (f" ({reasons})" if reasons else ""),
            "samples": f"{self.train_samples:,} to train on, {self.val_samples:,} held out; {overlong}"
            + (f"; {self.duplicates:,} duplicates left out" if self.duplicates else ""),
            "tokens": f"{self.tokens:,}, {self.learnt:,} of them in the loss ({self.learnt / max(1, self.tokens):.1%})",
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
        """Return the sequences with these global sample numbers. It depends on the seed and the numbers alone."""
        return self.train.rows(self.index.sequences(samples))

    def questions(self, split: PackedSplit, count: int) -> list[EncodedQuestion]:
        """Return the first `count` samples with a question up to their first answer, and that answer.

        Only for data with `finetune.learn=answers`: the loss mask then shows where an answer begins.
        """
        questions = []
        for place in np.flatnonzero(~split.samples.is_text)[:count].tolist():
            tokens, loss_mask = split.samples[place]
            begin = int(loss_mask.argmax())
            rest = loss_mask[begin:]
            end = begin + (len(rest) if rest.all() else int(rest.argmin()))
            reference = self.tokenizer.decode(tokens[begin:end], special=False)
            questions.append(EncodedQuestion(tokens[:begin].tolist(), reference))
        return questions


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
    """Read all sources as packed sequences; `folder` holds the tokenizer. With `val_fraction` 0 nothing is held out."""
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
    sizes = [len(sequence_starts) - 1 for _, sequence_starts in each]
    index = row_index(sizes, data.parts, seed, shuffle=data.shuffle)
    trained = PackedSplit(joined([one for one, _ in each]), _all_sequence_starts(each), seq_len, tokenizer.pad)
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
        _report(part, share, store, fit, one, sequence_starts, held, seq_len)
        for part, share, store, fit, (one, sequence_starts), held in zip(
            data.parts, shares_of(sizes, data.parts), stores, fitting, each, val, strict=True
        )
    )
    report = AnswerReport(reports, trained.fill, tokenizer.template_name)
    return AnswerData(facts, trained, validated, tokenizer, report, index)


def _fitting(source: str, stores: tuple[AnswerStore, ...], part: int, seq_len: int, overlong: str) -> Members:
    """Return the samples of a source that are kept, with the length that is kept of each."""
    store = stores[part]
    lengths = store.lengths
    too_long = lengths > seq_len
    if overlong == ERROR and too_long.any():
        what = f"{int(too_long.sum()):,} of {len(store):,} samples are longer than data.seq_len={seq_len}."
        fix = f"Set data.seq_len to at least {int(lengths.max())}, or {_KEY} to {DROP} or {CUT}."
        raise UserError(what, where=source, fix=fix)
    kept = np.flatnonzero(~too_long | ((overlong == CUT) & (store.first < seq_len)))
    if not len(kept):
        what = f"none of the {len(store):,} samples fits into data.seq_len={seq_len}; the shortest has {lengths.min()}."
        raise UserError(what, where=source, fix=f"Raise data.seq_len, or set {_KEY}={CUT}.")
    return Members(stores, np.full(len(kept), part), kept, np.minimum(lengths[kept], seq_len))


def _all_sequence_starts(each: Sequence[tuple[Members, Int64s]]) -> Int64s:
    sizes = np.concatenate([np.diff(sequence_starts) for _, sequence_starts in each])
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _report(
    part: Part,
    share: float,
    store: AnswerStore,
    fitting: Members,
    train: Members,
    sequence_starts: Int64s,
    val: Members,
    seq_len: int,
) -> SourceReport:
    counts, tokens = store.counts, int(train.length.sum())
    sequences = len(sequence_starts) - 1
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
        learnt=train.loss_tokens,
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
        first, end = int(split.sequence_starts[sequence]), int(split.sequence_starts[sequence + 1])
        for place in range(first, end):
            tokens, loss_mask = split.samples[place]
            cut = ", the beginning" if len(tokens) > most else ""
            kind = ", plain text" if split.samples.is_text[place] else ""
            title = (
                f"sequence {sequence}, sample {place - first + 1} of {end - first}{kind}: "
                f"{len(tokens):,} tokens, {int(loss_mask.sum()):,} in the loss{cut}"
            )
            yield SampleView(title, list(token_runs(data.tokenizer, tokens[:most], loss_mask[:most])))


# ----------------------------------------------------------------------------------------------------
# The system prompt that a model was trained with.


_SYSTEM_ROWS = 200  # rows of each source that are looked at


def usual_system_prompt(data: Data) -> str | None:
    """Return the system prompt of more than half of the first rows; None if they have none, or cannot be read here."""
    found: Counter[str | None] = Counter()
    for part in data.parts:
        try:
            if not Path(part.source).expanduser().exists():
                return None
            rows = read_conversations(part.source, ReadStats(part.source))
            for row in itertools.islice(rows, _SYSTEM_ROWS):
                if not row.is_text:
                    found[next((m.content for m in row.messages if m.role == SYSTEM), None)] += 1
        except (UserError, OSError):
            return None
    prompt, count = found.most_common(1)[0] if found else (None, 0)
    return prompt if 2 * count > found.total() else None
