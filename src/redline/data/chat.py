"""Rows with questions and answers → conversations. A row that cannot be used is counted, and where it stands is kept.

A row is used when it has one of the known sets of fields and all of its turns are text. It is dropped when

- none of the sets of fields is there, or what stands there is no text (numbers, pictures, calls of tools);
- a prompt or an answer is empty, or nothing but white space;
- there is no turn of the assistant, it is the first, or a turn is of someone unknown.

Nothing is stripped or rewritten: an answer is learnt as it stands.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redline.data.read_stats import Tally, quoted
from redline.data.rows import is_clean, source_rows
from redline.errors import UserError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
EMPTY = "empty "  # how the reasons of rows without a question or an answer begin

# The first set of fields that a row has is taken; chats come first, for some tables repeat their question beside one.
_CHATS = (("messages", "role", "content"), ("conversations", "from", "value"))
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
_INPUT = "input"  # goes with an instruction
_FIELDS = ("messages", "conversations", *(name for pair in _PAIRS for name in pair), _INPUT)
_ROLES = {
    "system": SYSTEM,
    "developer": "developer",
    "tool": "tool",
    "user": USER,
    "human": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
}
_EXAMPLES = 5
_FORMS = "prompt and completion, question and answer, instruction and output, messages, or conversations"
_FIX = f"Give rows with {_FORMS}, all of them text."
_INSTEAD = "Name a JSONL or Parquet file."


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    place: str  # file:line
    messages: tuple[Message, ...]
    is_pair: bool  # a prompt and its completion, which need no chat template

    def key(self) -> int:
        """64 bits that stand for what is said, by whom; not for where it was found."""
        said = json.dumps([[m.role, m.content] for m in self.messages], ensure_ascii=True)
        return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")

    def as_dicts(self, count: int | None = None) -> list[dict[str, str]]:
        """The first `count` turns as chat templates take them."""
        return [{"role": m.role, "content": m.content} for m in self.messages[:count]]


@dataclass
class RowTally(Tally):
    """Counts that remember the first few bad rows."""

    examples: list[str] = field(default_factory=list)

    def bad_row(self, place: str, reason: str, fix: str) -> None:
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{place}: {quoted(reason)}")
        super().bad_row(place, reason, fix)

    @property
    def empty(self) -> int:
        return sum(count for reason, count in self.bad_rows.items() if reason.startswith(EMPTY))


class _UnusableError(Exception):
    """Why a row cannot be used."""


def read_conversations(source: str, tally: RowTally) -> Iterator[Conversation]:
    """Every usable row, in an order that never changes. More than half unusable, or nothing at all, is refused."""
    kept = False
    for place, row in source_rows(source, tally, _FIELDS, fix=_FIX, instead=_INSTEAD):
        try:
            found = conversation_of(place, row)
        except _UnusableError as reason:
            tally.bad_row(place, str(reason), _FIX)
            continue
        kept = True
        yield found
    tally.refuse_mostly_bad()
    if not kept:
        raise UserError("there is no row in it.", where=source, fix=_FIX)


def conversation_of(place: str, row: Mapping[str, Any]) -> Conversation:
    """Parquet and hubs give every column to every row: a field that holds null counts as absent."""
    for name, role, content in _CHATS:
        if row.get(name) is not None:
            return Conversation(place, _turns(row[name], name, role, content), is_pair=False)
    for prompt, completion in _PAIRS:
        if row.get(prompt) is not None and row.get(completion) is not None:
            said = _text(row[prompt], prompt), _text(row[completion], completion)
            asked = _with_input(said[0], row) if prompt == "instruction" else said[0]
            return Conversation(place, (Message(USER, asked), Message(ASSISTANT, said[1])), is_pair=True)
    raise _UnusableError("none of the known fields (" + ", ".join(str(key) for key in list(row)[:8]) + ")")


def _with_input(instruction: str, row: Mapping[str, Any]) -> str:
    given = row.get(_INPUT)
    if given is None or given == "":
        return instruction
    return f"{instruction}\n\n{_text(given, _INPUT)}"


def _turns(turns: Any, name: str, role: str, content: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise _UnusableError(f"{name!r} is no list of turns")
    messages = tuple(_message(turn, role, content) for turn in turns)
    if not any(message.role == ASSISTANT for message in messages):
        raise _UnusableError("no turn of the assistant")
    if messages[0].role == ASSISTANT:
        raise _UnusableError("begins with the assistant, who has nothing to answer")
    return messages


def _message(turn: dict[str, Any], role: str, content: str) -> Message:
    named = turn.get(role)
    who = _ROLES.get(named) if isinstance(named, str) else None
    if who is None:
        raise _UnusableError(f"a turn of {reprlib.repr(named)}, who is unknown")
    if turn.get("tool_calls"):
        raise _UnusableError("a call of tools, which is no text")
    text = turn.get(content)
    if who == SYSTEM and text == "":
        return Message(who, "")
    return Message(who, _text(text, f"{who} turn"))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _UnusableError(f"{name!r} is no text")
    if not value.strip():
        raise _UnusableError(f"{EMPTY}{name!r}")
    if not is_clean(value):
        raise _UnusableError(f"{name!r} is binary data, not text")
    return value


# ----------------------------------------------------------------------------------------------------
# The rows of a source that can be used, and what became of the others.


T = TypeVar("T")
Fields = Mapping[str, Any]  # of a row


class UnusableError(Exception):
    """Why a row cannot be used."""


@dataclass(frozen=True)
class RowReport:
    """What became of a source's rows."""

    source: str
    rows: int
    bad: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # why rows are bad
    examples: list[str] = field(default_factory=list)  # where the first of them stand

    def line(self) -> str:
        """For people."""
        told = f"{self.source}: {self.rows:,} rows"
        if not self.bad:
            return told
        why = ", ".join(f"{count:,} × {reason}" for reason, count in self.reasons.items())
        return f"{told}, of which {self.bad:,} cannot be used: {why}; the first is {self.examples[0]}"


def usable(
    source: str, rows: Callable[[RowTally], Iterable[tuple[str, Fields]]], read: Callable[[Fields], T], fix: str
) -> tuple[list[T], RowReport]:
    """Every usable row, in an order that never changes. More than half unusable, or nothing at all, is refused."""
    tally, found = RowTally(source), []
    for place, row in rows(tally):
        try:
            found.append(read(row))
        except UnusableError as reason:
            tally.bad_row(place, str(reason), fix)
    tally.refuse_mostly_bad()
    if not found:
        raise UserError("there is no row in it.", where=source, fix=fix)
    counts = tally.counts()
    return found, RowReport(source, tally.rows, counts["bad_rows"], counts["bad_rows_by_reason"], tally.examples)
