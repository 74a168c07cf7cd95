"""The data of latent_prefix: texts as bytes, their answers as tokens of each frozen model, and the models themselves.

From top to bottom: reading pairs of text and answers from their sources, the split, the tokenization of prompts and
answers, padding to a few lengths, and what the objective gets.
"""

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
from redline.data.corpus import RowIndex, epoch_sample, row_index, row_mixture_key
from redline.data.facts import is_facts, paragraphs
from redline.data.loader import IGNORE
from redline.data.problems import PREFIX, is_problems, problems
from redline.data.sources import (
    Progress,
    ProgressCallback,
    ReadStats,
    RowReport,
    UnusableRowError,
    local_path,
    parse_rows,
    source_rows,
    squad_rows,
    text_field,
)
from redline.data.splits import split_groups
from redline.data.tokenizer import ByteTokenizer
from redline.data.tokens import digest_of
from redline.errors import Problem, RecipeError, UserError
from redline.fields import AUTO
from redline.jobs.latent_prefix.costs import BYTES, WORDS, prefix_length
from redline.models.pretrained import Base, open_base
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Data, Model, Recipe

# ----------------------------------------------------------------------------------------------------
# Pairs of a text and its answers: SQuAD's JSON, rows of SQuAD, HotpotQA and GSM8K, and {source, answer}.
#
# A text is `Question: …⏎Context: …⏎`, with the question first, so that truncation takes from the context. If the
# encoder is not to know the question (`question_aware: false`), the text is `Context: …⏎`, and the model reads
# `Question: …⏎` between prefix and anchor. Pairs that share something (paragraphs of an article, questions about a
# text) form a group, which is held out as a whole.


_FIELDS = ("source", "question", "context", "answer", "answers", "title")
_FIX = "Give SQuAD's JSON, or rows with source and answer, or with question, context and answer (or answers)."
_INSTEAD = f"Use the embedded word problems, {PREFIX}easy. Or:"
_ANSWER_MARK = "####"  # GSM8K: the answer follows


@dataclass(frozen=True)
class Pair:
    """A text and its answers."""

    text: str  # what the encoder reads: question and context, or the context alone
    question: str  # the text without its context; empty if they cannot be separated
    answers: tuple[str, ...]  # training uses the first; any of them is right
    group: str
    asked: str = ""  # the question, if it is not in the text: the model reads it between prefix and anchor

    def key(self) -> bytes:
        content = json.dumps([self.text, self.answers, *([self.asked] if self.asked else [])], ensure_ascii=True)
        return hashlib.blake2b(content.encode(), digest_size=16).digest()


def read_pairs(source: str, *, question_aware: bool = True) -> tuple[list[Pair], RowReport]:
    """Return every usable pair in the order of the source. If not `question_aware`, questions are apart from the texts.

    A source of which more than half is unusable, or that holds nothing, is an error.
    """
    if is_facts(source):
        fact_pairs = [
            _pair(one.question, one.context, (one.answer,), one.context, question_aware) for one in paragraphs(source)
        ]
        return fact_pairs, RowReport(source, len(fact_pairs))
    if is_problems(source):
        if not question_aware:
            what = "word problems have no context, which latent_prefix.question_aware=false needs."
            raise UserError(what, where=source, fix="Use facts:8, or rows with question and context.")
        problem_pairs = [
            Pair(_question_line(one.question), "", (one.answer,), one.question) for one in problems(source)
        ]
        return problem_pairs, RowReport(source, len(problem_pairs))
    stats = ReadStats(source)
    path = local_path(source) if source.endswith(".json") else None
    if path is not None and path.is_file():
        rows = squad_rows(path, stats, _FIX)
    else:
        rows = source_rows(source, stats, _FIELDS, fix=_FIX, instead=_INSTEAD)
    pairs = list(parse_rows(rows, lambda place, row: parse_pair(row, question_aware), stats, _FIX))
    return pairs, RowReport.of(stats)


def parse_pair(row: Mapping[str, Any], question_aware: bool = True) -> Pair:
    """Parse a row; raise UnusableRowError if it cannot be used. A null field counts as absent."""
    if not question_aware and (row.get("question") is None or row.get("context") is None):
        raise UnusableRowError("no question apart from its context, which latent_prefix.question_aware=false needs")
    if row.get("source") is not None and question_aware:
        text = text_field(row["source"], "source")
        return Pair(_with_newline(text), "", _answers(row), text)
    if row.get("question") is None:
        raise UnusableRowError("neither a 'source' nor a 'question' field")
    question = text_field(row["question"], "question").strip()
    if row.get("context") is None:
        return Pair(_question_line(question), "", _answers(row), question)
    context = _context(row["context"])
    title = row.get("title")
    group = title if isinstance(title, str) and title else context
    return _pair(question, context, _answers(row), group, question_aware)


def _pair(question: str, context: str, answers: tuple[str, ...], group: str, question_aware: bool) -> Pair:
    line, text = _question_line(question), f"Context: {context}\n"
    return Pair(line + text, line, answers, group) if question_aware else Pair(text, line, answers, group, line)


def separate(text: str) -> tuple[str, str]:
    """Return a text without the question in its last line, and that line."""
    before, mark, question = text.rstrip("\n").rpartition("\nQuestion: ")
    if not mark or "\n" in question:
        what = "the text does not end with a question, which this run's model reads apart from the text."
        raise UserError(what, fix="End it with a line `Question: …`.")
    return f"{before}\n", _question_line(question)


def _question_line(question: str) -> str:
    return f"Question: {question}\n"


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _context(value: Any) -> str:
    """Return the context as one text.

    HotpotQA has paragraphs instead: [[title, sentences], …], or a mapping with lists of titles and of sentences.
    """
    if isinstance(value, Mapping) and "title" in value and "sentences" in value:
        value = list(zip(value["title"], value["sentences"], strict=False))
    if isinstance(value, Sequence) and not isinstance(value, str):
        try:
            value = "\n".join(f"{title}: {''.join(sentences)}" for title, sentences in value)
        except (TypeError, ValueError):
            raise UnusableRowError("'context' is neither text nor a list of paragraphs") from None
    return text_field(value, "context").strip()


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the distinct answers in their order; for a GSM8K solution the number."""
    value = row.get("answers") if row.get("answers") is not None else row.get("answer")
    if isinstance(value, Mapping):
        value = value.get("text")
    several = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not several or several == [None]:
        raise UnusableRowError("no answer")
    values = [one.get("text") if isinstance(one, Mapping) else one for one in several]
    texts = [
        text_field(str(one) if isinstance(one, int) and not isinstance(one, bool) else one, "answer") for one in values
    ]
    plain = [text.rpartition(_ANSWER_MARK)[2].replace(",", "") if _ANSWER_MARK in text else text for text in texts]
    if not all(text.strip() for text in plain):
        raise UnusableRowError(f"nothing after the {_ANSWER_MARK} of its answer")
    return tuple(dict.fromkeys(text.strip() for text in plain))


def unrelated_pairs(pairs: Sequence[Pair]) -> list[int] | None:
    """Return, for each pair, the number of the next pair (cyclically) of another group.

    If all pairs are of one group, of another text; None if there is only one text.
    """
    for names in ([pair.group for pair in pairs], [pair.text for pair in pairs]):
        if len(set(names)) > 1:
            cycle = [*names, *names]
            return [
                next(other for other in range(i + 1, len(cycle)) if cycle[other] != names[i]) % len(names)
                for i in range(len(names))
            ]
    return None


def split_pairs(
    sources: Mapping[str, Sequence[Pair]], seed: int, fraction: float
) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return the training and validation pairs of each source, split by the group rule of `data.splits`.

    A pair that shares its text with a held-out pair, in any source, is not trained on.
    """
    groups = [[pair.group for pair in pairs] for pairs in sources.values()]
    texts = [[pair.text for pair in pairs] for pairs in sources.values()]
    splits = split_groups(list(sources), groups, texts, seed, fraction)
    train = [[pairs[n] for n in split.train] for pairs, split in zip(sources.values(), splits, strict=True)]
    val = [[pairs[n] for n in split.val] for pairs, split in zip(sources.values(), splits, strict=True)]
    return train, val


# ----------------------------------------------------------------------------------------------------
# Rows: texts as bytes, and their answers as tokens of each frozen model.
#
# The trailing spaces of the anchor are tokenized with the answer: a model has seen `Answer:` followed by ` 42`, but not
# `Answer: ` followed by `42`. An answer ends with the model's end-of-text token, which carries a loss like the rest:
# the original never supervised it, so its models did not learn to stop.


PAD = BYTES - 1
CUT, DROP, ERROR = "cut", "drop", "error"
_WORD = re.compile(r"\w+")
_MOST_WORDS = 128  # distinct words or tokens of a text that the word loss and the token loss cover
_BYTE_BUCKETS = 4  # texts are padded to quarters of the longest length
_LEAST_ANSWER = 8  # answers are padded to 8 tokens, 16, 32 and so on

Int64s = npt.NDArray[np.int64]


class PromptTokenizer:
    """Tokenizes prompts and answers for one frozen model, without a chat template."""

    def __init__(self, folder: Path, anchor: str) -> None:
        self._tokenizer = load_chat_tokenizer(folder)
        if not self._tokenizer.eos_ids:
            fix = "Set eos_token in its tokenizer_config.json."
            raise UserError("the tokenizer has no end-of-text token.", where=str(folder), fix=fix)
        self.begin: list[int] = self._tokenizer.encode_bare("")  # the tokens that it puts before every text
        bare = anchor.rstrip(" ")
        self.anchor: list[int] = self._ids(bare)
        self._space = "" if self._adds_space() else anchor[len(bare) :]
        self.eos_ids = self._tokenizer.eos_ids
        marks = [self.begin, self.anchor, self._space, list(self.eos_ids)]
        self.fingerprint: str = digest_of(["reader", self._tokenizer.fingerprint, marks])
        self.vocab_size = self._tokenizer.vocab_size
        if not self.anchor:
            what = "encodes to no tokens."
            raise UserError(what, where=f"latent_prefix.anchor ({folder})", fix="Use 'Answer: '.")

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode_bare(text)[len(self.begin) :]

    def _adds_space(self) -> bool:
        """Return whether the tokenizer puts a space before every text, as SentencePiece does: the anchor's own space
        would then be a second one."""
        alone, within = self._ids("a"), self._ids("\na")
        return self._ids(" a")[1:] == alone and within[-1:] != alone

    def answer(self, text: str) -> list[int]:
        """Return the tokens of an answer, with the end-of-text token."""
        return [*self._ids(self._space + text), self.eos_ids[0]]

    def question(self, text: str) -> list[int]:
        """Return the tokens of a question that stands between prefix and anchor; none of an empty one."""
        return self._ids(text) if text else []

    def prompt(self, text: str, most: int | None = None, asked: str = "") -> list[int]:
        """Return the tokens of a text (at most its first `most`), of a question apart from it, and of the anchor."""
        return [*self.begin, *self._ids(text)[:most], *self.question(asked), *self.anchor]

    def count(self, text: str) -> int:
        return len(self._ids(text))

    def distinct(self, text: str) -> list[int]:
        """Return the tokens of a text, each once, in the order in which they first occur."""
        return list(dict.fromkeys(self._ids(text)))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_unstripped(ids).strip()

    def decode_unstripped(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, special=False)


@dataclass(frozen=True)
class RowLengths:
    """The largest lengths of rows."""

    bytes: int  # of a text
    patch: int  # the padded bytes of a row are a multiple of this
    answers: tuple[int, ...]  # tokens of an answer with its end, for each model
    words: bool  # whether batches have the words of their texts
    asked: tuple[int, ...] = ()  # tokens of a question apart from its text, for each model; empty if there are none
    tokens: bool = False  # whether batches have the tokens of their texts

    def limited_to(self, parts: Sequence[PairRows], longest: int) -> RowLengths:
        """Return the lengths that actually occur: a graph for a length that never occurs need not be compiled."""
        texts = -(-max(longest, 1) // self.patch) * self.patch
        answers = [
            max((len(one) for rows in parts for one in rows.answers[n]), default=1) for n in range(len(self.answers))
        ]
        asked = [max(len(one) for rows in parts for one in rows.asked[n]) for n in range(len(parts[0].asked))]
        return replace(self, bytes=min(self.bytes, texts), answers=tuple(answers), asked=tuple(asked))


@dataclass(frozen=True)
class PairRows:
    """Pairs with their tokenized answers."""

    pairs: list[Pair]
    answers: list[list[list[int]]]  # tokens, for each model and pair
    lengths: RowLengths
    asked: list[list[list[int]]] = field(default_factory=list)  # tokens of the questions, if apart from their texts
    tokenizers: Sequence[PromptTokenizer] = ()  # for the tokens of the texts

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, numbers: Int64s) -> dict[str, npt.NDArray[Any]]:
        """Return `bytes` [B, S] and `words` [B, W]; for model N `targets.N` [B, A], `asked.N` [B, Q], `text.N` [B, W].

        Each is padded to one of a few lengths, so that compiled graphs are reused.
        """
        texts = [cut_bytes(self.pairs[number].text, self.lengths.bytes) for number in numbers.tolist()]
        size = _byte_bucket(max(len(text) for text in texts), self.lengths)
        batch: dict[str, npt.NDArray[Any]] = {"bytes": byte_rows(texts, size)}
        for model, (answers, longest) in enumerate(zip(self.answers, self.lengths.answers, strict=True)):
            some = [answers[number] for number in numbers.tolist()]
            length = _answer_bucket(max(len(one) for one in some), longest)
            targets = batch[f"targets.{model}"] = np.full((len(some), length), IGNORE, dtype=np.int64)
            for row, one in enumerate(some):
                targets[row, : len(one)] = one
        for model, (questions, longest) in enumerate(zip(self.asked, self.lengths.asked, strict=True)):
            asked = batch[f"asked.{model}"] = np.full((len(texts), longest), IGNORE, dtype=np.int64)
            for row, number in enumerate(numbers.tolist()):
                asked[row, : len(questions[number])] = questions[number]
        if self.lengths.words:
            batch["words"] = np.stack([_padded(_words(text)) for text in texts])
        if self.lengths.tokens:
            for model, tokenizer in enumerate(self.tokenizers):
                decoded = [text.decode("utf-8", "replace") for text in texts]
                batch[f"text.{model}"] = np.stack([_padded(tokenizer.distinct(text)) for text in decoded])
        return batch

    def length_counts(self, numbers: Int64s) -> dict[str, Any]:
        """Return how many of these rows have each padded length, shortest first, as `Costs` reads it.

        `bytes`: positions of the encoder, rows, and the mean number of positions that hold a byte; `answers`: for each
        model, tokens and rows.
        """
        patch, sizes = self.lengths.patch, dict[int, list[int]]()
        answers: list[dict[int, int]] = [{} for _ in self.answers]
        for number in numbers.tolist():
            text = len(cut_bytes(self.pairs[number].text, self.lengths.bytes))
            sizes.setdefault(_byte_bucket(text, self.lengths) // patch, []).append(-(-text // patch))
            for counts, tokens, longest in zip(answers, self.answers, self.lengths.answers, strict=True):
                size = _answer_bucket(len(tokens[number]), longest)
                counts[size] = counts.get(size, 0) + 1
        return {
            "bytes": [[size, len(held), sum(held) / len(held)] for size, held in sorted(sizes.items())],
            "answers": [[list(item) for item in sorted(counts.items())] for counts in answers],
        }

    def first(self, count: int) -> PairRows:
        answers, asked = ([some[:count] for some in kind] for kind in (self.answers, self.asked))
        return replace(self, pairs=self.pairs[:count], answers=answers, asked=asked)


def cut_bytes(text: str, most: int) -> bytes:
    """Return the first `most` bytes of a text, without an incomplete character at the end."""
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= most else raw[:most].decode("utf-8", "ignore").encode("utf-8")


def byte_rows(texts: Sequence[bytes], size: int) -> Int64s:
    """Return the texts as rows [B, size], padded at the end."""
    rows = np.full((len(texts), size), PAD, dtype=np.int64)
    for row, text in enumerate(texts):
        rows[row, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    return rows


def _byte_bucket(length: int, lengths: RowLengths) -> int:
    step = -(-lengths.bytes // (_BYTE_BUCKETS * lengths.patch)) * lengths.patch
    return min(lengths.bytes, -(-length // step) * step)


def _answer_bucket(length: int, most: int) -> int:
    size = _LEAST_ANSWER
    while size < length:
        size *= 2
    return min(most, size)


def _words(text: bytes) -> list[int]:
    """Return the distinct hash buckets of a text's words."""
    words = dict.fromkeys(word.lower() for word in _WORD.findall(text.decode("utf-8", "replace")))
    return list(dict.fromkeys(zlib.crc32(word.encode()) % WORDS for word in words))


def _padded(ids: list[int]) -> Int64s:
    """Return the first ids, padded with −1 to the length of all rows."""
    some = ids[:_MOST_WORDS]
    return np.array([*some, *[-1] * (_MOST_WORDS - len(some))], dtype=np.int64)


@dataclass
class PairsReport:
    """Counts for the user: what was read, truncated and left out."""

    sources: list[RowReport]
    train: int
    val: int
    cut: int = 0  # texts longer than the limit that were truncated
    dropped: int = 0  # texts longer than the limit that were left out
    longest: int = 0  # bytes of the longest text
    unanswerable: int = 0  # left out: the answer does not fit behind the prefix

    def lines(self) -> list[str]:
        lines = [source.line() for source in self.sources]
        lines.append(f"{self.train:,} training rows" + (f", {self.val:,} held out" if self.val else ""))
        counts = {"texts cut": self.cut, "texts left out": self.dropped}
        lines += [f"{count:,} {what}: longer than latent_prefix.bytes" for what, count in counts.items() if count]
        if self.unanswerable:
            lines.append(f"{self.unanswerable:,} rows left out: the answer does not fit into data.seq_len")
        return lines


@dataclass(frozen=True)
class PairData:
    """The rows of all sources, split, with the order in which training reads them."""

    train: PairRows
    val: PairRows | None
    index: RowIndex
    tokenizers: list[PromptTokenizer]
    report: PairsReport
    fingerprint: str
    rows_fingerprint: str = field(default="")  # digest of the training texts and answers, in their order
    content: str = ""  # digest of all texts and answers, independent of their order and split


def load_pairs(
    data: Data,
    tokenizers: list[PromptTokenizer],
    *,
    most_bytes: int,
    patch: int,
    slots: int,
    words: bool,
    seed: int,
    val_fraction: float,
    question_aware: bool = True,
    tokens: bool = False,
    progress: ProgressCallback | None = None,
) -> PairData:
    """Read all sources, split them, and tokenize their answers. With `val_fraction` 0 everything is in `train`."""
    names = " and ".join(part.source for part in data.parts)
    room = [data.seq_len - slots - len(one.begin) - len(one.anchor) + 1 for one in tokenizers]
    if min(room) < 2:
        what = f"{data.seq_len} positions leave no room for an answer behind prefix and anchor."
        fix = f"Use at least {data.seq_len + 2 - min(room)}; {slots + 64} is usual."
        raise UserError(what, where="data.seq_len", fix=fix)
    reports, pairs = [], {}
    for part in data.parts:
        if progress:
            progress(Progress(f"reading {part.source}", 0, None, 0))
        pairs[part.source], row_report = read_pairs(part.source, question_aware=question_aware)
        reports.append(row_report)
    trained, held_out = split_pairs(pairs, seed, val_fraction)
    report = PairsReport(reports, 0, 0)
    lengths = RowLengths(most_bytes, patch, tuple(room), words, tokens=tokens)
    encoder = _PairEncoder(report, tokenizers, lengths, data.overlong, not question_aware, names)
    by_source = [encoder.rows(list(dict.fromkeys(some)) if data.dedup else some) for some in trained]
    val = encoder.rows([pair for some in held_out for pair in some])
    if not all(len(rows) for rows in by_source):
        fix = "Raise data.seq_len or latent_prefix.bytes, or give more rows."
        raise UserError("no row is left for training.", where=names, fix=fix)
    lengths = lengths.limited_to([*by_source, val], report.longest)
    val = replace(val, lengths=lengths)
    train = PairRows(
        [pair for rows in by_source for pair in rows.pairs],
        [[one for rows in by_source for one in rows.answers[n]] for n in range(len(tokenizers))],
        lengths,
        [[one for rows in by_source for one in rows.asked[n]] for n in range(len(val.asked))],
        tokenizers,
    )
    report.train, report.val = len(train), len(val)
    sizes = [len(rows) for rows in by_source]
    train_digest, val_digest = _digest(train), _digest(val)
    mixture = row_mixture_key(data.parts)
    content = [train_digest, val_digest, sizes, mixture, seed, data.shuffle, data.seq_len, most_bytes]
    content += [tokenizer.fingerprint for tokenizer in tokenizers]
    return PairData(
        train=train,
        val=val if len(val) else None,
        index=row_index(sizes, data.parts, seed, shuffle=data.shuffle),
        tokenizers=tokenizers,
        report=report,
        fingerprint=digest_of(["pairs", content]),
        rows_fingerprint=train_digest,
        content=digest_of(["pairs", sorted(pair.key().hex() for pair in (*train.pairs, *val.pairs))]),
    )


def _digest(rows: PairRows) -> str:
    digest = hashlib.sha256()
    for pair in rows.pairs:
        digest.update(pair.key())
    return digest.hexdigest()


class _PairEncoder:
    """Tokenizes the answers of pairs, and leaves out and counts the pairs that do not fit."""

    def __init__(
        self,
        report: PairsReport,
        tokenizers: list[PromptTokenizer],
        lengths: RowLengths,
        overlong: str | None,
        apart: bool,
        where: str,
    ) -> None:
        self.report, self.tokenizers, self.lengths = report, tokenizers, lengths
        self.overlong, self.apart, self.where = overlong, apart, where

    def rows(self, pairs: Sequence[Pair]) -> PairRows:
        kept: list[Pair] = []
        answers: list[list[list[int]]] = [[] for _ in self.tokenizers]
        questions: list[list[list[int]]] = [[] for _ in self.tokenizers]
        for pair in pairs:
            if not self._keeps_text(pair):
                continue
            encoded = [tokenizer.answer(pair.answers[0]) for tokenizer in self.tokenizers]
            asked = [tokenizer.question(pair.asked) for tokenizer in self.tokenizers]
            lengths = [len(question) + len(answer) for question, answer in zip(asked, encoded, strict=True)]
            if any(length > room for length, room in zip(lengths, self.lengths.answers, strict=True)):
                self._raise_if_strict(pair, "an answer", "data.seq_len")
                self.report.unanswerable += 1
                continue
            kept.append(pair)
            for some, one in zip((*answers, *questions), (*encoded, *asked), strict=True):
                some.append(one)
        return PairRows(kept, answers, self.lengths, questions if self.apart else [], self.tokenizers)

    def _keeps_text(self, pair: Pair) -> bool:
        """Return whether the pair stays, and count texts that are too long."""
        size = len(pair.text.encode("utf-8", "replace"))
        self.report.longest = max(self.report.longest, size)
        if size <= self.lengths.bytes:
            return True
        self._raise_if_strict(pair, f"a text of {size:,} bytes", "latent_prefix.bytes")
        kept = self.overlong != DROP
        self.report.cut, self.report.dropped = self.report.cut + kept, self.report.dropped + (not kept)
        return kept

    def _raise_if_strict(self, pair: Pair, what: str, key: str) -> None:
        if self.overlong == ERROR:
            start = " ".join(pair.text.split())[:60]
            message = f"{what} is too long ({start!r}…), and data.overlong is {ERROR}."
            raise UserError(message, where=self.where, fix=f"Raise {key}, or set data.overlong={CUT} or {DROP}.")


@dataclass(frozen=True)
class LatentData:
    """The frozen models that a run uses, and its rows."""

    facts: DataFacts
    bases: dict[str, Base] | None = None  # by number in the recipe; None: random weights, for timed steps
    tokenizers: dict[str, PromptTokenizer] | None = None
    pairs: PairData | None = None  # None for a run that neither trains nor evaluates
    held_out: PairRows | None = None

    @property
    def messages(self) -> list[str]:
        return [] if self.pairs is None else self.pairs.report.lines()

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        """Return one key per training row, or per row that is evaluated."""
        to_train = None if self.pairs is None else self.pairs.train
        rows = to_train if trained else self.held_out
        return None if rows is None else [pair.key() for pair in rows.pairs]

    def held_out_sequences(self, seq_len: int) -> None:
        """Return None: the data are rows."""


def options_of(recipe: Recipe) -> Any:
    return recipe.latent_prefix  # type: ignore[attr-defined]


def frozen_models(recipe: Recipe) -> dict[str, tuple[str, Any]]:
    """Return, by number, the source of each frozen model that is used and the section with its quantisation."""
    options = options_of(recipe)
    models = [(str(recipe.model.base), recipe.model), *((one.base, one) for one in options.others)]
    return {str(n): one for n, one in enumerate(models) if options.only in (None, n)}


def complete(recipe: Recipe, log: Callable[[str], None]) -> Recipe:
    """Return the recipe with the shapes of its models filled in; shapes that it states must agree with the models."""
    options, model = options_of(recipe), recipe.model
    first, *rest = (open_base(source, log) for source in (str(model.base), *(one.base for one in options.others)))
    problems_found = []
    for key, actual in first.model.items():
        given = getattr(model, key)
        if given not in (AUTO, Model.model_fields[key].default, actual):
            what = f"{given} differs from the base's {actual}."
            problems_found.append(Problem(f"model.{key}", what, "Leave it out."))
    for number, (one, base) in enumerate(zip(options.others, rest, strict=True)):
        stated = one.shape or {}
        wrong = [key for key, value in stated.items() if value != vars(base.shape)[key]]
        if wrong:
            what = f"{one.base} has another {' and '.join(wrong)} than the stated shape."
            problems_found.append(Problem(f"latent_prefix.others.{number}", what, "Leave the shape out."))
    for base in (first, *rest):
        if recipe.data.seq_len > base.context:
            what = f"{recipe.data.seq_len} is longer than the context of {base.source}, {base.context} tokens."
            problems_found.append(Problem("data.seq_len", what, f"Use at most {base.context}."))
    if problems_found:
        raise RecipeError("recipe", problems_found)
    others = tuple(
        one.model_copy(update={"shape": vars(base.shape)}) for one, base in zip(options.others, rest, strict=True)
    )
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={**first.model, "size": None}),
            "latent_prefix": options.model_copy(update={"others": others}),
        }
    )


def load_data(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> LatentData:
    """Load the recipe's rows. With `for_evaluation`, all of them are the validation set."""
    data = open_models(recipe)
    options = options_of(recipe)
    assert data.tokenizers is not None
    pairs = load_pairs(
        recipe.data,
        list(data.tokenizers.values()),
        most_bytes=options.bytes,
        patch=options.patch,
        slots=prefix_length(options),
        words=options.words_weight > 0,
        seed=recipe.train.seed,
        val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
        question_aware=options.question_aware,
        tokens=options.tokens_weight > 0,
        progress=progress,
    )
    seq_len = recipe.data.seq_len
    asked = pairs.train.lengths.asked or [0] * len(data.tokenizers)
    rows = {
        **pairs.train.length_counts(epoch_sample(pairs.index)),
        "before": [
            len(tokenizer.begin) + longest + len(tokenizer.anchor)
            for tokenizer, longest in zip(data.tokenizers.values(), asked, strict=True)
        ],
    }
    facts = replace(
        data.facts,
        train_tokens=len(pairs.index) * seq_len,
        val_tokens=0 if pairs.val is None else len(pairs.val) * seq_len,
        fingerprint=pairs.fingerprint,
        content=pairs.content,
        val_rows=0 if pairs.val is None else len(pairs.val),
        rows=rows if options.only is None else None,  # a run with one of its models does not train
    )
    return replace(data, facts=facts, pairs=pairs, held_out=pairs.train if for_evaluation else pairs.val)


def open_models(recipe: Recipe) -> LatentData:
    """Open the files and tokenizers of the frozen models, without any rows."""
    own = ByteTokenizer()
    bases = {name: open_base(source) for name, (source, _) in frozen_models(recipe).items()}
    tokenizers = {name: PromptTokenizer(base.folder, options_of(recipe).anchor) for name, base in bases.items()}
    for name, base in bases.items():
        size = tokenizers[name].vocab_size
        if size > base.shape.vocab:
            what = f"the tokenizer has {size:,} entries, more than the model's {base.shape.vocab:,}."
            raise UserError(what, where=base.source, fix="Put the model's own tokenizer into its folder.")
    return LatentData(DataFacts(own.vocab_size, 0, 0, "", own.name, own.fingerprint), bases, tokenizers)
