"""Texts with the answers that they allow: SQuAD's own JSON, rows of SQuAD, HotpotQA and GSM8K, and {source, answer}.

A text is `Question: …⏎Context: …⏎`, the question first, so that cutting takes from the context. What belongs together
(an article's paragraphs, a text's questions) is a group: it is held out, or it is trained on, as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.data.chat import RowReport, RowTally, UnusableError, usable
from redline.data.index import order_keys
from redline.data.problems import PREFIX, is_problems, problems
from redline.data.rows import is_clean, source_rows
from redline.errors import UserError

_FIELDS = ("source", "question", "context", "answer", "answers", "title")
_FIX = "Give SQuAD's JSON, or rows with source and answer, or with question, context and answer (or answers)."
_INSTEAD = f"Take the embedded word problems, {PREFIX}easy. Or:"
_MARK = "####"  # GSM8K: what is behind it is the answer
_SPLIT_GROUP = 1 << 16
_LARGEST_JSON = 1 << 30  # bytes


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
    """Every usable row, in an order that never changes. More than half unusable, or nothing at all, is refused."""
    if is_problems(source):
        made = [Pair(_asked(one.question), "", (one.answer,), one.question) for one in problems(source)]
        return made, RowReport(source, len(made))
    return usable(source, lambda tally: _rows(source, tally), pair_of, _FIX)


def _rows(source: str, tally: RowTally) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _squad(path, tally)
    return iter(source_rows(source, tally, _FIELDS, fix=_FIX, instead=_INSTEAD))


def _squad(path: Path, tally: RowTally) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """SQuAD's layout: articles, their paragraphs, and the questions about each."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError("too large")
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        rows = [
            (f"{path.name}: {qa['id'] if 'id' in qa else qa['question']}", article, paragraph, qa)
            for article in articles
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"is not laid out as SQuAD is ({type(error).__name__})."
        raise UserError(what, where=str(path), fix=f"{_FIX} Rows go into a .jsonl file, one object a line.") from None
    for place, article, paragraph, qa in rows:
        tally.rows += 1
        named = {"title": article.get("title"), "context": paragraph.get("context")}
        yield place, {**named, "question": qa.get("question"), "answers": qa.get("answers")}


def pair_of(row: Mapping[str, Any]) -> Pair:
    """A field that holds null counts as absent."""
    if row.get("source") is not None:
        text = _text(row["source"], "source")
        return Pair(_ended(text), "", _answers(row), text)
    if row.get("question") is None:
        raise UnusableError("neither 'source' nor 'question' in it")
    question = _text(row["question"], "question").strip()
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
            raise UnusableError("'context' is neither a text nor paragraphs of one") from None
    return _text(value, "context").strip()


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Each once, in their order; of a GSM8K solution the number."""
    value = row.get("answers") if row.get("answers") is not None else row.get("answer")
    if isinstance(value, Mapping):
        value = value.get("text")
    several = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not several or several == [None]:
        raise UnusableError("no answer in it")
    found = [one.get("text") if isinstance(one, Mapping) else one for one in several]
    texts = [_text(str(one) if isinstance(one, int) and not isinstance(one, bool) else one, "answer") for one in found]
    plain = [text.rpartition(_MARK)[2].replace(",", "") if _MARK in text else text for text in texts]
    if not all(text.strip() for text in plain):
        raise UnusableError(f"nothing behind the {_MARK} of its answer")
    return tuple(dict.fromkeys(text.strip() for text in plain))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UnusableError(f"{name!r} is no text")
    if not value.strip():
        raise UnusableError(f"empty {name!r}")
    if not is_clean(value):
        raise UnusableError(f"{name!r} is binary data, not text")
    return value


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


def divided(pairs: Sequence[Pair], seed: int, fraction: float, where: str) -> tuple[list[Pair], list[Pair]]:
    """Those to train on, and those held out: groups whose seeded hash falls below `fraction`, so no order matters.

    At least one group is held out, and one is not. What is in the text of one is never trained on.
    """
    names = sorted({pair.group for pair in pairs})
    if not fraction:
        return list(pairs), []
    if len(names) < 2:
        what = "there is one text (or article) in it: none can be held out."
        raise UserError(what, where=where, fix="Give more, or set data.val_fraction=0.")
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    chance = order_keys(seed, np.array([int.from_bytes(one, "little", signed=True) for one in digests]), _SPLIT_GROUP)
    count = min(max(int((chance < np.uint64(fraction * 2.0**64)).sum()), 1), len(names) - 1)
    held = {names[place] for place in np.argsort(chance)[:count].tolist()}
    val = [pair for pair in pairs if pair.group in held]
    read = {pair.text for pair in val}
    return [pair for pair in pairs if pair.group not in held and pair.text not in read], val
