"""Sources of records: GSM8K's rows, rows that name their parts, and the embedded word problems; and their split.

GSM8K ends a solution with `#### N`. Its socratic files write each step as `sub-question ** step`: the sub-questions
are the plan, the steps the execution. A row that cannot be used is counted, and where it stands is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.data.chat import RowReport, UnusableError, usable
from redline.data.index import order_keys
from redline.data.problems import PREFIX, Record, is_problems, problems
from redline.data.rows import is_clean, source_rows
from redline.errors import UserError

__all__ = ["Divided", "Record", "divided", "read_records"]

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
