"""What a latent prefix is trained on, and through which frozen models."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.data.chat_template import load_chat_tokenizer
from redline.data.mixture import RowIndex, epoch_sample, row_index, row_mixture_key
from redline.data.packing import IGNORE
from redline.data.problems import PREFIX, is_problems, problems
from redline.data.read_stats import Progress, ProgressCallback, ReadStats
from redline.data.rows import RowReport, UnusableRowError, parse_rows, source_rows, squad_rows, text_field
from redline.data.splits import split_groups
from redline.data.tokenizer import ByteTokenizer
from redline.data.tokens import digest_of
from redline.errors import Problem, RecipeError, UserError
from redline.fields import AUTO
from redline.jobs.latent_prefix.costs import BYTES, WORDS, slots_read
from redline.models.pretrained import Base, open_base
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Model, Recipe

# ----------------------------------------------------------------------------------------------------
# Pairs: reading sources, and the held-out split.


_FIELDS = ("source", "question", "context", "answer", "answers", "title")
_FIX = "Give SQuAD's JSON, or rows with source and answer, or with question, context and answer (or answers)."
_INSTEAD = f"Take the embedded word problems, {PREFIX}easy. Or:"
_MARK = "####"  # GSM8K: what is behind it is the answer


@dataclass(frozen=True)
class Pair:
    text: str  # all that there is to read
    question: str  # what of it is left where no context is given; empty if it cannot be taken apart
    answers: tuple[str, ...]  # the first is learnt, any is right
    group: str

    def key(self) -> bytes:
        said = json.dumps([self.text, self.answers], ensure_ascii=True)
        return hashlib.blake2b(said.encode(), digest_size=16).digest()


def read_pairs(source: str) -> tuple[list[Pair], RowReport]:
    """Return every usable row in a fixed order; raise UserError if more than half of the rows are unusable."""
    if is_problems(source):
        made = [Pair(_asked(one.question), "", (one.answer,), one.question) for one in problems(source)]
        return made, RowReport(source, len(made))
    stats, path = ReadStats(source), Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        rows = squad_rows(path, stats, _FIX)
    else:
        rows = source_rows(source, stats, _FIELDS, fix=_FIX, instead=_INSTEAD)
    pairs = list(parse_rows(rows, lambda place, row: parse_pair(row), stats, _FIX))
    return pairs, RowReport.of(stats)


def parse_pair(row: Mapping[str, Any]) -> Pair:
    """Return the row as a pair; raise UnusableRowError if it is not one. A field with null counts as absent."""
    if row.get("source") is not None:
        text = text_field(row["source"], "source")
        return Pair(_ended(text), "", _answers(row), text)
    if row.get("question") is None:
        raise UnusableRowError("neither a 'source' nor a 'question' field")
    question = text_field(row["question"], "question").strip()
    if row.get("context") is None:
        return Pair(_asked(question), "", _answers(row), question)
    context = _context(row["context"])
    title = row.get("title")
    group = title if isinstance(title, str) and title else context
    return Pair(f"{_asked(question)}Context: {context}\n", _asked(question), _answers(row), group)


def _asked(question: str) -> str:
    return f"Question: {question}\n"


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _context(value: Any) -> str:
    """A text, or HotpotQA's paragraphs: [[title, sentences], …], or their titles and sentences apart."""
    if isinstance(value, Mapping) and "title" in value and "sentences" in value:
        value = list(zip(value["title"], value["sentences"], strict=False))
    if isinstance(value, Sequence) and not isinstance(value, str):
        try:
            value = "\n".join(f"{title}: {''.join(sentences)}" for title, sentences in value)
        except (TypeError, ValueError):
            raise UnusableRowError("'context' is neither text nor paragraphs of text") from None
    return text_field(value, "context").strip()


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Each once, in their order; of a GSM8K solution the number."""
    value = row.get("answers") if row.get("answers") is not None else row.get("answer")
    if isinstance(value, Mapping):
        value = value.get("text")
    several = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not several or several == [None]:
        raise UnusableRowError("no answer")
    found = [one.get("text") if isinstance(one, Mapping) else one for one in several]
    texts = [
        text_field(str(one) if isinstance(one, int) and not isinstance(one, bool) else one, "answer") for one in found
    ]
    plain = [text.rpartition(_MARK)[2].replace(",", "") if _MARK in text else text for text in texts]
    if not all(text.strip() for text in plain):
        raise UnusableRowError(f"nothing after the {_MARK} of its answer")
    return tuple(dict.fromkeys(text.strip() for text in plain))


def strangers(pairs: Sequence[Pair]) -> list[int] | None:
    """For each the next one, around, of another group: about something else. Of another text, where all are of one
    group; None where there is but one text."""
    kinds: list[list[str]] = [[pair.group for pair in pairs], [pair.text for pair in pairs]]
    for names in kinds:
        if len(set(names)) > 1:
            around = [*names, *names]
            return [
                next(other for other in range(place + 1, len(around)) if around[other] != names[place]) % len(names)
                for place in range(len(names))
            ]
    return None


def split_pairs(
    sources: Mapping[str, Sequence[Pair]], seed: int, fraction: float
) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return the pairs of training and of validation by source: the group rule of `data.splits`."""
    groups = [[pair.group for pair in pairs] for pairs in sources.values()]
    texts = [[pair.text for pair in pairs] for pairs in sources.values()]
    splits = split_groups(list(sources), groups, texts, seed, fraction)
    train = [[pairs[n] for n in split.train] for pairs, split in zip(sources.values(), splits, strict=True)]
    val = [[pairs[n] for n in split.val] for pairs, split in zip(sources.values(), splits, strict=True)]
    return train, val


# ----------------------------------------------------------------------------------------------------
# What a latent prefix is trained on: texts as bytes, and their answers as each frozen model's tokens.
#
# The anchor's last spaces belong to the answer: `Answer:` and ` 42` are the tokens that a model has met, and `Answer: `
# and `42` are not. An answer ends with the model's own end of text, which is learnt like the rest of it.


PAD = BYTES - 1
CUT, DROP, ERROR = "cut", "drop", "error"
_WORD = re.compile(r"\w+")
_MOST_WORDS = 128  # of a text, that are told apart
_BYTE_BUCKETS = 4  # lengths of byte rows: quarters of the longest
_LEAST_ANSWER = 8  # tokens; longer answers double this

Int64s = npt.NDArray[np.int64]


class Reader:
    """How one frozen model reads: its tokenizer, without chat."""

    def __init__(self, folder: Path, anchor: str) -> None:
        self._tokenizer = load_chat_tokenizer(folder)
        if not self._tokenizer.eos_ids:
            fix = "Set eos_token in its tokenizer_config.json."
            raise UserError("the tokenizer has no token that ends a text.", where=str(folder), fix=fix)
        self.begin: list[int] = self._tokenizer.encode_bare("")  # what it puts before every text
        bare = anchor.rstrip(" ")
        self.anchor: list[int] = self._ids(bare)
        self._space = "" if self._adds_space() else anchor[len(bare) :]
        self.eos_ids = self._tokenizer.eos_ids
        marks = [self.begin, self.anchor, self._space, list(self.eos_ids)]
        self.fingerprint: str = digest_of(["reader", self._tokenizer.fingerprint, marks])
        self.vocab_size = self._tokenizer.vocab_size
        if not self.anchor:
            raise UserError(
                "is no text to this model.", where=f"latent_prefix.anchor ({folder})", fix="Use 'Answer: '."
            )

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode_bare(text)[len(self.begin) :]

    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before every text, as SentencePiece does: another would be too many."""
        alone, within = self._ids("a"), self._ids("\na")
        return self._ids(" a")[1:] == alone and within[-1:] != alone

    def answer(self, text: str) -> list[int]:
        """With its end."""
        return [*self._ids(self._space + text), self.eos_ids[0]]

    def prompt(self, text: str, most: int | None = None) -> list[int]:
        """The text (its first `most` tokens) and the anchor behind it."""
        return [*self.begin, *self._ids(text)[:most], *self.anchor]

    def count(self, text: str) -> int:
        return len(self._ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, special=False).strip()


@dataclass(frozen=True)
class Lengths:
    """Of rows, in bytes and in tokens."""

    bytes: int  # of a text
    patch: int  # that a row's bytes are a multiple of
    answers: tuple[int, ...]  # with their end, for each model
    words: bool

    def of(self, some: Sequence[Rows], longest: int) -> Lengths:
        """No more than those of what there is: a length that never comes need not be compiled."""
        texts = -(-max(longest, 1) // self.patch) * self.patch
        answers = [
            max((len(one) for rows in some for one in rows.answers[n]), default=1) for n in range(len(self.answers))
        ]
        return replace(self, bytes=min(self.bytes, texts), answers=tuple(answers))


@dataclass(frozen=True)
class Rows:
    pairs: list[Pair]
    answers: list[list[list[int]]]  # tokens, for each model and pair
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.pairs)

    def take(self, numbers: Int64s) -> dict[str, npt.NDArray[Any]]:
        """`bytes` [B, S], `targets.N` [B, A] of the N-th model and `words` [B, W], padded to one of a few lengths."""
        texts = [cut_bytes(self.pairs[number].text, self.lengths.bytes) for number in numbers.tolist()]
        size = _bucket_bytes(max(len(text) for text in texts), self.lengths)
        found: dict[str, npt.NDArray[Any]] = {"bytes": byte_rows(texts, size)}
        for model, (answers, longest) in enumerate(zip(self.answers, self.lengths.answers, strict=True)):
            some = [answers[number] for number in numbers.tolist()]
            length = _bucket_answer(max(len(one) for one in some), longest)
            targets = found[f"targets.{model}"] = np.full((len(some), length), IGNORE, dtype=np.int64)
            for row, one in enumerate(some):
                targets[row, : len(one)] = one
        if self.lengths.words:
            found["words"] = np.stack([_words(text) for text in texts])
        return found

    def means(self, numbers: Int64s) -> dict[str, Any]:
        """What `jobs.latent_prefix.Costs` reads: how many of these rows each padded length takes, shortest first.

        `bytes`: positions of the encoder, rows, and the mean positions that hold a byte; `answers`: for each model,
        tokens and rows.
        """
        patch, sizes = self.lengths.patch, dict[int, list[int]]()
        answers: list[dict[int, int]] = [{} for _ in self.answers]
        for number in numbers.tolist():
            text = len(cut_bytes(self.pairs[number].text, self.lengths.bytes))
            sizes.setdefault(_bucket_bytes(text, self.lengths) // patch, []).append(-(-text // patch))
            for counts, tokens, longest in zip(answers, self.answers, self.lengths.answers, strict=True):
                size = _bucket_answer(len(tokens[number]), longest)
                counts[size] = counts.get(size, 0) + 1
        return {
            "bytes": [[size, len(held), sum(held) / len(held)] for size, held in sorted(sizes.items())],
            "answers": [[list(item) for item in sorted(counts.items())] for counts in answers],
        }

    def first(self, count: int) -> Rows:
        return Rows(self.pairs[:count], [some[:count] for some in self.answers], self.lengths)


def cut_bytes(text: str, most: int) -> bytes:
    """The first bytes, without half a character at their end."""
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= most else raw[:most].decode("utf-8", "ignore").encode("utf-8")


def byte_rows(texts: Sequence[bytes], size: int) -> Int64s:
    """[B, size], padded."""
    rows = np.full((len(texts), size), PAD, dtype=np.int64)
    for row, text in enumerate(texts):
        rows[row, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    return rows


def _bucket_bytes(length: int, lengths: Lengths) -> int:
    step = -(-lengths.bytes // (_BYTE_BUCKETS * lengths.patch)) * lengths.patch
    return min(lengths.bytes, -(-length // step) * step)


def _bucket_answer(length: int, most: int) -> int:
    size = _LEAST_ANSWER
    while size < length:
        size *= 2
    return min(most, size)


def _words(text: bytes) -> Int64s:
    found = dict.fromkeys(word.lower() for word in _WORD.findall(text.decode("utf-8", "replace")))
    kinds = list(dict.fromkeys(zlib.crc32(word.encode()) % WORDS for word in found))[:_MOST_WORDS]
    return np.array([*kinds, *[-1] * (_MOST_WORDS - len(kinds))], dtype=np.int64)


@dataclass
class PairsReport:
    sources: list[RowReport]
    train: int
    val: int
    cut: int = 0  # texts longer than the limit, kept in part
    dropped: int = 0  # and left out
    longest: int = 0  # bytes
    unanswerable: int = 0  # left out: the answer does not fit behind the prefix

    def lines(self) -> list[str]:
        told = [source.line() for source in self.sources]
        told.append(f"{self.train:,} rows" + (f" to train on, {self.val:,} held out" if self.val else ""))
        counts = {"texts cut": self.cut, "texts left out": self.dropped}
        told += [f"{count:,} {what}: longer than latent_prefix.bytes" for what, count in counts.items() if count]
        if self.unanswerable:
            told.append(f"{self.unanswerable:,} rows left out: their answer does not fit into data.seq_len")
        return told


@dataclass(frozen=True)
class PairData:
    train: Rows
    val: Rows | None
    index: RowIndex
    readers: list[Reader]
    report: PairsReport
    fingerprint: str
    rows_fingerprint: str = field(default="")  # of the texts and answers to train on, in their order
    content: str = ""  # of all texts and answers, in whatever order and split


def load_pairs(
    data: Data,
    readers: list[Reader],
    *,
    most_bytes: int,
    patch: int,
    slots: int,
    words: bool,
    seed: int,
    val_fraction: float,
    progress: ProgressCallback | None = None,
) -> PairData:
    """All that the sources hold. With `val_fraction` 0 all is in `train`."""
    names = " and ".join(part.source for part in data.parts)
    room = [data.seq_len - slots - len(reader.begin) - len(reader.anchor) + 1 for reader in readers]
    if min(room) < 2:
        what = f"{data.seq_len} positions have no room for an answer behind prefix and anchor."
        raise UserError(
            what, where="data.seq_len", fix=f"Use at least {data.seq_len + 2 - min(room)}; {slots + 64} is usual."
        )
    reports, pairs = [], {}
    for part in data.parts:
        if progress:
            progress(Progress(f"reading {part.source}", 0, None, 0))
        pairs[part.source], report = read_pairs(part.source)
        reports.append(report)
    trained, held = split_pairs(pairs, seed, val_fraction)
    told = PairsReport(reports, 0, 0)
    tell = _Fitting(told, readers, Lengths(most_bytes, patch, tuple(room), words), data.overlong, names)
    each = [tell.rows(list(dict.fromkeys(some)) if data.dedup else some) for some in trained]
    val = tell.rows([pair for some in held for pair in some])
    if not all(len(rows) for rows in each):
        fix = "Raise data.seq_len or latent_prefix.bytes, or give more rows."
        raise UserError("nothing of it is left to train on.", where=names, fix=fix)
    lengths = tell.lengths.of([*each, val], told.longest)
    val = replace(val, lengths=lengths)
    train = Rows(
        [pair for rows in each for pair in rows.pairs],
        [[one for rows in each for one in rows.answers[n]] for n in range(len(readers))],
        lengths,
    )
    told.train, told.val = len(train), len(val)
    sizes = [len(rows) for rows in each]
    rows_print, val_print = _digest(train), _digest(val)
    mixture = row_mixture_key(data.parts)
    content = [rows_print, val_print, sizes, mixture, seed, data.shuffle, data.seq_len, most_bytes]
    content += [reader.fingerprint for reader in readers]
    return PairData(
        train=train,
        val=val if len(val) else None,
        index=row_index(sizes, data.parts, seed, shuffle=data.shuffle),
        readers=readers,
        report=told,
        fingerprint=digest_of(["pairs", content]),
        rows_fingerprint=rows_print,
        content=digest_of(["pairs", sorted(pair.key().hex() for pair in (*train.pairs, *val.pairs))]),
    )


def _digest(rows: Rows) -> str:
    digest = hashlib.sha256()
    for pair in rows.pairs:
        digest.update(pair.key())
    return digest.hexdigest()


class _Fitting:
    """Leaves out what does not fit, and counts it."""

    def __init__(
        self, told: PairsReport, readers: list[Reader], lengths: Lengths, rule: str | None, where: str
    ) -> None:
        self.told, self.readers, self.lengths, self.rule, self.where = told, readers, lengths, rule, where

    def rows(self, pairs: Sequence[Pair]) -> Rows:
        kept: list[Pair] = []
        answers: list[list[list[int]]] = [[] for _ in self.readers]
        for pair in pairs:
            if not self._short_enough(pair):
                continue
            coded = [reader.answer(pair.answers[0]) for reader in self.readers]
            if any(len(one) > room for one, room in zip(coded, self.lengths.answers, strict=True)):
                self._refuse(pair, "answer", "data.seq_len")
                self.told.unanswerable += 1
                continue
            kept.append(pair)
            for some, one in zip(answers, coded, strict=True):
                some.append(one)
        return Rows(kept, answers, self.lengths)

    def _short_enough(self, pair: Pair) -> bool:
        size = len(pair.text.encode("utf-8", "replace"))
        self.told.longest = max(self.told.longest, size)
        if size <= self.lengths.bytes:
            return True
        self._refuse(pair, f"text of {size:,} bytes", "latent_prefix.bytes")
        kept = self.rule != DROP
        self.told.cut, self.told.dropped = self.told.cut + kept, self.told.dropped + (not kept)
        return kept

    def _refuse(self, pair: Pair, what: str, key: str) -> None:
        if self.rule == ERROR:
            begun = " ".join(pair.text.split())[:60]
            fix = f"Raise {key}, or set data.overlong={CUT} or {DROP}."
            raise UserError(
                f"a {what} is too long ({begun!r}…), and data.overlong is {ERROR}.", where=self.where, fix=fix
            )


@dataclass(frozen=True)
class LatentData:
    facts: DataFacts
    bases: dict[str, Base] | None = None  # by number; None: random weights, for steps that are only timed
    readers: dict[str, Reader] | None = None
    pairs: PairData | None = None  # None when nothing is trained or looked at
    held_out: Rows | None = None

    @property
    def messages(self) -> list[str]:
        return [] if self.pairs is None else self.pairs.report.lines()

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        """Return one key per row to train on, or per row that is evaluated."""
        to_train = None if self.pairs is None else self.pairs.train
        rows = to_train if trained else self.held_out
        return None if rows is None else [pair.key() for pair in rows.pairs]

    def held_out_sequences(self, seq_len: int) -> None:
        """Return None: the data are rows."""


def options_of(recipe: Recipe) -> Any:
    return recipe.latent_prefix  # type: ignore[attr-defined]


def wanted(recipe: Recipe) -> dict[str, tuple[str, Any]]:
    """Number → where the model lies, and what says how it is kept."""
    options = options_of(recipe)
    every = [(str(recipe.model.base), recipe.model), *((one.base, one) for one in options.others)]
    return {str(n): one for n, one in enumerate(every) if options.only in (None, n)}


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """The recipe with the shapes of its models, which it may also state itself, but not differently."""
    options, model = options_of(recipe), recipe.model
    first, *rest = (open_base(source, say) for source in (str(model.base), *(one.base for one in options.others)))
    found = []
    for key, there in first.model.items():
        given = getattr(model, key)
        if given not in (AUTO, Model.model_fields[key].default, there):
            found.append(Problem(f"model.{key}", f"{given} is not the base's {there}.", "Leave it out."))
    for number, (one, base) in enumerate(zip(options.others, rest, strict=True)):
        stated = one.shape or {}
        wrong = [key for key, value in stated.items() if value != vars(base.shape)[key]]
        what = f"the shape of {one.base} has another {' and '.join(wrong)}."
        found += [Problem(f"latent_prefix.others.{number}", what, "Leave it out.")] if wrong else []
    for base in (first, *rest):
        if recipe.data.seq_len > base.context:
            what = f"{recipe.data.seq_len} is longer than the {base.context} that {base.source} was made for."
            found.append(Problem("data.seq_len", what, f"Use at most {base.context}."))
    if found:
        raise RecipeError("recipe", found)
    known = tuple(
        one.model_copy(update={"shape": vars(base.shape)}) for one, base in zip(options.others, rest, strict=True)
    )
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={**first.model, "size": None}),
            "latent_prefix": options.model_copy(update={"others": known}),
        }
    )


def load_data(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> LatentData:
    """The recipe's rows; all of them are held out when nothing is trained."""
    found = open_models(recipe)
    options = options_of(recipe)
    assert found.readers is not None
    pairs = load_pairs(
        recipe.data,
        list(found.readers.values()),
        most_bytes=options.bytes,
        patch=options.patch,
        slots=slots_read(options),
        words=options.words_weight > 0,
        seed=recipe.train.seed,
        val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
        progress=progress,
    )
    seq_len = recipe.data.seq_len
    rows = {
        **pairs.train.means(epoch_sample(pairs.index)),
        "before": [len(reader.begin) + len(reader.anchor) for reader in found.readers.values()],
    }
    facts = replace(
        found.facts,
        train_tokens=len(pairs.index) * seq_len,
        val_tokens=0 if pairs.val is None else len(pairs.val) * seq_len,
        fingerprint=pairs.fingerprint,
        content=pairs.content,
        val_rows=0 if pairs.val is None else len(pairs.val),
        rows=rows if options.only is None else None,  # with one model alone nothing is trained
    )
    return replace(found, facts=facts, pairs=pairs, held_out=pairs.train if for_evaluation else pairs.val)


def open_models(recipe: Recipe) -> LatentData:
    """Open the frozen models' files and tokenizers, without any rows."""
    own = ByteTokenizer()
    bases = {name: open_base(source) for name, (source, _) in wanted(recipe).items()}
    readers = {name: Reader(base.folder, options_of(recipe).anchor) for name, base in bases.items()}
    for name, base in bases.items():
        if readers[name].vocab_size > base.shape.vocab:
            what = f"its tokenizer has {readers[name].vocab_size:,} entries, and the model {base.shape.vocab:,}."
            raise UserError(what, where=base.source, fix="Put the tokenizer that belongs to the model beside it.")
    return LatentData(DataFacts(own.vocab_size, 0, 0, "", own.name, own.fingerprint), bases, readers)
